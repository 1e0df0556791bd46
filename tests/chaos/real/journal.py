"""The record of an experiment, outside the system under test.

Tasks, the client and the driver append lines to files. All times are of the machine's monotonic clock, so that lines
of different processes can be compared. A worker is identified by its process group: the pid of its parent, which all
its descendants share.

    executions    begin TASK ATTEMPT GROUP PID TIME | end TASK ATTEMPT GROUP PID TIME OUTCOME
                  child TASK | limit TASK NAME NUMBER | follows TASK END BY | step RUN NAME TASK
                  stage RUN NAME TASK | fire SCHEDULE TIME TASK | exit PID TIME
    commits       task ID | run ID | journey RUN WIDTH | cancel ID | saying WHAT RUN NUMBER | said WHAT RUN NUMBER
                  pulled REQUEST TASK LEASE TIME | heard LEASE TIME | let-go LEASE TIME OUTCOME
                  schedule NAME first TIME | schedule NAME next TIME
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


def append(path: Path | str, *fields: object) -> None:
    """Append one line atomically, even with concurrent writers."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, (" ".join(map(str, fields)) + "\n").encode())
    finally:
        os.close(descriptor)


@dataclass
class Execution:
    """An attempt that a process began."""

    task: str
    attempt: int
    worker: int
    pid: int
    began: float
    ended: float | None = None
    outcome: str = "cut short"


@dataclass(frozen=True)
class Span:
    """A period in which a worker could not be heard."""

    began: float
    ended: float


@dataclass
class Journal:
    """The files of one experiment, and the driver's record of deaths and unheard workers."""

    folder: Path
    _unheard: dict[int, list[Span]] = field(default_factory=lambda: defaultdict(list))
    _deaths: dict[int, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _exit_times: dict[int, float] | None = None

    @property
    def execution_log(self) -> Path:
        return self.folder / "executions"

    @property
    def commit_log(self) -> Path:
        return self.folder / "commits"

    # -- the driver

    @contextmanager
    def unheard(self, worker: int, settling: float = 1.0) -> Iterator[None]:
        """Record that a worker cannot be heard during the block and until it has settled."""
        began = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._unheard[worker].append(Span(began, time.monotonic() + settling))

    def note_deaths(self, processes: Iterable[int]) -> None:
        """Record that processes are about to be killed."""
        with self._lock:
            for pid in processes:
                self._deaths.setdefault(pid, time.monotonic())

    # -- the checker

    def was_unheard(self, worker: int, began: float, ended: float, at_least: float) -> bool:
        """Return whether a worker was unheard for `at_least` seconds on end, in a period that overlaps the given
        one."""
        joined: list[Span] = []
        for span in sorted(self._unheard.get(worker, ()), key=lambda span: span.began):
            if joined and span.began <= joined[-1].ended:
                joined[-1] = Span(joined[-1].began, max(span.ended, joined[-1].ended))
            else:
                joined.append(span)
        return any(
            span.began <= ended and span.ended >= began and span.ended - span.began >= at_least for span in joined
        )

    def end_of(self, execution: Execution) -> float:
        """Return when an execution ended: as recorded, or with its process; its start if the end is unknown.

        The death of its worker does not count: a process that was asked to end may have ended long before.
        """
        if execution.ended is not None:
            return execution.ended
        ends_known = [ends[execution.pid] for ends in (self._deaths, self._exits()) if execution.pid in ends]
        return max(execution.began, min(ends_known, default=execution.began))

    def _exits(self) -> dict[int, float]:
        """Return when tasks ended their own processes, by process id."""
        if self._exit_times is None:
            self._exit_times = {int(pid): float(at) for pid, at in self.of_tasks("exit")}
        return self._exit_times

    def executions(self) -> list[Execution]:
        """Return every execution that began, in order."""
        found: list[Execution] = []
        running: dict[tuple[str, str, str], Execution] = {}
        for word, *rest in self._lines(self.execution_log):
            if word == "begin":
                task, attempt, worker, pid, at = rest
                execution = Execution(task, int(attempt), int(worker), int(pid), float(at))
                found.append(execution)
                running[task, attempt, pid] = execution
            elif word == "end":
                task, attempt, _, pid, at, outcome = rest
                if (begun := running.pop((task, attempt, pid), None)) is not None:
                    begun.ended, begun.outcome = float(at), outcome
        return found

    def of_tasks(self, word: str) -> list[list[str]]:
        """Return the fields after `word` of all lines of tasks that begin with it."""
        return [rest for first, *rest in self._lines(self.execution_log) if first == word]

    def of_clients(self, word: str) -> list[list[str]]:
        """Return the fields after `word` of all lines of clients that begin with it."""
        return [rest for first, *rest in self._lines(self.commit_log) if first == word]

    def committed_tasks(self) -> set[str]:
        """Return the tasks whose enqueue returned, to a client or to a task."""
        return {task for (task,) in (*self.of_clients("task"), *self.of_tasks("child"))}

    def committed_runs(self) -> set[str]:
        """Return the runs whose start returned."""
        return {run for (run,) in self.of_clients("run")}

    @staticmethod
    def _lines(path: Path) -> Iterator[list[str]]:
        if path.exists():
            with path.open(encoding="utf-8") as file:
                for line in file:
                    yield line.split()
