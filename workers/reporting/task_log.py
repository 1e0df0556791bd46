"""The log lines of a worker about its tasks: received, succeeded, retried, failed.

Each event gets a line. If a task has more than `_MAX_LINES` events of a kind in `_WINDOW` seconds, the others are
counted in a summary line; while that lasts, the task gets only summaries.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path

from orchestrator import telemetry
from orchestrator.domain.code.activation import Activated
from orchestrator.domain.code.commands import FailRun
from orchestrator.domain.ids import to_text
from orchestrator.domain.tasks.outcomes import AttemptReport, RetryTask, after_failure
from orchestrator.domain.tasks.task import Failed, Lost, Succeeded, TaskError
from orchestrator.errors import TaskAborted
from orchestrator.telemetry import get_logger, retry_log
from orchestrator.workers.reporting.task_output import add_fields
from orchestrator.workers.running.job import Job

log = get_logger("worker")

_WINDOW = 5.0
_MAX_LINES = 50
_KINDS = ("received", "succeeded", "retried", "failed")
_RECEIVED, _SUCCEEDED, _RETRIED, _FAILED = range(len(_KINDS))
_LEVELS = (logging.INFO, logging.INFO, logging.WARNING, logging.ERROR)
_REVOKED = "the task was cancelled, or another attempt counts now"
_LOCATION = re.compile(r'^[ |]*File "(.*)", line (\d+)', re.MULTILINE)
_OWN_FOLDER = f"{Path(telemetry.__file__).parent}/"


class _Tally:
    """Counts the events of one task by kind. Threads draw numbers without waiting for each other."""

    __slots__ = ("_window_starts", "latest", "numbers", "until")

    def __init__(self) -> None:
        self.numbers = [count() for _ in _KINDS]
        self.until = [_MAX_LINES] * len(_KINDS)
        """By kind, the number from which events get no line of their own."""
        self._window_starts = [0] * len(_KINDS)
        """By kind, the first number of the current window."""
        self.latest: tuple[Job, TaskError] | None = None
        """The latest failure that got no line."""

    def take_suppressed(self) -> list[int]:
        """Return how many events of each kind got no line, and begin a window."""
        return [self._take_suppressed(kind) for kind in range(len(_KINDS))]

    def _take_suppressed(self, kind: int) -> int:
        begun, end = self._window_starts[kind], next(self.numbers[kind])
        suppressed = end - max(begun, min(end, self.until[kind]))
        self._window_starts[kind] = end + 1
        self.until[kind] = end + 1 + (_MAX_LINES if end - begun <= _MAX_LINES else 0)
        return suppressed


class TaskLog:
    """Logs the events of the jobs of one worker process."""

    def __init__(self) -> None:
        self._tallies: dict[str, _Tally] = {}
        self._since = time.monotonic()
        self._logs_all = log.isEnabledFor(logging.INFO)
        """Whether successes are logged, too."""

    def received(self, jobs: Iterable[Job]) -> None:
        if self._logs_all:
            for job in jobs:
                if self._has_room(job.dispatch.name, _RECEIVED) and not job.is_turn:
                    _log(job, logging.INFO, "task.received attempt=%d", job.dispatch.attempt)

    def ended(self, job: Job, report: AttemptReport) -> None:
        if isinstance(report, Succeeded):
            if self._logs_all and self._has_room(job.dispatch.name, _SUCCEEDED):
                self._succeeded(job, _duration(report.duration))
        elif isinstance(report, Failed):
            self._failed(job, report)
        elif isinstance(report, Lost):
            reason = report.reason or "killed, out of memory, or crashed"
            _log(job, logging.WARNING, "task.lost attempt=%d reason=%s", report.attempt, reason)
        elif isinstance(report, Activated):
            for command in report.commands:
                if isinstance(command, FailRun) and self._may_log(job, _FAILED, command.error):
                    _log(job, logging.ERROR, "run.failed error=%s", _first_line(command.error), error=command.error)

    def dropped(self, job: Job) -> None:
        """Log, once, that the result of a successful attempt was dropped."""
        if self._logs_all and job.completion is None and not _is_revoked(job):
            job.interrupted_by = TaskAborted
            _log(job, logging.INFO, "task.result_dropped attempt=%d: %s", job.dispatch.attempt, _REVOKED)

    def _succeeded(self, job: Job, took: str) -> None:
        if job.completion is None and _is_revoked(job):  # a completed transaction counts in any case
            _log(
                job,
                logging.INFO,
                "task.result_dropped attempt=%d duration=%s: %s",
                job.dispatch.attempt,
                took,
                _REVOKED,
            )
        else:
            _log(job, logging.INFO, "task.succeeded attempt=%d duration=%s", job.dispatch.attempt, took)

    def _failed(self, job: Job, report: Failed) -> None:
        error, attempt, took = report.error, job.dispatch.attempt, _duration(report.duration)
        if _is_revoked(job):
            _log(job, logging.INFO, "task.stopped attempt=%d duration=%s: %s", attempt, took, _REVOKED)
            return
        policy, failures = job.options.retry, job.dispatch.failures
        decision = after_failure(report, policy, failures, 0.5)
        tried = f"{failures + 1}/{policy.max + 1}"
        if not isinstance(decision, RetryTask):
            if self._may_log(job, _FAILED, error):
                values = attempt, tried, took, _first_line(error)
                _log(job, logging.ERROR, "task.failed attempt=%d try=%s duration=%s error=%s", *values, error=error)
        elif not report.charged:
            if self._logs_all and self._has_room(job.dispatch.name, _RETRIED):
                arguments = attempt, _duration(decision.delay), error.message
                _log(job, logging.INFO, "task.retry_requested attempt=%d delay=%s reason=%s", *arguments)
        elif self._may_log(job, _RETRIED, error):
            prefix = "~" if report.delay is None and policy.jitter else ""
            detail = error if log.isEnabledFor(logging.DEBUG) else None
            _log(
                job,
                logging.WARNING,
                "task.retried attempt=%d try=%s duration=%s delay=%s at=%s error=%s",
                *(attempt, tried, took, prefix + _duration(decision.delay), _location(error), _first_line(error)),
                error=detail,
            )

    # -- summaries

    def flush_due(self, now: float) -> None:
        """Log due summaries, and write log lines that could not be written before."""
        if now - self._since >= _WINDOW:
            self.summarize(now)
        self._logs_all = log.isEnabledFor(logging.INFO)
        retry_log()

    def summarize(self, now: float) -> None:
        """Log the counts of events that got no line."""
        seconds, self._since = now - self._since, now
        for name, tally in list(self._tallies.items()):
            suppressed = tally.take_suppressed()
            if any(suppressed):
                latest, tally.latest = tally.latest, None
                _summarize(name, suppressed, latest, seconds)

    def _has_room(self, name: str, kind: int) -> bool:
        """Count an event. Return whether it gets a line of its own."""
        tally = self._tallies.get(name) or self._tallies.setdefault(name, _Tally())
        return next(tally.numbers[kind]) < tally.until[kind]

    def _may_log(self, job: Job, kind: int, error: TaskError) -> bool:
        """Count a failure. Return whether it gets a line of its own."""
        if self._has_room(job.dispatch.name, kind):
            return True
        self._tallies[job.dispatch.name].latest = job, error
        return False


def _summarize(name: str, suppressed: Sequence[int], latest: tuple[Job, TaskError] | None, seconds: float) -> None:
    counts = ", ".join(f"{count:,} {kind}" for kind, count in zip(_KINDS, suppressed, strict=True) if count)
    level = max(level for level, count in zip(_LEVELS, suppressed, strict=True) if count)
    last = ""
    if latest is not None:
        job, error = latest
        last = f"; the latest failure, {to_text(job.dispatch.id)}: {_first_line(error)}"
    log.log(level, "task.summary task=%s seconds=%.0f: %s without a line each%s", name, seconds, counts, last)


def _log(job: Job, level: int, text: str, *values: object, error: TaskError | None = None) -> None:
    if not log.isEnabledFor(level):
        return
    record = log.makeRecord(log.name, level, "", 0, text, values, None)
    if error is not None and not _is_internal(error.traceback):
        record.exc_text = error.traceback.rstrip()
    add_fields(record, job)
    with contextlib.suppress(Exception):  # an error in a filter or handler of the application must not lose a report
        log.handle(record)


def _is_revoked(job: Job) -> bool:
    """Return whether the attempt was stopped because it was cancelled or taken for lost."""
    return job.interrupted_by is not None and issubclass(job.interrupted_by, TaskAborted)


def _first_line(error: TaskError) -> str:
    return f"{error.kind.removeprefix('orchestrator.errors.')}: {error.message}".split("\n", 1)[0]


def _location(error: TaskError) -> str:
    """Return the file and line that raised an error."""
    locations = _LOCATION.findall(error.traceback)
    return f"{locations[-1][0].rpartition('/')[2]}:{locations[-1][1]}" if locations else "?"


def _duration(seconds: float) -> str:
    """Format a duration."""
    return f"{1000 * seconds:.3g}ms" if seconds < 1 else f"{seconds:.3g}s" if seconds < 100 else f"{seconds:.0f}s"


def _is_internal(traceback: str) -> bool:
    """Return whether a traceback has no line of user code, as for arguments that do not fit."""
    return all(path.startswith(_OWN_FOLDER) for path, _ in _LOCATION.findall(traceback))
