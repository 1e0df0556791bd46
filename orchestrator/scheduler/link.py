"""The leader's side of Redis: read events, and publish after a commit.

While Redis is down, ticks continue without it. While it only refuses writes, events are still applied, which may free
memory.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from orchestrator.domain.states import TaskState
from orchestrator.domain.tasks.task import Dispatch
from orchestrator.scheduler.code.paging import Paging
from orchestrator.scheduler.fleet.generations import Generations
from orchestrator.scheduler.fleet.view import Fleet
from orchestrator.scheduler.fleet.watch import FleetWatch
from orchestrator.scheduler.leadership import Leadership
from orchestrator.scheduler.tick_result import CommitHooks, Outgoing, TickResult
from orchestrator.store.tasks.claims import Claimed
from orchestrator.telemetry import Outage, first_line, get_logger
from orchestrator.trace_context import below, run_span
from orchestrator.transport import connection as transport
from orchestrator.transport.codec import (
    MAX_BUNDLE,
    Attempt,
    Changes,
    Heartbeat,
    RunChange,
    TaskChange,
    WorkerChange,
    encode,
)
from orchestrator.transport.keys import private_queue
from orchestrator.transport.leader.queues import StreamsDamaged
from orchestrator.transport.leader.streams import MAX_READ_BYTES, NO_CHANGES, Inbound, LeaderStreams
from orchestrator.transport.quarantine import Refused

_MAX_LOG_BYTES = 8_000_000
"""Bytes of entries kept for listeners that reconnect, at most."""
_MAX_LOG_ENTRIES = 20_000


class ChangeLog:
    """Encodes the changes published in this term for listeners of live events."""

    def __init__(self) -> None:
        self._is_watched = False
        self._generation: str | None = None
        """The generation with a first entry and no gap since; None if another first entry is needed."""
        self._workers: dict[str, str] = {}
        self._changed_workers: list[WorkerChange] = []
        self._sizes: deque[int] = deque()
        """Sizes of the entries since the first one. Earlier entries are not needed."""
        self._size = 0

    def observe(self, is_watched: bool, beats: Iterable[Heartbeat]) -> None:
        """Record whether anybody listens, and which workers live."""
        self._is_watched = is_watched
        if not is_watched:
            self.interrupted()
            return
        now = {beat.worker: _state(beat) for beat in beats}
        changed = [WorkerChange(worker, state) for worker, state in now.items() if self._workers.get(worker) != state]
        self._changed_workers += changed + [
            WorkerChange(worker, "gone") for worker in self._workers if worker not in now
        ]
        self._workers = now

    def interrupted(self) -> None:
        """Note a possible gap in the published changes."""
        self._generation = None

    def of(self, generation: str, tick: TickResult) -> tuple[bytes, int]:
        """Return the entry for a commit, and how many entries to keep for listeners that reconnect."""
        if not self._is_watched or not generation:
            return NO_CHANGES
        if self._generation != generation:
            self._generation = generation
            self._changed_workers.clear()
            self._sizes.clear()
            self._size = 0
            return self._entry(Changes(generation, is_first=True))
        tasks, runs, queues_changed = _tasks(tick.outgoing), _runs(tick.outgoing), tick.wake.queues_changed
        if not (tasks or runs or self._changed_workers or queues_changed):
            return NO_CHANGES
        workers, self._changed_workers = self._changed_workers, []
        return self._entry(Changes(generation, False, tasks, runs, workers, queues_changed))

    def _entry(self, changes: Changes) -> tuple[bytes, int]:
        body = encode(changes)
        self._sizes.append(len(body))
        self._size += len(body)
        while len(self._sizes) > _MAX_LOG_ENTRIES or (self._size > _MAX_LOG_BYTES and len(self._sizes) > 1):
            self._size -= self._sizes.popleft()
        return body, len(self._sizes)


def _state(beat: Heartbeat) -> str:
    return "still" if beat.still else "draining" if beat.draining else "live"


def _tasks(outgoing: Outgoing) -> list[TaskChange]:
    """Return the tasks that changed state. A returned task may have been claimed again at once."""
    moved = [
        TaskChange(task.id, task.queue, task.name, task.state, task.attempt, task.run_id)
        for task in outgoing.moved
        if not task.is_turn_task
    ]
    return moved + [
        TaskChange(task.id, task.queue, task.name, TaskState.DISPATCHED, task.attempt, task.run_id)
        for task in outgoing.claimed
        if not task.is_turn_task
    ]


def _runs(outgoing: Outgoing) -> list[RunChange]:
    rows = {run.id: RunChange(run.id, run.status, run.workflow) for run in outgoing.runs}
    turns = (task.id for task in outgoing.moved if task.is_turn_task)
    others = {run: RunChange(run) for run in (*outgoing.counted, *turns) if run not in rows}
    return [*others.values(), *rows.values()]


log = get_logger("scheduler")

BUNDLE_BYTES = 1_000_000
"""Bytes of payload in one message, at most. A single larger task has a message of its own."""
_PAUSE = 0.5
"""Seconds before Redis is tried again."""
FAILURES = (StreamsDamaged, *transport.UNAVAILABLE)
"""Errors of Redis after which the leader continues."""
_MAX_READS = 20
"""Batches read in a row when all events are wanted, at most."""
_SHORT_TASK = 0.001
"""Seconds below which a task is short. A worker process runs short tasks one after another
(`workers/running/threads.py`)."""
_BUNDLES_PER_PROCESS = 2
"""Bundles of short tasks for each process: it receives one while it runs another."""
_PLAIN_FIELDS = 10
"""The number of leading fields of a claimed task that form a plain message, which is encoded as an array."""


def report_redis_outage(outage: Outage, leadership: Leadership, error: Exception) -> None:
    """Log that Redis cannot be used, and record it as the leader's trouble."""
    reason = transport.describe(error)
    outage.failed(reason)
    leadership.trouble = f"it cannot use Redis: {reason}"


@dataclass
class Link(CommitHooks):
    """Reads events from Redis, publishes to it, and tracks whether it can be read and written."""

    streams: LeaderStreams
    leadership: Leadership
    generations: Generations
    outage: Outage
    fleet: Fleet
    watch: FleetWatch
    paging: Paging
    changes: ChangeLog
    batch: int
    monotonic: Callable[[], float]
    has_spans: bool = False
    """Turns of code have spans below those of their runs."""
    _read_at: float = 0.0
    """The monotonic time at which the next read may be tried, after an error."""
    _write_at: float = 0.0
    """The monotonic time at which the next write may be tried, after an error."""
    _last_claimed: Attempt | None = None
    _short: dict[str, float] = field(default_factory=dict)
    """Queues with short tasks, and the duration of a task in seconds: it rises at once and falls slowly."""

    @property
    def can_read(self) -> bool:
        return self.monotonic() >= self._read_at and bool(self.generations.cursor.generation)

    @property
    def can_write(self) -> bool:
        return self.monotonic() >= self._write_at and self.can_read

    @property
    def has_pages(self) -> bool:
        """Return whether pages of histories are waiting to be sent."""
        return self.paging.is_busy and self.can_write

    def failed(self, error: Exception, *, is_look: bool = False) -> None:
        """Handle one of `FAILURES`: pause the use of Redis, or begin a new generation of streams.

        Only a failed fleet check postpones the next check. A failed publish does not.
        """
        self.changes.interrupted()
        if isinstance(error, StreamsDamaged):
            generation = self.generations.cursor.generation
            log.error("redis.stream_unusable generation=%s error=%s", generation, first_line(error))
            self.generations.give_up()
            self.watch.due_at = 0.0
            return
        report_redis_outage(self.outage, self.leadership, error)
        self._write_at = self.monotonic() + _PAUSE
        if not isinstance(error, transport.REFUSED):
            self._read_at = self._write_at
        self.fleet.interrupted()
        self.watch.due_at = self._write_at if is_look else min(self.watch.due_at, self._write_at)

    def worked(self) -> None:
        """Note that Redis was read and written."""
        self.outage.worked()
        self.leadership.trouble = None

    def committed(self, tick: TickResult) -> None:
        """Remember the last attempt that was claimed, and which queues have short tasks."""
        if claimed := tick.outgoing.claimed:
            self._last_claimed = Attempt(claimed[-1].id, claimed[-1].attempt)
        for queue, seconds, _ in tick.counts.durations:
            if seconds < _SHORT_TASK:
                self._short[queue] = max(seconds, 0.9 * self._short.get(queue, _SHORT_TASK))
            else:
                self._short.pop(queue, None)

    def _bundle_count(self, queue: str) -> int:
        """Return over how many bundles the tasks of this queue are spread."""
        slots = self.fleet.slots(queue)
        return min(slots, _BUNDLES_PER_PROCESS * self.fleet.processes(queue)) if queue in self._short else slots

    # -- in

    def read(self, until: float | None) -> Inbound:
        """Read one batch of events, waiting for the first until a deadline; without one, read all there are."""
        gathered = Inbound()
        try:
            generation, position, _ = self.generations.cursor
            block = 0.0 if until is None else until - self.monotonic()
            for number in range(_MAX_READS if until is None else 1):
                inbound = self.streams.read(generation, position, self.batch, block)
                if number:
                    inbound = Inbound(
                        gathered.entries + inbound.entries,
                        gathered.nudged or inbound.nudged,
                        gathered.fleet_changed or inbound.fleet_changed,
                        inbound.complete,
                        gathered.stopped + inbound.stopped,
                        inbound.stream or gathered.stream,
                        not (gathered.needs_full_check or inbound.needs_full_check),
                    )
                gathered = inbound
                if inbound.complete or sum(len(body) for _, body in gathered.entries) > MAX_READ_BYTES:
                    break
                position = inbound.entries[-1][0]
        except FAILURES as error:
            self.failed(error)
        if gathered.fleet_changed:
            self.watch.due_at = 0.0
        self.watch.note_stopped(gathered.stopped)
        return gathered

    # -- out

    def publish(self, tick: TickResult, now: float, *, moved_on: bool) -> None:
        """Dispatch, withdraw and notify after a commit. `moved_on` says that events were applied."""
        try:
            self._publish(tick, now, moved_on)
        except FAILURES as error:
            self.failed(error)

    def _publish(self, tick: TickResult, now: float, moved_on: bool) -> None:
        outgoing = tick.outgoing
        generation, position, _ = self.generations.cursor
        has_progress = moved_on or bool(outgoing.ended)
        changes = self.changes.of(generation, tick)
        in_pages = {paged.task.id for paged in outgoing.paged}
        claimed = [task for task in outgoing.claimed if task.id not in in_pages] if in_pages else outgoing.claimed
        if claimed or has_progress or changes is not NO_CHANGES:
            self.streams.publish(
                generation,
                self.leadership.term,
                messages(claimed, self._bundle_count, now, has_spans=self.has_spans),
                position if has_progress else None,
                outgoing.ended,
                encode(None if moved_on else self._last_claimed),
                changes,
            )
        if outgoing.replays:
            self._push(outgoing.replays)
        if has_progress:
            self.generations.confirmed = position
        if outgoing.key_holders:
            self.streams.publish_key_holders(outgoing.key_holders)
        for withdrawn in (outgoing.withdrawn, self.watch.unreceived(generation, outgoing.revoked)):
            for queue, entries in withdrawn.items():
                self.streams.queues.withdraw(generation, queue, entries)
        self.set_aside(outgoing.set_aside)
        self.watch.send_orders()
        if self.has_pages:
            self.paging.send(self.leadership.reading, self.streams.pages, self._push)

    def _push(self, claimed: Sequence[Claimed]) -> None:
        generation, term, last = self.generations.cursor.generation, self.leadership.term, encode(self._last_claimed)
        found = messages(claimed, self._bundle_count, has_spans=self.has_spans)
        self.streams.publish(generation, term, found, claimed=last)

    def set_aside(self, refused: Sequence[Refused]) -> None:
        """Quarantine events that could not be applied, for people to examine."""
        if refused:
            first = refused[0]
            log.error("event.quarantined events=%d first=%s error=%s", len(refused), first.source, first.error)
            self.streams.set_aside(refused)


def messages(
    claimed: Sequence[Claimed], spread: Callable[[str], int], now: float = 0.0, *, has_spans: bool = False
) -> dict[str, list[bytes]]:
    """Encode the claimed tasks as messages by queue. Many tasks are bundled; few are spread over the workers."""
    by_queue: dict[str, list[Claimed]] = defaultdict(list)
    for task in claimed:
        by_queue[task.queue if task.to is None else private_queue(task.to)].append(task)
    found: dict[str, list[bytes]] = {}
    for queue, tasks in by_queue.items():
        size = max(1, min(MAX_BUNDLE, len(tasks) // max(1, spread(queue))))
        bundles: list[list[object]] = []
        room = weight = 0
        for task in sorted(tasks, key=attrgetter("alone")):
            weight += len(task.payload)
            if room == 0 or task.alone or weight > BUNDLE_BYTES:
                bundles.append([])
                room, weight = size, len(task.payload)
            is_plain = task.run_id is None and task.details is None and task.trace is None
            bundles[-1].append(task[:_PLAIN_FIELDS] if is_plain else _message(task, now, has_spans))
            room -= 1
        found[queue] = [encode(bundle) for bundle in bundles]
    return found


def _message(task: Claimed, now: float, has_spans: bool) -> Dispatch:
    trace = task.trace
    if trace is not None and task.is_turn_task and has_spans:  # the client that created the run did not know that
        trace = below(trace, run_span(task.id))
    return Dispatch(
        task.id,
        task.attempt,
        task.name,
        task.payload,
        task.queue,
        task.options,
        task.run_id,
        task.position,
        task.alone,
        task.failures,
        task.details,
        trace,
        0.0 if task.run_id is None else now,
    )
