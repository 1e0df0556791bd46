"""Keep reports for a while after they were applied, in case Postgres loses them.

A standby that takes over may lack the last seconds of the primary. It may know that a task runs, and not which tasks
that has enqueued since. So a worker keeps everything for a minute, and what an attempt has enqueued until a minute
after its end, for an hour at most. When the leader begins a generation because commits were lost (`rewind_of`), the
worker sends it all again. What Postgres has already is ignored: ids of tasks derive from the attempt that enqueues
them, and an end counts only for an attempt that is in flight.

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
"""Reports of one entry of the events stream, at most."""
BATCH_BYTES = 2_000_000


class PendingReport(msgspec.Struct, frozen=True):
    """A report that has not been applied yet."""

    report: Report
    job: Job | None = None
    """The job that it ends."""
    applied: Callable[[], object] | None = None
    """Called when it is applied, if somebody waits for that."""
    turn: Activated | None = None
    """The next turn that it carries."""


def without_completion(item: PendingReport) -> PendingReport:
    """Return a report without the completion of an attempt in a transaction: that may be lost.

    If it is not, Postgres knows it, and the report only ends the job here. Else no worker has the attempt from now on,
    and the task runs again.
    """
    job = item.job
    if job is None or job.completion is None:
        return item
    return replace(item, report=Started(job.dispatch.id, job.dispatch.attempt, 0.0))


def split(backlog: list[PendingReport], largest: int = BATCH_BYTES) -> tuple[list[PendingReport], list[PendingReport]]:
    """Return the part of a backlog that fits one entry, and the rest."""
    size = 0
    for place, item in enumerate(backlog):
        if isinstance(item.report, Succeeded):
            size += len(item.report.result)
            if item.turn is not None:
                size += sum(map(command_size, item.turn.commands))
        elif isinstance(item.report, Noted):
            size += len(item.report.details)
        elif isinstance(item.report, Activated):
            size += sum(map(command_size, item.report.commands))
        elif isinstance(item.report, Enqueued):
            size += sum(len(task.payload) for task in item.report.tasks)
        if place and (size > largest or place >= BATCH):
            return backlog[:place], backlog[place:]
    return backlog, []


SECONDS = 60.0
"""How far a standby may be behind: so long is everything kept."""
LONGEST = 3600.0
"""Seconds for which the enqueues of an attempt that goes on are kept. What they enqueued long ago may have ended, and
have been forgotten: to send that again would run it again."""
MOST_BYTES = 8_000_000
"""Of what is kept for a minute; and again of the enqueues of attempts that go on."""
_ASK_AFTER = 10.0
"""Seconds after which the leader is asked what is gone: by then all workers have sent again what they have kept."""
_MOST_ASKED = 1_000


_KEPT = frozenset((Succeeded, Failed, Returned, Noted))
_TAGS = {kind: str(kind.__struct_config__.tag) for kind in get_args(Report)}


class _Open(NamedTuple):
    """Tasks that a running task has enqueued."""

    since: float
    reports: list[bytes]


class KeptReports:
    """The reports that one process has kept. Its caller sees to it that one thread at a time uses it."""

    def __init__(self, most_bytes: int = MOST_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_bytes = most_bytes
        self._clock = clock
        self._recent: deque[tuple[float, bytes]] = deque()
        self._recent_bytes = 0
        self._open: dict[bytes, _Open] = {}
        """By the task that goes on; the one that was first to enqueue something is the first here."""
        self._open_bytes = 0
        self._asked: list[KnownTask] = []
        self._ask_at = 0.0
        self.dropped = 0
        """How many parts were too much, and were dropped before their time."""
        self._dropped_at = 0.0

    def add(self, applied: Iterable[PendingReport]) -> None:
        now = self._clock()
        kept: list[object] = []
        known: list[tuple[bytes, str, str]] = []
        for item in applied:
            report, job = item.report, item.job
            kind = type(report)
            if kind in _KEPT and (job is None or job.completion is None):
                kept.append(report)  # Postgres has completions: if it has lost one, the task runs again
            elif isinstance(report, Enqueued):
                self._keep_open(report, now)
            if job is not None:
                task = job.dispatch
                known.append((task.id, task.name, _TAGS[kind]))
                if self._open:
                    self._close(task.id, now)
        if known:
            kept.append((_TAGS[Recalled], known))
        if kept:
            self._keep(encode(("", kept)), now)  # as a `Flush` is encoded
        self._expire(now)

    def _keep(self, body: bytes, now: float) -> None:
        self._recent.append((now, body))
        self._recent_bytes += len(body)

    def _keep_open(self, report: Enqueued, now: float) -> None:
        body = encode(Flush("", [report]))
        self._open.setdefault(report.tasks[0].parent or b"", _Open(now, [])).reports.append(body)
        self._open_bytes += len(body)

    def _close(self, task: bytes, now: float) -> None:
        """Keep what a task has enqueued for another minute, if it has enqueued something."""
        for body in self._take(task):
            self._keep(body, now)

    def _take(self, task: bytes) -> list[bytes]:
        found = self._open.pop(task, None)
        if found is None:
            return []
        self._open_bytes -= sum(map(len, found.reports))
        return found.reports

    def _expire(self, now: float) -> None:
        """Drop what is old enough and, of what is too much, the oldest."""
        while self._open_bytes > self._most_bytes:
            self._note_dropped(len(self._take(next(iter(self._open)))), now)
        while self._open and next(iter(self._open.values())).since < now - LONGEST:
            self._close(next(iter(self._open)), now)
        while self._recent and self._recent[0][0] < now - SECONDS:
            self._drop_oldest()
        while self._recent_bytes > self._most_bytes:
            self._drop_oldest()
            self._note_dropped(1, now)

    def _drop_oldest(self) -> None:
        self._recent_bytes -= len(self._recent.popleft()[1])

    def _note_dropped(self, count: int, now: float) -> None:
        self.dropped += count
        self._dropped_at = now

    # -- Postgres has lost commits

    def recall(self, running: Iterable[Job]) -> list[Report]:
        """Return everything that is kept, to be sent again; of `running` jobs, too, it is asked later what is gone."""
        now = self._clock()
        self._expire(now)
        bodies = [body for enqueued in self._open.values() for body in enqueued.reports]
        bodies += [body for _, body in self._recent]
        reports = [report for body in bodies for report in decode_flush(body).reports]
        self._asked += [task for report in reports if isinstance(report, Recalled) for task in report.tasks]
        self._asked += [KnownTask(job.dispatch.id, job.dispatch.name, "running") for job in running]
        self._ask_at = now + _ASK_AFTER
        self._recent.clear()  # all of it is kept anew when it is applied
        self._open.clear()
        self._recent_bytes = self._open_bytes = 0
        return [report for report in reports if not isinstance(report, Recalled)]

    @property
    def lacks_some(self) -> bool:
        """Say whether there was too much to keep within the last minute."""
        return self.dropped > 0 and self._dropped_at >= self._clock() - SECONDS

    @property
    def has_questions(self) -> bool:
        """Say whether it is still to be asked what is gone."""
        return bool(self._asked)

    def questions(self) -> Iterator[Recalled]:
        """Yield what to ask about once it is time."""
        if self._asked and self._clock() >= self._ask_at:
            asked, self._asked = self._asked, []
            for start in range(0, len(asked), _MOST_ASKED):
                yield Recalled(asked[start : start + _MOST_ASKED])
