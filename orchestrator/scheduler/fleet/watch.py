"""Watch the fleet: read heartbeats, mirror them for people, and give orders to single workers.

An order is repeated while a heartbeat still lists what it is about, so a lost one costs a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from operator import attrgetter
from typing import Any

import msgspec

from orchestrator.domain.ids import to_text
from orchestrator.domain.tasks.parameters import Parameter
from orchestrator.scheduler.fleet.view import Fleet
from orchestrator.scheduler.tick_result import CommitHooks, TickResult
from orchestrator.scheduler.transaction import Transaction
from orchestrator.settings import Settings
from orchestrator.store import fleet as mirror
from orchestrator.store.fleet import WorkerRelease, WorkerRow
from orchestrator.store.tasks import waiting
from orchestrator.store.tasks.transitions import Moved
from orchestrator.store.tasks.waiting import InFlight
from orchestrator.transport.codec import (
    Attempt,
    Heartbeat,
    Malformed,
    Order,
    decode_dispatches,
    unpack_attempts,
)
from orchestrator.transport.keys import private_queue
from orchestrator.transport.leader.streams import LeaderStreams

_MIRROR_EVERY = 5.0
_SOON = 1.0
"""Seconds in which a task that was handed out begins, unless its worker is full."""
_MOST_SHOWN = 3
"""Tasks that people are shown of a worker that stands still."""


@dataclass
class _Recorded:
    """What a transaction has recorded, and decided about workers."""

    orders: dict[str, dict[str, Any]] = field(default_factory=dict)
    shape: object = None
    """What was mirrored, if anything."""
    described: Sequence[str] = ()
    """Digests of parameters that were stored."""


class FleetWatch(CommitHooks):
    """The leader's dealings with single workers."""

    def __init__(
        self, fleet: Fleet, streams: LeaderStreams, settings: Settings, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._fleet = fleet
        self._streams = streams
        self._settings = settings
        self._revoked: dict[tuple[bytes, int], float] = {}
        self._orders: dict[str, Order] = {}
        self._recorded: _Recorded | None = None
        """The records of the open transaction."""
        self._mirrored: object = None
        self._stopped: list[str] = []
        """Workers that have said that they end."""
        self._mirror_at = 0.0
        self._looked = False
        self._doubts_until = 0.0
        """Until when workers may hold attempts of which Postgres has lost all memory."""
        self._monotonic = monotonic
        self.drains: frozenset[bytes] = frozenset()
        """Workers that are ordered to drain, by the ids of their parent processes."""
        self.due_at = 0.0
        self._described: set[str] = set()
        """Digests of parameters of tasks that are stored."""
        self._read: dict[str, dict[str, list[Parameter]]] = {}
        """Parameters that the last look has found and that are not stored, by digest."""

    def read_heartbeats(self) -> None:
        monotonic = self._monotonic()
        self._fleet.observe(self._streams.fleet.heartbeats(), monotonic, self._streams.fleet.names)
        self._fleet.forget_dead()
        self._read_parameters()
        self._looked = True
        self.due_at = monotonic + self._settings.heartbeat
        self._revoked = {attempt: until for attempt, until in self._revoked.items() if until > monotonic}
        self._order_stops()
        self._order_drains()

    def committed(self, tick: TickResult) -> None:
        """Remember what was recorded, and attempts that are to stop; order it where they are known to run."""
        if self._recorded is not None:
            for worker, order in self._recorded.orders.items():
                self._order(worker, **order)
            if self._recorded.shape is not None:
                self._mirrored = self._recorded.shape
                self._stopped = []
                self._mirror_at = self._monotonic() + _MIRROR_EVERY
            self._described.update(self._recorded.described)
            self._recorded = None
            self._looked = False
        if tick.outgoing.revoked:
            until = self._monotonic() + 10 * self._settings.worker_ttl
            self._revoked.update({(task.id, task.attempt): until for task in tick.outgoing.revoked})
            self._order_stops()
        if tick.outgoing.drains is not None:
            self.drains = tick.outgoing.drains
            self._order_drains()

    def rolled_back(self) -> None:
        """Record it again after a rollback."""
        self._recorded = None

    def unreceived(self, generation: str, tasks: Sequence[Moved]) -> dict[str, list[str]]:
        """Return the messages, by queue, that no worker has received and that hold only these attempts."""
        found: dict[str, list[str]] = {}
        if not tasks:
            return found
        attempts = {(task.id, task.attempt) for task in tasks}
        dispatched = [task for task in tasks if task.before == "dispatched"]
        placed = {worker for task in dispatched if (worker := self._fleet.capabilities.holder(task.id)) is not None}
        for queue in {*(task.queue for task in dispatched), *map(private_queue, placed)}:
            for message in self._streams.queues.messages(generation, queue):
                try:
                    members = {(task.id, task.attempt) for task in decode_dispatches(message.body)}
                except Malformed:
                    continue  # the worker that reads it sets it aside
                if message.consumer is None and members <= attempts:
                    found.setdefault(queue, []).append(message.entry)
        return found

    def heard_of(self, stopped: Sequence[str]) -> None:
        """Take note of workers that have ended in good order; people are shown so."""
        self._stopped += stopped

    def record(self, tx: Transaction) -> None:
        """After a look: answer workers that ask, and mirror the fleet where it has changed."""
        if not self._looked:
            return
        self._recorded = recorded = _Recorded()
        for beat in self._fleet.beats.values():
            if beat.doubtful:  # it was stopped or cut off, and asks which of its attempts no longer count
                recorded.orders[beat.worker] = {**_stale(tx, beat), "go_on": True}
            elif self._monotonic() < self._doubts_until and (stale := _stale(tx, beat))["stop"]:
                recorded.orders[beat.worker] = stale
            elif beat.burst and not beat.draining and not waiting.is_busy(tx.connection, beat.queues):
                recorded.orders[beat.worker] = {"drain": True}
            elif beat.hungry and waiting.has_ready(tx.connection, beat.queues):
                recorded.orders[beat.worker] = {"work_waits": True}
        if self._read:
            mirror.describe(tx.connection, [*self._read.values()])
            recorded.described = [*self._read]
        shape = {(beat.worker, beat.running, beat.draining, beat.still > 0) for beat in self._fleet.beats.values()}
        if shape != self._mirrored or self._stopped or (shape and self._monotonic() >= self._mirror_at):
            if shape:
                mirror.mirror(tx.connection, [self._row(beat) for beat in self._fleet.beats.values()], tx.now)
                self._keep_releases(tx)
            mirror.mark_gone(tx.connection, list(self._fleet.beats), self._stopped, tx.now)
            recorded.shape = shape

    def _read_parameters(self) -> None:
        """Read parameters of tasks that workers have published and that are not stored; the newest worker goes last."""
        beats = sorted(self._fleet.beats.values(), key=attrgetter("started_at"))
        announced = dict.fromkeys(beat.parameters for beat in beats if beat.parameters)
        self._described &= announced.keys()
        self._read = {
            digest: found
            for digest in announced
            if digest not in self._described and (found := self._streams.fleet.parameters(digest)) is not None
        }

    def _keep_releases(self, tx: Transaction) -> None:
        beats = self._fleet.beats.values()
        named = sorted(WorkerRelease(beat.worker, beat.release, beat.started_at) for beat in beats if beat.release)
        if named:
            kept = (self._settings.retention_success, self._settings.retention_failed)
            until = tx.now + timedelta(seconds=max(kept)) if all(kept) else None
            mirror.keep_releases(tx.connection, named, until)

    def ask_back(self, in_flight: Sequence[InFlight]) -> None:
        """Have workers give back what they have not begun: where others have free slots for it, or it has expired."""
        expired = {(task.id, task.attempt) for task in in_flight if task.has_expired and task.status == "dispatched"}
        if not expired and not self._fleet.capabilities.mixed:
            return
        waiting = {task.id: task.attempt for task in in_flight if task.status == "dispatched" and task.age > _SOON}
        wanted = {
            worker: [(task, waiting[task]) for task in tasks]
            for worker, tasks in self._fleet.capabilities.better_elsewhere(waiting).items()
        }
        for beat in self._fleet.beats.values() if expired else ():
            if late := expired.intersection(unpack_attempts(beat.held)):
                wanted[beat.worker] = sorted(late.union(wanted.get(beat.worker, ())))
        for worker, attempts in wanted.items():
            self._order(worker, spare=[Attempt(*attempt) for attempt in attempts])

    def doubt_all(self) -> None:
        """For a while, see for every worker which of its attempts are still current."""
        self._doubts_until = self._monotonic() + 2 * self._settings.worker_ttl

    def give_orders(self) -> None:
        """Send what has been decided."""
        if self._orders:
            self._streams.fleet.order(self._orders)
            self._orders = {}

    def _order_stops(self) -> None:
        if not self._revoked:
            return
        for beat in self._fleet.beats.values():
            stop = [Attempt(*attempt) for attempt in unpack_attempts(beat.held) if attempt in self._revoked]
            if stop:
                self._order(beat.worker, stop=stop)

    def _order_drains(self) -> None:
        """Order workers to drain, until their heartbeats say that they do."""
        if not self.drains:
            return
        for beat in self._fleet.beats.values():
            if beat.parent in self.drains and not beat.draining:
                self._order(beat.worker, end=True)

    def _order(self, worker: str, **changes: Any) -> None:
        """Add to the next orders of a worker."""
        self._orders[worker] = msgspec.structs.replace(self._orders.get(worker, Order()), **changes)

    def _row(self, beat: Heartbeat) -> WorkerRow:
        return WorkerRow(
            id=beat.worker,
            host=beat.host,
            pid=beat.pid,
            queues=beat.queues,
            names=sorted(self._fleet.names_of(beat.names)),
            slots=beat.slots,
            running=beat.running,
            state="draining" if beat.draining else "live",
            started_at=beat.started_at,
            still=beat.still or None,
            holds=[to_text(task) for task, _ in unpack_attempts(beat.held)[:_MOST_SHOWN]] if beat.still else [],
            parent=None if beat.parent is None else to_text(beat.parent),
            memory=beat.memory or None,
            parent_memory=beat.parent_memory or None,
        )


def _stale(tx: Transaction, beat: Heartbeat) -> dict[str, list[Attempt]]:
    """Return what a worker holds and what counts no more, as an order; what has succeeded has counted."""
    held = unpack_attempts(beat.held)
    current = waiting.current(tx.connection, held) if held else set()
    over = [attempt for attempt in held if attempt not in current]
    counted = waiting.succeeded(tx.connection, over) if over else set()
    stop = [attempt for attempt in over if attempt not in counted]
    moved = waiting.moved(tx.connection, stop) if stop else set()
    return {"stop": [Attempt(*attempt) for attempt in stop], "moved": [Attempt(*attempt) for attempt in sorted(moved)]}
