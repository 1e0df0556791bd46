"""Run executions with an executor, without a worker."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

from orchestrator.domain.executors.options import Execution, Outcome
from orchestrator.domain.executors.record import Record
from orchestrator.settings import load_settings
from orchestrator.workers.executors import driving
from orchestrator.workers.executors.watched import Watched
from orchestrator.workers.running.job import Stage
from tests.waiting import eventually

E = TypeVar("E")
T = TypeVar("T")


class Heard:
    """Collects the log lines and progress that a watcher receives."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.marks: list[tuple[float, float | None, str]] = []

    def log(self, line: str, *, level: str = "info") -> None:
        for one in line.split("\n"):
            self.lines.append(f"{level or ('warning' if 'error' in one.lower() else 'info')}: {one}")

    def ended(self) -> None: ...

    def progress(self, done: float, total: float | None = None, message: str = "") -> None:
        self.marks.append((done, total, message))


class Driver(Generic[E]):
    """Creates an executor for each test case, and closes it afterwards."""

    def __init__(self, make: Callable[..., E], seconds: float = 60) -> None:
        self._make = make
        self._seconds = seconds

    def drive(self, steps: Callable[[E], Awaitable[T]], **arguments: Any) -> T:
        async def go() -> T:
            executor: Any = self._make(**arguments)
            try:
                return await asyncio.wait_for(steps(executor), self._seconds)
            finally:
                await executor.close()

        return asyncio.run(go())

    def run(self, requested: Execution, heard: Heard | None = None) -> Outcome:
        async def steps(executor: Any) -> Outcome:
            found: Outcome = await executor.watch(requested, await executor.submit(requested), heard or Heard())
            return found

        return self.drive(steps)


class Reports:
    """Collects the reports of a driver, as if the leader applied them at once."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def report(self, report: Any, _: Any = None, applied: Callable[[], object] | None = None) -> None:
        self.made.append(report)
        if applied is not None:
            applied()


async def watched_to_the_end(executor: Any, requested: Execution, timeout: float) -> Any:
    """Let the driver of a worker watch an execution to its end; return its report."""

    async def kept(_: Any, report: Any) -> Any:
        return report

    reports = Reports()
    runner = SimpleNamespace(
        kept=kept,
        finished=lambda _, output: output,
        failure=lambda _, error: error,
        ended=lambda *_: None,
    )
    outbox, task_log = SimpleNamespace(log_lines=lambda *_: None), SimpleNamespace(ended=lambda *_: None)
    setup: Any = SimpleNamespace(settings=load_settings(environ={}))
    arguments: Any = runner, outbox, reports, task_log, setup, 1
    job: Any = SimpleNamespace(
        **{"stage": Stage.RUNNING, "secrets": (), "interrupted_by": None, "fields": {}, "started_at": 0.0},
        **{"finish": lambda: True, "uninterruptible": lambda: None, "options": SimpleNamespace(timeout=timeout)},
        dispatch=SimpleNamespace(id=b"", attempt=1),
    )
    record = Record(name=requested.name, attempt=1, failures=0, since=0.0)
    await driving.Driver(*arguments)._run_to_end(Watched(job, executor, requested, record))
    return reports.made[-1]


def execution(options: Any, *arguments: Any, **more: Any) -> Execution:
    """Return an execution, a first attempt by default."""
    defaults = {"name": f"task-{uuid.uuid4()}-1", "task": "sums.double", "task_id": "1", "attempt": 1, "queue": "q"}
    return Execution(**{**defaults, "options": options, "arguments": arguments, **more})


async def until(condition: Callable[[], Any]) -> None:
    await asyncio.to_thread(eventually, condition)


def ran(folder: Path) -> list[int]:
    """Return the process ids recorded by jobs."""
    marks = folder / "ran"
    return [int(line) for line in marks.read_text().split()] if marks.exists() else []
