"""Watch the fleet: read heartbeats, store them in Postgres for display, and send orders to workers.

An order is repeated until the heartbeat shows its effect, so a lost order costs a second.
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

_MIRROR_INTERVAL = 5.0
_BEGIN_WITHIN = 1.0
"""Seconds within which a dispatched task begins, unless its worker is full."""
_MAX_DISPLAYED = 3
"""Tasks displayed for a worker that is stuck, at most."""


@dataclass
class _Recorded:
    """The records of a transaction, and its decisions about workers."""

    orders: dict[str, dict[str, Any]] = field(default_factory=dict)
    shape: object = None
    """The displayed state that was stored, if any."""
    described: Sequence[str] = ()
    """Digests of parameters that were stored."""


class FleetWatch(CommitHooks):
    """Records the workers in Postgres, and decides and sends orders to them."""

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
        """Workers that announced their end."""
        self._mirror_at = 0.0
        self._has_checked = False
        self._check_all_until = 0.0
        """The time until which workers may hold attempts that Postgres has lost."""
        self._monotonic = monotonic
        self.drains: frozenset[bytes] = frozenset()
        """Parent processes of workers ordered to drain, by id."""
        self.due_at = 0.0
        self._described: set[str] = set()
        """Digests of stored parameters of tasks."""
        self._read: dict[str, dict[str, list[Parameter]]] = {}
        """Parameters found by the last check that are not stored yet, by digest."""

    def read_heartbeats(self) -> None:
        monotonic = self._monotonic()
        self._fleet.observe(self._streams.fleet.heartbeats(), monotonic, self._streams.fleet.names)
        self._fleet.forget_dead()
        self._read_parameters()
        self._has_checked = True
        self.due_at = monotonic + self._settings.heartbeat
        self._revoked = {attempt: until for attempt, until in self._revoked.items() if until > monotonic}
        self._order_stops()
        self._order_drains()

    def committed(self, tick: TickResult) -> None:
        """Remember what was recorded, and order workers to stop revoked attempts."""
        if self._recorded is not None:
            for worker, order in self._recorded.orders.items():
                self._order(worker, **order)
            if self._recorded.shape is not None:
                self._mirrored = self._recorded.shape
                self._stopped = []
                self._mirror_at = self._monotonic() + _MIRROR_INTERVAL
            self._described.update(self._recorded.described)
            self._recorded = None
            self._has_checked = False
        if tick.outgoing.revoked:
            until = self._monotonic() + 10 * self._settings.worker_ttl
            self._revoked.update({(task.id, task.attempt): until for task in tick.outgoing.revoked})
            self._order_stops()
        if tick.outgoing.drains is not None:
            self.drains = tick.outgoing.drains
            self._order_drains()

    def rolled_back(self) -> None:
        """Discard the records of a transaction that was rolled back; the next one makes them again."""
        self._recorded = None

    def unreceived(self, generation: str, tasks: Sequence[Moved]) -> dict[str, list[str]]:
        """Return the messages, by queue, that no worker has received and that contain only these attempts."""
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
                    continue  # the worker that reads the message quarantines it
                if message.consumer is None and members <= attempts:
                    found.setdefault(queue, []).append(message.entry)
        return found

    def note_stopped(self, stopped: Sequence[str]) -> None:
        """Record workers that shut down cleanly, for display."""
        self._stopped += stopped

    def record(self, tx: Transaction) -> None:
        """After a check, answer workers that ask, and store the displayed state if it has changed."""
        if not self._has_checked:
            return
        self._recorded = recorded = _Recorded()
        for beat in self._fleet.beats.values():
            if beat.doubtful:  # it was suspended or cut off, and asks which of its attempts are still current
                recorded.orders[beat.worker] = {**_stale(tx, beat), "go_on": True}
            elif self._monotonic() < self._check_all_until and (stale := _stale(tx, beat))["stop"]:
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
        """Read published parameters of tasks that are not stored. Those of the newest worker come last."""
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
            retentions = (self._settings.retention_success, self._settings.retention_failed)
            until = tx.now + timedelta(seconds=max(retentions)) if all(retentions) else None
            mirror.keep_releases(tx.connection, named, until)

    def order_returns(self, in_flight: Sequence[InFlight]) -> None:
        """Order workers to return attempts that have not begun, if other workers have free slots or they expired."""
        expired = {(task.id, task.attempt) for task in in_flight if task.has_expired and task.status == "dispatched"}
        if not expired and not self._fleet.capabilities.mixed:
            return
        waiting = {
            task.id: task.attempt for task in in_flight if task.status == "dispatched" and task.age > _BEGIN_WITHIN
        }
        spares = {
            worker: [(task, waiting[task]) for task in tasks]
            for worker, tasks in self._fleet.capabilities.better_elsewhere(waiting).items()
        }
        for beat in self._fleet.beats.values() if expired else ():
            if late := expired.intersection(unpack_attempts(beat.held)):
                spares[beat.worker] = sorted(late.union(spares.get(beat.worker, ())))
        for worker, attempts in spares.items():
            self._order(worker, spare=[Attempt(*attempt) for attempt in attempts])

    def check_all_attempts(self) -> None:
        """For a while, check for every worker which of its attempts are current."""
        self._check_all_until = self._monotonic() + 2 * self._settings.worker_ttl

    def send_orders(self) -> None:
        """Send the orders."""
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
        """Merge changes into the next order to a worker."""
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
            holds=[to_text(task) for task, _ in unpack_attempts(beat.held)[:_MAX_DISPLAYED]] if beat.still else [],
            parent=None if beat.parent is None else to_text(beat.parent),
            memory=beat.memory or None,
            parent_memory=beat.parent_memory or None,
        )


def _stale(tx: Transaction, beat: Heartbeat) -> dict[str, list[Attempt]]:
    """Return an order to stop attempts of a worker that are no longer current and have not succeeded."""
    held = unpack_attempts(beat.held)
    current = waiting.current(tx.connection, held) if held else set()
    ended = [attempt for attempt in held if attempt not in current]
    counted = waiting.succeeded(tx.connection, ended) if ended else set()
    stop = [attempt for attempt in ended if attempt not in counted]
    moved = waiting.moved(tx.connection, stop) if stop else set()
    return {"stop": [Attempt(*attempt) for attempt in stop], "moved": [Attempt(*attempt) for attempt in sorted(moved)]}
