"""One piece of work outside the worker's own Python, and how it ends.

An execution has a name that is chosen, and stored with the attempt, before anything is started under it. If its watcher
dies or is stopped, the next one finds it by that name and does not start it again. It belongs to one try of the task:
after a failure that counts, the next try has another name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from orchestrator.domain.executors.options import ExecutorOptions
from orchestrator.errors import PayloadError


@dataclass(frozen=True, kw_only=True)
class Execution:
    """One execution, as its executor gets it."""

    name: str
    """Unique for each try of a task, the same for all its watchers: letters, digits and `-`, at most 63, so that it can
    be the name of a job elsewhere."""
    task: str
    """The name of the task."""
    task_id: str
    attempt: int
    """The first attempt that this execution was started by; later ones watch it."""
    queue: str
    options: ExecutorOptions
    arguments: tuple[Any, ...] = ()
    input: Mapping[str, Any] = field(default_factory=dict)
    """Plain data: the keywords of a call, or the merged input of a step."""
    timeout: float | None = None
    """Seconds that it may run in all; then the worker cancels it."""
    run_id: str | None = None
    workflow: str | None = None
    step: str | None = None
    index: int | None = None
    count: int | None = None

    @property
    def specification(self) -> bytes:
        """The specification for a program that does the work, as one JSON document."""
        said = {
            "task": self.task,
            "task_id": self.task_id,
            "attempt": self.attempt,
            "run_id": self.run_id,
            "workflow": self.workflow,
            "step": self.step,
            "parallel_index": self.index,
            "parallel_count": self.count,
            "arguments": self.arguments,
            "input": self.input,
        }
        known = {name: value for name, value in said.items() if value not in (None, ())}
        return strict_json(known, f"The input of task {self.task!r}")


@dataclass(frozen=True)
class Finished:
    """It has done its work."""

    output: Any = None
    """Plain data."""


@dataclass(frozen=True)
class Broken:
    """It has failed. Where the executor itself cannot be reached there is no outcome yet: it goes on trying."""

    kind: str
    """As the name of an exception: `ExitCode`, `ServiceError`, `JobFailed`."""
    message: str
    retryable: bool = True
    """Another try may succeed; whether there is one, the task's own policy says."""
    detail: str = ""
    """Details for people: the end of stderr, a remote traceback."""
    delay: float | None = None
    """Seconds before the next try; None: the task's own policy says."""


Outcome = Finished | Broken


def strict_json(value: Any, what: str) -> bytes:
    """Return plain data as JSON, or say which number of it JSON does not have: NaN or infinity would arrive as null."""
    data = msgspec.json.encode(value)
    if b"null" in data:  # which stands for None as well
        found = _no_number(value)
        if found is not None:
            place, number = found
            at = f" at `{place}`" if place else ""
            raise PayloadError(
                f"{what} goes out as JSON, which has no NaN and no infinity; found {number!r}{at}. Give null or a text."
            )
    return data


def _no_number(value: Any) -> tuple[str, float] | None:
    """Return a number that JSON does not have, with its place, if there is one."""
    left = [("", value)]
    while left:
        place, item = left.pop()
        if isinstance(item, float):
            if not math.isfinite(item):
                return place, item
        elif isinstance(item, dict):
            left += [(f"{place}.{key}" if place else str(key), inner) for key, inner in item.items()]
        elif isinstance(item, (list, tuple)):
            left += [(f"{place}[{number}]", inner) for number, inner in enumerate(item)]
    return None
