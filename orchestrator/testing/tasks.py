"""Test tasks in memory: record them, run them immediately, or run them by a clock that can be advanced."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from math import inf
from types import SimpleNamespace
from typing import Any, Self

from orchestrator.errors import InvalidTask, did_you_mean
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.checks import check_timezone
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.sdk.tasks import options as task_options
from orchestrator.sdk.tasks.options import OPTION_NAMES
from orchestrator.sdk.tasks.task import Task
from orchestrator.testing.memory_calls import MemoryCalls
from orchestrator.testing.memory_tasks import MemoryTasks
from orchestrator.testing.records import StartedRun, TestedTask

_MAX_LISTED = 20
"""The maximum number of calls listed in the message of a failed assertion."""


class TaskTest:
    """Keeps the tasks of an application in memory during the `with` block.

    with TaskTest(app) as test:
        send.options(delay=60).enqueue("ann@example.com")
        test.skip(minutes=1)
    """

    __test__ = False

    def __init__(self, app: Orchestrator, *, eager: bool = False, start: datetime | None = None) -> None:
        """`eager` runs each task to its end when it is enqueued. `start` is the initial time of the clock."""
        if start is not None:
            check_timezone("start", start)
        self._app = app
        self._leader = MemoryTasks(app, time.time() if start is None else start.timestamp(), eager=eager)

    def __enter__(self) -> Self:
        client, leader = self._app._client, self._leader
        self._saved = vars(client).get("_make_backend"), client._backend, vars(task_options)["time"]
        calls: Any = MemoryCalls(leader)
        client._backend, vars(client)["_make_backend"] = calls, lambda: calls
        vars(task_options)["time"] = SimpleNamespace(time=lambda: leader.now)  # used to convert `eta` to a delay
        return self

    def __exit__(self, *_: object) -> None:
        self._leader.close()
        client = self._app._client
        factory, client._backend, vars(task_options)["time"] = self._saved
        vars(client).pop("_make_backend")
        if factory is not None:
            vars(client)["_make_backend"] = factory

    # -- assertions

    @property
    def now(self) -> datetime:
        return datetime.fromtimestamp(self._leader.now, UTC)

    def enqueued(self, task: Task[..., Any] | str | None = None, /, **expected: Any) -> list[TestedTask]:
        """Return the enqueued calls of a task, or of all tasks, with these arguments and options, in order."""
        if task is not None:
            self._check_expected(self._app.find_task(task if isinstance(task, str) else task.name), expected)
        name = task.name if isinstance(task, Task) else task
        return [call for call in self._leader.tasks.values() if name in (None, call.name) and _fits(call, expected)]

    def assert_enqueued(self, task: Task[..., Any] | str, /, **expected: Any) -> TestedTask:
        """Return the first call of a task with these arguments and options, or fail and list the enqueued calls."""
        if matches := self.enqueued(task, **expected):
            return matches[0]
        options = ", ".join(f"{name}={value!r}" for name, value in expected.items())
        others = list(self._leader.tasks.values())
        lines = "".join(f"\n  {other!r}" for other in others[:_MAX_LISTED])
        more = f"\n  and {len(others) - _MAX_LISTED:,} more" if len(others) > _MAX_LISTED else ""
        name = task if isinstance(task, str) else task.name
        raise AssertionError(
            f"Task {name!r} was not enqueued{f' with {options}' if options else ''}. "
            + (f"Enqueued:{lines}{more}" if others else "Nothing was enqueued.")
        )

    def started(self, what: CodeWorkflow[..., Any] | str | None = None, /) -> list[StartedRun]:
        """Return the started runs in order: all, or those of a workflow or name."""
        name = what.name if isinstance(what, CodeWorkflow) else what
        return [run for run in self._leader.started if name in (None, run.name)]

    @staticmethod
    def _check_expected(task: Task[..., Any], expected: Mapping[str, Any]) -> None:
        takes = task._signature.takes
        known = (*(takes or ()), *OPTION_NAMES)
        unknown = None if takes is None else next((name for name in expected if name not in known), None)
        if unknown is not None:
            raise InvalidTask(
                f"Task {task.name!r} has no argument or option {unknown!r}.{did_you_mean(unknown, known)}"
            )

    # -- running

    def drain(self) -> list[TestedTask]:
        """Run all due tasks and their consequences, without time passing. Return the tasks that ran, in order."""
        return self._leader.run_until(self._leader.now)

    def skip(self, seconds: float = 0.0, **parts: float) -> list[TestedTask]:
        """Advance the clock, `skip(60)` or `skip(hours=24)`, and run the tasks that become due, each at its time.

        Delays, retries, rate limits and schedules in the code follow this clock. Return the tasks that ran, in order.
        """
        seconds += timedelta(**parts).total_seconds()
        if not 0 <= seconds < inf:
            raise InvalidTask(f"skip(…): expected seconds, 0 or more, found {seconds:g}. Time does not go back.")
        until = self._leader.now + seconds
        ran = self._leader.run_until(until)
        self._leader.now = until
        return ran


def _fits(task: TestedTask, expected: Mapping[str, Any]) -> bool:
    if not expected:
        return True
    arguments = task.arguments
    for name, value in expected.items():
        actual = arguments[name] if name in arguments else task.option(name)
        if isinstance(value, timedelta) and isinstance(actual, float):
            value = value.total_seconds()
        if actual != value:
            return False
    return True


@contextmanager
def recording(app: Orchestrator) -> Iterator[TaskTest]:
    """Record the tasks and runs that the block enqueues and starts. Nothing runs until `drain()` or `skip(…)`."""
    with TaskTest(app) as test:
        yield test


@contextmanager
def eager(app: Orchestrator) -> Iterator[TaskTest]:
    """Run each task to its end as soon as the block enqueues it, with its retries, delays and follow-up tasks."""
    with TaskTest(app, eager=True) as test:
        yield test
