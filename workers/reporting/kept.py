"""Keeps reports for a while after they were applied, in case Postgres loses them.

A standby that takes over may lack the last seconds of the primary: it may know that a task runs, but not the tasks that
the task has enqueued. So a worker keeps every report for a minute. It keeps the tasks that an attempt has enqueued
until a minute after the attempt's end, for an hour at most. When the leader begins a generation because commits were
lost (`rewind_of`), the worker sends all kept reports again. Postgres ignores those that it has: ids of tasks derive
from the attempt that enqueues them, and an end counts only for an attempt in flight.

Reports are kept encoded, which takes a fraction of the memory of objects, and within a number of bytes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, get_args

import msgspec
from msgspec.structs import replace

from orchestrator.domain.code.activation import Activated
from orchestrator.domain.code.commands import command_size
from orchestrator.domain.tasks.outcomes import Flush, Report
from orchestrator.domain.tasks.task import Enqueued, Failed, KnownTask, Noted, Recalled, Returned, Started, Succeeded
from orchestrator.transport.codec import decode_flush, encode
from orchestrator.workers.running.job import Job

BATCH = 1_000
"""Reports in one entry of the events stream, at most."""
BATCH_BYTES = 2_000_000


class PendingReport(msgspec.Struct, frozen=True):
    """A report that has not been applied yet."""

    report: Report
    job: Job | None = None
    """The job that the report ends, if any."""
    applied: Callable[[], object] | None = None
    """Called when the report is applied, if a caller waits for that."""
    turn: Activated | None = None
    """The workflow turn that the report carries, if any."""


def without_completion(item: PendingReport) -> PendingReport:
    """Replace the end of an attempt that completed in its own transaction: Postgres may have lost that transaction.

    If Postgres has the completion, the report only ends the job in this worker. Otherwise the leader finds the attempt
    lost, and the task runs again.
    """
    job = item.job
    if job is None or job.completion is None:
        return item
    return replace(item, report=Started(job.dispatch.id, job.dispatch.attempt, 0.0))


def split(backlog: list[PendingReport], largest: int = BATCH_BYTES) -> tuple[list[PendingReport], list[PendingReport]]:
    """Return the part of a backlog that fits one stream entry, and the rest."""
    size = 0
    for index, item in enumerate(backlog):
        if isinstance(item.report, Succeeded):
            size += len(item.report.result) + sum(len(child.payload) for child in item.report.children)
            if item.turn is not None:
                size += sum(map(command_size, item.turn.commands))
        elif isinstance(item.report, Noted):
            size += len(item.report.details)
        elif isinstance(item.report, Activated):
            size += sum(map(command_size, item.report.commands))
            size += sum(len(answer.result or b"") for answer in item.report.answers)
        elif isinstance(item.report, Enqueued):
            size += sum(len(task.payload) for task in item.report.tasks)
        if index and (size > largest or index >= BATCH):
            return backlog[:index], backlog[index:]
    return backlog, []


SECONDS = 60.0
"""Seconds for which every report is kept: how far a standby may lag behind."""
MAX_KEPT_SECONDS = 3600.0
"""Seconds for which the enqueues of a running attempt are kept, at most. Older tasks may have ended and been deleted;
sending them again would run them again."""
MAX_BYTES = 8_000_000
"""Bytes kept of the last minute's reports, and again of the enqueues of running attempts."""
_ASK_AFTER = 10.0
"""Seconds until the leader is asked which tasks are gone: by then all workers have sent their kept reports."""
_MAX_QUESTIONS = 1_000


_KEPT = frozenset((Succeeded, Failed, Returned, Noted))
_TAGS = {kind: str(kind.__struct_config__.tag) for kind in get_args(Report)}


class _Open(NamedTuple):
    """The encoded enqueues of a running task."""

    since: float
    reports: list[bytes]


class KeptReports:
    """The reports that a process has kept. Not thread-safe: the caller holds a lock."""

    def __init__(self, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._recent: deque[tuple[float, bytes]] = deque()
        self._recent_bytes = 0
        self._open: dict[bytes, _Open] = {}
        """By task id, in the order of the first enqueue."""
        self._open_bytes = 0
        self._questions: list[KnownTask] = []
        self._ask_at = 0.0
        self.dropped = 0
        """How many entries were dropped early, because they exceeded the limit."""
        self._dropped_at = 0.0

    def add(self, applied: Iterable[PendingReport]) -> None:
        now = self._clock()
        kept: list[object] = []
        tasks: list[tuple[bytes, str, str]] = []
        for item in applied:
            report, job = item.report, item.job
            report_type = type(report)
            if report_type in _KEPT and (job is None or job.completion is None):
                kept.append(report)  # Postgres decides completions: if it has lost one, the task runs again
            elif isinstance(report, Enqueued):
                self._keep_open(report, now)
            if job is not None:
                task = job.dispatch
                tasks.append((task.id, task.name, _TAGS[report_type]))
                if self._open:
                    self._close(task.id, now)
        if tasks:
            kept.append((_TAGS[Recalled], tasks))
        if kept:
            self._keep(encode(("", kept)), now)  # the encoding of a `Flush`
        self._expire(now)

    def _keep(self, body: bytes, now: float) -> None:
        self._recent.append((now, body))
        self._recent_bytes += len(body)

    def _keep_open(self, report: Enqueued, now: float) -> None:
        body = encode(Flush("", [report]))
        self._open.setdefault(report.tasks[0].parent or b"", _Open(now, [])).reports.append(body)
        self._open_bytes += len(body)

    def _close(self, task: bytes, now: float) -> None:
        """Keep the tasks that an ended task has enqueued for another minute."""
        for body in self._take(task):
            self._keep(body, now)

    def _take(self, task: bytes) -> list[bytes]:
        entry = self._open.pop(task, None)
        if entry is None:
            return []
        self._open_bytes -= sum(map(len, entry.reports))
        return entry.reports

    def _expire(self, now: float) -> None:
        """Drop entries that are too old and, if there are too many, the oldest."""
        while self._open_bytes > self._max_bytes:
            self._count_dropped(len(self._take(next(iter(self._open)))), now)
        while self._open and next(iter(self._open.values())).since < now - MAX_KEPT_SECONDS:
            self._close(next(iter(self._open)), now)
        while self._recent and self._recent[0][0] < now - SECONDS:
            self._drop_oldest()
        while self._recent_bytes > self._max_bytes:
            self._drop_oldest()
            self._count_dropped(1, now)

    def _drop_oldest(self) -> None:
        self._recent_bytes -= len(self._recent.popleft()[1])

    def _count_dropped(self, count: int, now: float) -> None:
        self.dropped += count
        self._dropped_at = now

    # -- Postgres has lost commits

    def recall(self, running: Iterable[Job]) -> list[Report]:
        """Return all kept reports, to send them again. Prepare questions about their tasks and the running jobs."""
        now = self._clock()
        self._expire(now)
        bodies = [body for enqueued in self._open.values() for body in enqueued.reports]
        bodies += [body for _, body in self._recent]
        reports = [report for body in bodies for report in decode_flush(body).reports]
        self._questions += [task for report in reports if isinstance(report, Recalled) for task in report.tasks]
        self._questions += [KnownTask(job.dispatch.id, job.dispatch.name, "running") for job in running]
        self._ask_at = now + _ASK_AFTER
        self._recent.clear()  # all of them are kept again when they are applied
        self._open.clear()
        self._recent_bytes = self._open_bytes = 0
        return [report for report in reports if not isinstance(report, Recalled)]

    @property
    def is_incomplete(self) -> bool:
        """Return whether entries were dropped early within the last minute."""
        return self.dropped > 0 and self._dropped_at >= self._clock() - SECONDS

    @property
    def has_questions(self) -> bool:
        """Return whether questions about missing tasks are pending."""
        return bool(self._questions)

    def questions(self) -> Iterator[Recalled]:
        """Yield the questions about missing tasks once they are due."""
        if self._questions and self._clock() >= self._ask_at:
            tasks, self._questions = self._questions, []
            for start in range(0, len(tasks), _MAX_QUESTIONS):
                yield Recalled(tasks[start : start + _MAX_QUESTIONS])
