"""Hand reports to the leader: in batches, kept until they are applied, sent again if Redis loses them.

Each report belongs to a slot in the shared table of held attempts. The slot is cleared when the leader says that
the report is in Postgres, so that until then nobody takes the attempt for lost; and when its code has ended, so that
until then the leader counts what it uses.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from orchestrator.domain.code.activation import Activated
from orchestrator.domain.fleet.generation import rewind_of
from orchestrator.domain.ids import to_text
from orchestrator.domain.sealed import seal_struct
from orchestrator.domain.tasks.outcomes import Flush, Report
from orchestrator.domain.tasks.task import Enqueued, KeyHolder, NewTask, Noted, Succeeded
from orchestrator.errors import Uncertain
from orchestrator.sealing import Vault
from orchestrator.telemetry import Outage, get_logger
from orchestrator.transport.codec import Applied, encode, stream_position
from orchestrator.transport.connection import FULL, UNAVAILABLE, describe
from orchestrator.transport.worker import WorkerStreams
from orchestrator.workers.parent.held import HeldAttempts
from orchestrator.workers.reporting.kept import KeptReports
from orchestrator.workers.reporting.pending_reports import BATCH, BATCH_BYTES, PendingReport, split, without_completion
from orchestrator.workers.running.critical_thread import start_critical_thread
from orchestrator.workers.running.forks import refuse_in_fork
from orchestrator.workers.running.job import Job

log = get_logger("worker")

_SMALLEST_BATCH_BYTES = 1_000
_ASK_AGAIN = 1.0
_ASK_FOR_KEYS = 2.0
"""Seconds after which a task that wants another one under a key says so again."""
_KEY_TIMEOUT = 60.0
"""Seconds after which it gives up."""


class _Flight(NamedTuple):
    """A batch that stands in the events stream."""

    generation: str
    entry: str
    items: list[PendingReport]


class Reporter:
    """Owns the events stream on the worker's side, and with it the generation."""

    def __init__(self, streams: WorkerStreams, worker: str, held: HeldAttempts, vault: Vault | None = None) -> None:
        self._vault = vault
        self._streams = streams
        self._worker = worker
        self._held = held
        self._queue: queue.SimpleQueue[PendingReport | None] = queue.SimpleQueue()
        self._redis = Outage(log, "Redis", "reports wait")
        self._unapplied: deque[_Flight] = deque()
        self._kept = KeptReports()
        self._lock = threading.Lock()
        self._listening = False
        self._empty = threading.Event()
        self._empty.set()
        self._gate = threading.RLock()
        """Held while something is added, and while it is seen that there is nothing: or that would count as empty
        which is about to come. A signal handler may add something while its thread does."""
        self._puts = 0
        """How many reports were left to the thread."""
        self._sending = threading.Lock()
        """Held while something is sent, by the thread or by the one that made the report."""
        self.has_sent_all = False
        """All reports stand in the events stream, at least."""
        self.generation = ""
        self.on_end: Callable[[Job], object] | None = None
        """Called with every job that has said something, when its end is reported."""
        self.jobs: Callable[[], Iterable[Job]] = tuple
        """Return the jobs that the process has."""

    def start(self) -> None:
        """Begin to send, in a thread of its own."""
        start_critical_thread("reporter", self._run)

    def report(
        self,
        report: Report,
        job: Job | None = None,
        applied: Callable[[], object] | None = None,
        turn: Activated | None = None,
        *,
        at_once: bool = False,
    ) -> None:
        """Send a report; if it ends a job, its message is dropped from the queue with it.

        `applied` is called, in whatever thread learns of it, once the leader has dealt with the report. `turn` is the
        one that follows the success that is reported. A thread with nothing else to do may send it `at_once` itself:
        waking another takes as long as Redis does.
        """
        if applied is not None:
            self._listen()
        if job is not None:
            if not isinstance(report, Succeeded):
                self.note(job)  # once the job has ended it is too late
            if job.has_lines and self.on_end is not None:
                self.on_end(job)
        item = PendingReport(report, job, applied, turn)
        if rewind_of(self.generation):
            item = without_completion(item)
        if not (at_once and self._send_at_once(item)):
            self._put(item)

    def _put(self, item: PendingReport) -> None:
        with self._gate:
            self._puts += 1
            self.has_sent_all = False
            self._empty.clear()
            self._queue.put(item)

    def _send_at_once(self, item: PendingReport) -> bool:
        """Send a report in the current thread, unless others wait: none may overtake another of the same attempt."""
        with self._gate:
            if not (self.has_sent_all and self.generation):
                return False
            puts, self.has_sent_all = self._puts, False
            self._empty.clear()
        with self._sending:
            try:
                again = self._flush([item])
            except UNAVAILABLE:  # of which the thread takes note when it tries
                again = [item]
        for one in again:
            self._put(one)
        with self._gate:
            self.has_sent_all |= self._puts == puts
        return True

    def note(self, job: Job) -> None:
        """Send what a job has left for its next attempt, if that has not been sent."""
        if job.noted is None:
            return
        with self._lock:  # or the report that ends the job could overtake what was taken here
            details, job.noted = job.noted, None
            if details is not None:
                self._put(PendingReport(Noted(job.dispatch.id, job.dispatch.attempt, details)))

    def hand_over(self, tasks: Sequence[NewTask]) -> dict[bytes, KeyHolder]:
        """Send tasks that a running task enqueued, and return once they are in Postgres.

        For those with a unique key, return which task has it; the leader decides that a moment later.
        """
        if not tasks:
            return {}
        refuse_in_fork()
        self._listen()
        applied = threading.Event()
        self._put(PendingReport(Enqueued(list(tasks)), None, applied.set))
        applied.wait()
        with_keys = {task.id: task for task in tasks if task.unique is not None}
        return self._key_holders(with_keys) if with_keys else {}

    def _key_holders(self, tasks: Mapping[bytes, NewTask]) -> dict[bytes, KeyHolder]:
        """Wait until the leader has said which tasks have the keys of these; what it said may be lost, so ask again."""
        found: dict[bytes, KeyHolder] = {}
        pause = 0.002
        give_up_at = time.monotonic() + _KEY_TIMEOUT
        ask_at = time.monotonic() + _ASK_FOR_KEYS
        while True:
            left = [task for task in tasks if task not in found]
            with contextlib.suppress(*UNAVAILABLE):
                found.update(self._streams.key_holders(left))
            if len(found) == len(tasks):
                return found
            if time.monotonic() > give_up_at:
                raise Uncertain(
                    f"The scheduler has not said within {_KEY_TIMEOUT:g} s which task has the unique key of "
                    f"{to_text(left[0])}, so it is not known whether that one was stored."
                )
            if time.monotonic() > ask_at:
                self._put(PendingReport(Enqueued([tasks[task] for task in left])))
                ask_at = time.monotonic() + _ASK_FOR_KEYS
            time.sleep(pause)
            pause = min(1.5 * pause, 0.1)

    def wait_until_applied(self, timeout: float) -> bool:
        """Wait until the leader has everything; used before the process ends."""
        self.has_sent_all = False
        self._queue.put(None)
        return self._empty.wait(timeout)

    def look(self) -> None:
        """Learn now whether another generation has begun."""
        self._queue.put(None)

    # -- the thread

    def _run(self) -> None:
        backlog: list[PendingReport] = []
        pause = 0.05
        largest = BATCH_BYTES
        while True:
            backlog.extend(self._gather(wait=not backlog))
            batch, backlog = split(backlog, largest)
            try:
                with self._sending:
                    resend = self._flush(batch)
                self._redis.worked()
                pause = 0.05
                largest = min(BATCH_BYTES, 2 * largest)
            except UNAVAILABLE as error:
                self._redis.failed(describe(error))
                if isinstance(error, FULL):
                    self._make_room([*batch, *backlog])
                    largest = max(_SMALLEST_BATCH_BYTES, largest // 2)  # a little may fit where much does not
                resend = batch
                threading.Event().wait(pause)
                pause = min(pause * 2, 1.0)
            backlog = [*resend, *backlog]
            with self._gate:
                if not backlog and self._queue.empty():
                    self.has_sent_all = True
                    if not self._unapplied:
                        self._empty.set()

    def _gather(self, *, wait: bool) -> Iterable[PendingReport]:
        """Yield what is there to report; wait for the first, but not for ever while something is unapplied."""
        with self._lock:
            questions = list(self._kept.questions())
        yield from map(PendingReport, questions)
        try:
            if wait and not questions:
                item = self._next()
                if item is not None:
                    yield item
            for _ in range(BATCH):
                item = self._queue.get_nowait()
                if item is not None:
                    yield item
        except queue.Empty:
            return

    def _next(self) -> PendingReport | None:
        """Wait for something to do. What another thread has sent may be unapplied by the next look, too."""
        while True:
            try:
                return self._queue.get(timeout=_ASK_AGAIN)
            except queue.Empty:
                if self._unapplied or not self.generation or self._redis.lasts or self._kept.has_questions:
                    raise

    def _flush(self, batch: list[PendingReport]) -> list[PendingReport]:
        """Send a batch, and learn what was applied; return what must be sent again."""
        if not self.generation:
            self.generation = self._streams.generation() or ""
            if not self.generation:
                threading.Event().wait(0.2)  # no leader has begun yet
                return batch
        done = self._finished_messages(batch)
        reports = [item.report for item in batch]
        turns = [item.turn for item in batch if item.turn is not None]
        if self._vault is not None:
            reports = [seal_struct(report, self._vault) for report in reports]
            turns = [seal_struct(turn, self._vault) for turn in turns]
        body = encode(Flush(self._worker, reports, turns)) if batch else None
        receipt = self._streams.flush(self.generation, body, done)
        if receipt.applied is not None:
            self.note_applied(receipt.applied)
        if receipt.generation is not None and receipt.generation != self.generation:
            return self._begin_generation(receipt.generation, batch)
        if batch and receipt.entry is None:
            threading.Event().wait(0.2)  # Redis has lost the stream, and no leader has begun anew yet
            return batch
        if batch and receipt.entry is not None:
            with self._lock:
                self._unapplied.append(_Flight(self.generation, receipt.entry, batch))
            if receipt.applied is not None:
                self.note_applied(receipt.applied)
        return []

    def _finished_messages(self, batch: Iterable[PendingReport]) -> dict[str, list[str]]:
        """Return the messages, by queue, of which every task has now been reported."""
        done: dict[str, list[str]] = {}
        for item in batch:
            if item.job is None:
                continue
            bundle = item.job.bundle
            bundle.reported.add(item.job.slot)
            if len(bundle.reported) == bundle.size and bundle.generation == self.generation:
                done.setdefault(bundle.queue, []).append(bundle.entry)
        return {name: list(dict.fromkeys(entries)) for name, entries in done.items()}

    def _make_room(self, unsent: Iterable[PendingReport]) -> None:
        """Redis is full, perhaps of messages that are answered and whose reports do not fit beside them."""
        with contextlib.suppress(*UNAVAILABLE):
            self._streams.drop(self.generation, self._finished_messages(unsent))

    def _begin_generation(self, generation: str, batch: list[PendingReport]) -> list[PendingReport]:
        """Redis has lost its data: whatever was not applied is sent again; if Postgres has, what was applied, too."""
        kept: list[PendingReport] = []
        with self._lock:
            lost = [item for flight in self._unapplied for item in flight.items]
            self._unapplied.clear()
            if rewind_of(generation) != rewind_of(self.generation):
                if self._kept.lacks_some:
                    log.error("worker.reports_lost: Postgres has lost commits, and there were too many reports to keep")
                kept = [PendingReport(report) for report in self._kept.recall(self.jobs())]
                lost, batch = ([without_completion(item) for item in items] for items in (lost, batch))
        again = [*kept, *lost, *batch]
        log.warning("worker.reports_resent generation=%s reports=%d", generation, len(again))
        self.generation = generation
        return again

    # -- what was applied

    def note_applied(self, applied: Applied) -> None:
        """Let go of every report that is in Postgres."""
        position = stream_position(applied.cursor)
        with self._lock:
            while self._unapplied:
                flight = self._unapplied[0]
                if flight.generation != applied.generation or stream_position(flight.entry) > position:
                    break
                self._unapplied.popleft()
                self._kept.add((item.report, item.job) for item in flight.items)
                for item in flight.items:
                    if item.job is not None:
                        self._let_go(item.job)
                    if item.applied is not None:
                        item.applied()

    def succeeded(self, attempts: Set[tuple[bytes, int]]) -> list[Job]:
        """Return the jobs of these attempts that have been reported as succeeded, and of which no more is known."""
        with self._lock:
            items = [item for flight in self._unapplied for item in flight.items if isinstance(item.report, Succeeded)]
        jobs = [item.job for item in items if item.job is not None]
        return [job for job in jobs if (job.dispatch.id, job.dispatch.attempt) in attempts]

    def _let_go(self, job: Job) -> None:
        job.applied = True
        if job.lingers:
            self._held.mark_ended(job.slot)
        else:
            self._held.drop(job.slot)

    def code_ended(self, job: Job) -> None:
        """The code of a job that lingered has ended after all."""
        with self._lock:
            job.lingers = False
            if job.applied:
                self._held.drop(job.slot)

    def _listen(self) -> None:
        """Hear at once what was applied, from the first time that something waits for it."""
        with self._lock:
            if self._listening:
                return
            self._listening = True
        self._streams.listen_applied(self.note_applied)
