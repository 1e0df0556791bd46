"""Sends reports to the leader: in batches, kept until they are applied, and sent again if Redis loses them.

Each report belongs to a slot in the shared table of held attempts. The slot is cleared when two things are true: the
report is in Postgres (before that, the attempt would be taken for lost), and the code has ended (before that, it still
uses capacity, which the leader counts).
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
from orchestrator.domain.plain import REFUSALS
from orchestrator.domain.tasks.outcomes import Flush, Report
from orchestrator.domain.tasks.task import Enqueued, KeyHolder, NewTask, Noted, Succeeded
from orchestrator.errors import PayloadError, Uncertain
from orchestrator.sealing import Vault
from orchestrator.telemetry import Outage, get_logger
from orchestrator.transport.codec import Applied, encode_flush, stream_position
from orchestrator.transport.connection import FULL, UNAVAILABLE, describe
from orchestrator.transport.worker import WorkerStreams
from orchestrator.workers.parent.held import HeldAttempts
from orchestrator.workers.reporting.kept import (
    BATCH,
    BATCH_BYTES,
    KeptReports,
    PendingReport,
    split,
    without_completion,
)
from orchestrator.workers.reporting.unsendable import encoded, sendable
from orchestrator.workers.running.forks import refuse_in_fork
from orchestrator.workers.running.job import Job
from orchestrator.workers.running.threads import start_critical_thread

log = get_logger("worker")

_MIN_BATCH_BYTES = 1_000
_POLL_INTERVAL = 1.0
_KEY_RESEND_INTERVAL = 2.0
"""Seconds after which a task that enqueued another with a unique key sends the request again."""
_KEY_TIMEOUT = 60.0
"""Seconds after which such a task fails with `Uncertain`."""


class _Flight(NamedTuple):
    """A batch of reports in the events stream."""

    generation: str
    entry: str
    items: list[PendingReport]


class Reporter:
    """Writes to the events stream for this worker, and follows its generation."""

    def __init__(self, streams: WorkerStreams, worker: str, held: HeldAttempts, vault: Vault | None = None) -> None:
        self._vault = vault
        self._streams = streams
        self._worker = worker
        self._held = held
        self._queue: deque[PendingReport] = deque()
        """Reports to send. Appended without a lock, also by a signal handler."""
        self._backlog: list[PendingReport] = []
        """Reports that go first, because they could not be sent or did not fit. Changed under `_sending`."""
        self._wakeup: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_asleep = False
        """Whether the thread waits for `_wakeup`."""
        self._redis = Outage(log, "Redis", "reports wait")
        self._unapplied: deque[_Flight] = deque()
        self._kept = KeptReports()
        self._lock = threading.Lock()
        self._is_listening = False
        self._empty = threading.Event()
        """Set when all reports are sent and applied; cleared by `wait_until_applied`."""
        self._sending = threading.Lock()
        """Lock held while reports are sent, by the reporter's thread or by the thread that made them."""
        self.generation = ""
        self.on_end: Callable[[Job], object] | None = None
        """Called at the end of every job that has written lines."""
        self.jobs: Callable[[], Iterable[Job]] = tuple
        """Return the jobs of the process."""

    def start(self) -> None:
        """Start the thread that sends reports."""
        start_critical_thread("reporter", self._run)

    def report(
        self,
        report: Report,
        job: Job | None = None,
        applied: Callable[[], object] | None = None,
        turn: Activated | None = None,
        *,
        later: bool = False,
    ) -> None:
        """Queue a report. If it ends a job, the job's message is deleted from its stream with it.

        `applied` is called, in any thread, once the leader has processed the report. `turn` is the workflow turn that
        follows the reported success. With `later`, the report waits for the next `send` or for other reports.
        """
        if applied is not None:
            self._listen()
        if job is not None:
            if job.noted is not None and not isinstance(report, Succeeded):
                self.note(job)  # too late once the job has ended
            if job.has_lines and self.on_end is not None:
                self.on_end(job)
        self._queue.append(PendingReport(report, job, applied, turn))
        if not later:
            self._wake()

    def _enqueue(self, item: PendingReport) -> None:
        self._queue.append(item)
        self._wake()

    def _wake(self) -> None:
        if self._is_asleep:  # otherwise it checks the queue before it sleeps
            self._is_asleep = False
            self._wakeup.put(None)

    def wake(self) -> None:
        """Send reports that wait for `send`, because the task in their thread takes longer than usual."""
        if self._queue:
            self._wake()

    def send(self) -> None:
        """Send queued reports in the current thread, which is idle: waking another takes as long as Redis does. If
        Redis fails, the reporter's own thread retries."""
        if self.generation and not self._backlog and self._sending.acquire(blocking=False):
            try:
                batch, self._backlog = split([*self._backlog, *self._gather()])
                try:
                    unsent = self._flush(batch) if batch else []
                except BaseException:  # noqa: BLE001  # the reporter's thread meets the error again
                    unsent = batch
                self._backlog = [*unsent, *self._backlog]
            finally:
                self._sending.release()
        if self._queue or self._backlog:
            self._wake()

    @property
    def has_sent_all(self) -> bool:
        """Return whether all reports are in the events stream."""
        return not (self._queue or self._backlog or self._sending.locked())

    def note(self, job: Job) -> None:
        """Send the note that a job has left for its next attempt, unless it was sent."""
        if job.noted is None:
            return
        with self._lock:  # otherwise the report that ends the job could overtake the note
            details, job.noted = job.noted, None
            if details is not None:
                self._enqueue(PendingReport(Noted(job.dispatch.id, job.dispatch.attempt, details)))

    def send_tasks(self, tasks: Sequence[NewTask]) -> dict[bytes, KeyHolder]:
        """Send tasks that a running task enqueued, and wait until they are in Postgres.

        Return which task holds each unique key; the leader decides that a moment later.
        """
        if not tasks:
            return {}
        refuse_in_fork()
        report = Enqueued(list(tasks))
        try:
            encode_flush(Flush(self._worker, [report]))
        except REFUSALS as error:
            raise PayloadError(f"These {len(tasks):,} tasks cannot be sent: {error}. Enqueue fewer at once.") from None
        self._listen()
        applied = threading.Event()
        self._enqueue(PendingReport(report, None, applied.set))
        applied.wait()
        with_keys = {task.id: task for task in tasks if task.unique is not None}
        return self._key_holders(with_keys) if with_keys else {}

    def _key_holders(self, tasks: Mapping[bytes, NewTask]) -> dict[bytes, KeyHolder]:
        """Wait until the leader has said which tasks hold these unique keys. An answer may be lost, so ask again."""
        holders: dict[bytes, KeyHolder] = {}
        pause = 0.002
        give_up_at = time.monotonic() + _KEY_TIMEOUT
        ask_at = time.monotonic() + _KEY_RESEND_INTERVAL
        while True:
            missing = [task for task in tasks if task not in holders]
            with contextlib.suppress(*UNAVAILABLE):
                holders.update(self._streams.key_holders(missing))
            if len(holders) == len(tasks):
                return holders
            if time.monotonic() > give_up_at:
                raise Uncertain(
                    f"The scheduler has not answered within {_KEY_TIMEOUT:g} s which task has the unique key of "
                    f"{to_text(missing[0])}, so it is unknown whether that task was stored."
                )
            if time.monotonic() > ask_at:
                self._enqueue(PendingReport(Enqueued([tasks[task] for task in missing])))
                ask_at = time.monotonic() + _KEY_RESEND_INTERVAL
            time.sleep(pause)
            pause = min(1.5 * pause, 0.1)

    def wait_until_applied(self, timeout: float) -> bool:
        """Wait until the leader has applied all reports. Used before the process ends."""
        self._empty.clear()
        self._wakeup.put(None)
        return self._empty.wait(timeout)

    def check_generation(self) -> None:
        """Check now whether another generation has begun."""
        self._wakeup.put(None)

    # -- the thread

    def _run(self) -> None:
        pause = 0.05
        largest = BATCH_BYTES
        while True:
            self._sleep()
            with self._sending:
                batch, self._backlog = split([*self._backlog, *self._gather()], largest)
                try:
                    unsent = self._flush(batch)
                    self._redis.worked()
                    pause, is_away = 0.05, False
                    largest = min(BATCH_BYTES, 2 * largest)
                except UNAVAILABLE as error:
                    self._redis.failed(describe(error))
                    if isinstance(error, FULL):
                        self._make_room([*batch, *self._backlog])
                        largest = max(_MIN_BATCH_BYTES, largest // 2)  # a small batch may still fit
                    unsent, is_away = batch, True
                self._backlog = [*unsent, *self._backlog]
                if not (self._backlog or self._queue or self._unapplied):
                    self._empty.set()
            if is_away:
                threading.Event().wait(pause)
                pause = min(pause * 2, 1.0)

    def _gather(self) -> list[PendingReport]:
        items: list[PendingReport] = []
        if self._kept.has_questions:
            with self._lock:
                items += map(PendingReport, self._kept.questions())
        return items + [self._queue.popleft() for _ in range(min(len(self._queue), BATCH))]

    def _sleep(self) -> None:
        """Wait for reports to send, or for sent ones to be applied. Another thread may have sent reports meanwhile."""
        while not self._backlog:
            self._is_asleep = True
            if self._queue:
                break
            try:
                self._wakeup.get(timeout=_POLL_INTERVAL)
                break
            except queue.Empty:
                if (
                    self._queue
                    or self._unapplied
                    or not self.generation
                    or self._redis.is_ongoing
                    or self._kept.has_questions
                ):
                    break
        self._is_asleep = False

    def _flush(self, batch: list[PendingReport]) -> list[PendingReport]:
        """Send a batch, and learn which reports were applied. Return the reports to send again."""
        if not self.generation:
            self.generation = self._streams.generation() or ""
            if not self.generation:
                threading.Event().wait(0.2)  # no leader has begun yet
                return batch
        if rewind_of(self.generation):
            batch = [without_completion(item) for item in batch]
        done = self._finished_messages(batch)
        body = None
        if batch:
            try:
                body = encoded(batch, self._worker, self._vault)
            except REFUSALS:
                batch = [sendable(item, self._worker, self._vault) for item in batch]
                body = encoded(batch, self._worker, self._vault)
        receipt = self._streams.flush(self.generation, body, done)
        if receipt.applied is not None:
            self.note_applied(receipt.applied)
        if receipt.generation is not None and receipt.generation != self.generation:
            return self._begin_generation(receipt.generation, batch)
        if batch and receipt.entry is None:
            threading.Event().wait(0.2)  # Redis has lost the stream, and no leader has begun a new one
            return batch
        if batch and receipt.entry is not None:
            with self._lock:
                self._unapplied.append(_Flight(self.generation, receipt.entry, batch))
            if receipt.applied is not None:
                self.note_applied(receipt.applied)
        return []

    def _finished_messages(self, batch: Iterable[PendingReport]) -> dict[str, list[str]]:
        """Return the messages, by queue, whose tasks have all been reported."""
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
        """Delete messages whose tasks have ended but whose reports do not fit, because Redis is full."""
        with contextlib.suppress(*UNAVAILABLE):
            self._streams.drop(self.generation, self._finished_messages(unsent))

    def _begin_generation(self, generation: str, batch: list[PendingReport]) -> list[PendingReport]:
        """Switch to a new generation. Return the reports to send again: if Postgres has lost commits, applied ones
        too."""
        kept: list[PendingReport] = []
        with self._lock:
            lost = [item for flight in self._unapplied for item in flight.items]
            self._unapplied.clear()
            if rewind_of(generation) != rewind_of(self.generation):
                if self._kept.is_incomplete:
                    log.error(
                        "worker.reports_lost: Postgres has lost commits, and there were too many reports to keep all"
                    )
                kept = [PendingReport(report) for report in self._kept.recall(self.jobs())]
                lost, batch = ([without_completion(item) for item in items] for items in (lost, batch))
        resent = [*kept, *lost, *batch]
        log.warning("worker.reports_resent generation=%s reports=%d", generation, len(resent))
        self.generation = generation
        return resent

    # -- what was applied

    def note_applied(self, applied: Applied) -> None:
        """Drop every report that is stored in Postgres."""
        position = stream_position(applied.cursor)
        with self._lock:
            while self._unapplied:
                flight = self._unapplied[0]
                if flight.generation != applied.generation or stream_position(flight.entry) > position:
                    break
                self._unapplied.popleft()
                self._kept.add(flight.items)
                ended: list[int] = []
                for item in flight.items:
                    if (job := item.job) is not None:
                        job.applied = True
                        if job.lingers:
                            self._held.mark_ended(job.slot)
                        else:
                            ended.append(job.slot)
                    if item.applied is not None:
                        item.applied()
                self._held.drop(*ended)

    def succeeded(self, attempts: Set[tuple[bytes, int]]) -> list[Job]:
        """Return the jobs of these attempts whose success is reported and not yet applied."""
        with self._lock:
            items = [item for flight in self._unapplied for item in flight.items if isinstance(item.report, Succeeded)]
        jobs = [item.job for item in items if item.job is not None]
        return [job for job in jobs if (job.dispatch.id, job.dispatch.attempt) in attempts]

    def code_ended(self, job: Job) -> None:
        """Note that the code of a lingering job has ended."""
        with self._lock:
            job.lingers = False
            if job.applied:
                self._held.drop(job.slot)

    def _listen(self) -> None:
        """Subscribe to notifications of applied reports, once a caller waits for one."""
        with self._lock:
            if self._is_listening:
                return
            self._is_listening = True
        self._streams.listen_applied(self.note_applied)
