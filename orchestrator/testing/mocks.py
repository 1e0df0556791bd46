"""What tests put in the place of tasks and child workflows."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.domain.tasks.task import TaskError
from orchestrator.errors import InvalidTask
from orchestrator.sdk.code.workflow import CodeWorkflow, Registry
from orchestrator.sdk.tasks.failure import describe
from orchestrator.sdk.tasks.signature import Signature
from orchestrator.sdk.tasks.task import Task
from orchestrator.sdk.values.payload import decode_call, encode_value

Mocks = Mapping[Task[..., Any] | CodeWorkflow[..., Any] | str, Any]
"""By task, child workflow or name: a value, an exception to raise, a function of the same arguments, or `After`."""


@dataclass(frozen=True)
class After:
    """A mock that takes its time, by the test's clock; `After(math.inf)` never ends."""

    seconds: float
    mock: Any = None


class MockBook:
    """The mocks of one test."""

    def __init__(self) -> None:
        self._mocks: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._mocks

    def add(self, mocks: Mocks, registry: Registry) -> None:
        """Put these in the place of what they are named after; a name that nothing has would never be called."""
        for key, mock in mocks.items():
            if isinstance(key, str):
                registry.find(key)
            elif not isinstance(key, (Task, CodeWorkflow)):
                raise InvalidTask(f"mocks: expected tasks, workflows or their names, found {key!r:.200}.")
            self._mocks[key if isinstance(key, str) else key.name] = mock

    def seconds(self, name: str) -> float:
        """Return how long a mock takes."""
        mock = self._mocks.get(name)
        return mock.seconds if isinstance(mock, After) else 0.0

    async def call(self, name: str, payload: bytes, signature: Signature | None, limit: int) -> bytes | TaskError:
        """Call a mock as a worker would call what it stands for: with typed arguments, and data for a result."""
        try:
            if name not in self._mocks:
                raise InvalidTask(
                    f"Task {name!r} has no mock, and a test runs no real tasks. Give it one: mocks={{{name}: …}}."
                )
            mock = self._mocks[name]
            mock = mock.mock if isinstance(mock, After) else mock
            arguments, keywords = decode_call(payload)
            if signature is not None:
                arguments, keywords = signature.restore(arguments, keywords)
            if isinstance(mock, BaseException) or (isinstance(mock, type) and issubclass(mock, BaseException)):
                raise mock
            value = mock(*arguments, **keywords) if callable(mock) else mock
            if inspect.isawaitable(value):
                value = await value
            return encode_value(value, f"The result of the mock of {name!r}", limit)
        except Exception as error:  # noqa: BLE001  # a mock that raises is a task that failed
            return describe(error)
