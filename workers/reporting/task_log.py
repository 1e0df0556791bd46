"""The lines of a worker's log about its tasks: received, succeeded, retried, failed.

One line each, as long as they are few. Of a task that has more than `_MOST` of a kind in `_WINDOW` seconds, the rest is
counted in one line; as long as that lasts, it gets no others.
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
_MOST = 50
_KINDS = ("received", "succeeded", "retried", "failed")
_RECEIVED, _SUCCEEDED, _RETRIED, _FAILED = range(len(_KINDS))
_LEVELS = (logging.INFO, logging.INFO, logging.WARNING, logging.ERROR)
_REVOKED = "the task was cancelled, or another attempt counts now"
_PLACE = re.compile(r'^[ |]*File "(.*)", line (\d+)', re.MULTILINE)
_OURS = f"{Path(telemetry.__file__).parent}/"


class _Tally:
    """How often each kind of thing happened to one task: numbers that threads draw, without waiting for each other."""

    __slots__ = ("_begun", "latest", "numbers", "until")

    def __init__(self) -> None:
        self.numbers = [count() for _ in _KINDS]
        self.until = [_MOST] * len(_KINDS)
        """Lower numbers get lines of their own."""
        self._begun = [0] * len(_KINDS)
        """The first numbers of this window."""
        self.latest: tuple[Job, TaskError] | None = None
        """The latest failure that got no line."""

    def take_hidden(self) -> list[int]:
        """Return how many of each kind got no line of their own, and begin a window."""
        return [self._take_hidden(kind) for kind in range(len(_KINDS))]

    def _take_hidden(self, kind: int) -> int:
        begun, end = self._begun[kind], next(self.numbers[kind])
        hidden = end - max(begun, min(end, self.until[kind]))
        self._begun[kind] = end + 1
        self.until[kind] = end + 1 + (_MOST if end - begun <= _MOST else 0)
        return hidden


class TaskLog:
    """Logs what becomes of the jobs of one worker process."""

    def __init__(self) -> None:
        self._tallies: dict[str, _Tally] = {}
        self._since = time.monotonic()
        self._logs_all = log.isEnabledFor(logging.INFO)
        """Also of what goes well."""

    def received(self, jobs: Iterable[Job]) -> None:
        if self._logs_all:
            for job in jobs:
                if self._has_room(job.dispatch.name, _RECEIVED) and not job.is_turn:
                    _log(job, logging.INFO, "task.received attempt=%d", job.dispatch.attempt)

    def ended(self, job: Job, report: AttemptReport) -> None:
        if isinstance(report, Succeeded):
            if self._logs_all and self._has_room(job.dispatch.name, _SUCCEEDED):
                self._succeeded(job, _long(report.duration))
        elif isinstance(report, Failed):
            self._failed(job, report)
        elif isinstance(report, Lost):
            reason = report.reason or "killed, out of memory, or crashed"
            _log(job, logging.WARNING, "task.lost attempt=%d reason=%s", report.attempt, reason)
        elif isinstance(report, Activated):
            for command in report.commands:
                if isinstance(command, FailRun) and self._may_log(job, _FAILED, command.error):
                    _log(job, logging.ERROR, "run.failed error=%s", _said(command.error), error=command.error)

    def dropped(self, job: Job) -> None:
        """Log, once, that an attempt that has succeeded did not count any more."""
        if self._logs_all and job.completion is None and not _is_revoked(job):
            job.interrupted_by = TaskAborted
            _log(job, logging.INFO, "task.result_dropped attempt=%d: %s", job.dispatch.attempt, _REVOKED)

    def _succeeded(self, job: Job, took: str) -> None:
        if job.completion is None and _is_revoked(job):  # one that has committed its transaction counts in any case
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
        error, attempt, took = report.error, job.dispatch.attempt, _long(report.duration)
        if _is_revoked(job):
            _log(job, logging.INFO, "task.stopped attempt=%d duration=%s: %s", attempt, took, _REVOKED)
            return
        policy, failures = job.options.retry, job.dispatch.failures
        decision = after_failure(report, policy, failures, 0.5)
        tried = f"{failures + 1}/{policy.max + 1}"
        if not isinstance(decision, RetryTask):
            if self._may_log(job, _FAILED, error):
                values = attempt, tried, took, _said(error)
                _log(job, logging.ERROR, "task.failed attempt=%d try=%s duration=%s error=%s", *values, error=error)
        elif not report.charged:
            if self._logs_all and self._has_room(job.dispatch.name, _RETRIED):
                asked = attempt, _long(decision.delay), error.message
                _log(job, logging.INFO, "task.retry_requested attempt=%d delay=%s reason=%s", *asked)
        elif self._may_log(job, _RETRIED, error):
            about = "~" if report.delay is None and policy.jitter else ""
            shown = error if log.isEnabledFor(logging.DEBUG) else None
            _log(
                job,
                logging.WARNING,
                "task.retried attempt=%d try=%s duration=%s delay=%s at=%s error=%s",
                *(attempt, tried, took, about + _long(decision.delay), _place(error), _said(error)),
                error=shown,
            )

    # -- many

    def flush_due(self, now: float) -> None:
        """Log the counts of suppressed lines, if it is time; write what could not be written."""
        if now - self._since >= _WINDOW:
            self.summarize(now)
        self._logs_all = log.isEnabledFor(logging.INFO)
        retry_log()

    def summarize(self, now: float) -> None:
        """Log the counts of suppressed lines."""
        seconds, self._since = now - self._since, now
        for name, tally in list(self._tallies.items()):
            hidden = tally.take_hidden()
            if any(hidden):
                latest, tally.latest = tally.latest, None
                _summarize(name, hidden, latest, seconds)

    def _has_room(self, name: str, kind: int) -> bool:
        """Count something; say whether it gets a line of its own."""
        tally = self._tallies.get(name) or self._tallies.setdefault(name, _Tally())
        return next(tally.numbers[kind]) < tally.until[kind]

    def _may_log(self, job: Job, kind: int, error: TaskError) -> bool:
        """Count a failure; say whether it gets a line of its own."""
        if self._has_room(job.dispatch.name, kind):
            return True
        self._tallies[job.dispatch.name].latest = job, error
        return False


def _summarize(name: str, hidden: Sequence[int], latest: tuple[Job, TaskError] | None, seconds: float) -> None:
    counts = ", ".join(f"{count:,} {kind}" for kind, count in zip(_KINDS, hidden, strict=True) if count)
    level = max(level for level, count in zip(_LEVELS, hidden, strict=True) if count)
    last = ""
    if latest is not None:
        job, error = latest
        last = f"; the latest failure, {to_text(job.dispatch.id)}: {_said(error)}"
    log.log(level, "task.summary task=%s seconds=%.0f: %s without a line each%s", name, seconds, counts, last)


def _log(job: Job, level: int, text: str, *values: object, error: TaskError | None = None) -> None:
    if not log.isEnabledFor(level):
        return
    record = log.makeRecord(log.name, level, "", 0, text, values, None)
    if error is not None and not _is_ours(error.traceback):
        record.exc_text = error.traceback.rstrip()
    add_fields(record, job)
    with contextlib.suppress(Exception):  # a filter or a handler of the application's is no reason to lose a report
        log.handle(record)


def _is_revoked(job: Job) -> bool:
    """Say whether it was stopped, because it was cancelled or taken for lost."""
    return job.interrupted_by is not None and issubclass(job.interrupted_by, TaskAborted)


def _said(error: TaskError) -> str:
    return f"{error.kind.removeprefix('orchestrator.errors.')}: {error.message}".split("\n", 1)[0]


def _place(error: TaskError) -> str:
    """Return the file and line that raised an error."""
    places = _PLACE.findall(error.traceback)
    return f"{places[-1][0].rpartition('/')[2]}:{places[-1][1]}" if places else "?"


def _long(seconds: float) -> str:
    """Return a length of time."""
    return f"{1000 * seconds:.3g}ms" if seconds < 1 else f"{seconds:.3g}s" if seconds < 100 else f"{seconds:.0f}s"


def _is_ours(traceback: str) -> bool:
    """Say whether a traceback has no line of the user's code: arguments that do not fit."""
    return all(path.startswith(_OURS) for path, _ in _PLACE.findall(traceback))
