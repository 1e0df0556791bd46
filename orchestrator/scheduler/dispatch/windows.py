"""How many tasks each queue may be given: free slots and a little ahead of them, within what people allow."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable
from datetime import datetime
from typing import NamedTuple

from orchestrator.domain.fleet.window import room, smoothed_rate
from orchestrator.domain.limits.lane_limits import queue_bucket
from orchestrator.scheduler.dispatch.executing import landed
from orchestrator.scheduler.fleet.view import Fleet
from orchestrator.scheduler.limits import LaneService
from orchestrator.scheduler.tick_result import TickResult
from orchestrator.scheduler.transaction import Transaction
from orchestrator.store.limits import queues
from orchestrator.store.limits.queues import QueueRow
from orchestrator.store.tasks import claims

_AHEAD = 0.25
"""Seconds of a queue's rate that may be dispatched before a start is reported: a worker does not know the rates of
queues, and reports a start only when the task has run for a while."""
_SHORTEST = 0.01
"""Seconds between two looks at a rate that allows one task now and then."""
_MEASURED = 0.02
"""Seconds over which it is measured, at least, how fast a queue drains."""
_MOST_DATA = 16_000_000
"""Bytes of payload that are claimed of a queue at once, estimated from the last claims."""
_LARGE = 10_000
"""Bytes of payload from which on it matters how many tasks are claimed."""

_MANY = 100
"""Queues from which on a claim first asks which of them have something ready."""
_FEW = 4
"""It helps if at most one in so many has."""


class Rooms(NamedTuple):
    """How many tasks queues may be given in one claim."""

    all: dict[str, int]
    """Of queues that have room for any."""
    slots: dict[str, int]
    """Of all queues, how many of them may need slots; executions need none."""


class Windows:
    """Remembers how much each queue has in flight, how large its tasks are and how fast it drains."""

    def __init__(self, fleet: Fleet, lanes: LaneService, batch: int, monotonic: Callable[[], float]) -> None:
        self._fleet = fleet
        self._lanes = lanes
        lanes.queues_held = self._held
        lanes.held = fleet.held
        self._batch = batch
        self._monotonic = monotonic
        self._limits: dict[str, QueueRow] = {}
        self._is_stale = True
        """They are to be read before the next claim."""
        self.outstanding: Counter[str] = Counter()
        self._leaving: Counter[str] = Counter()
        """Of these, what ran in workers that drain when it was last counted: their slots are not to be had any more."""
        self._sizes: dict[str, float] = {}
        """Mean size of payloads, of queues with large ones."""
        self.rates: dict[str, float] = {}
        self._measured_at = 0.0
        self._finished: Counter[str] = Counter()

    def recount(self, in_flight: Iterable[str], leaving: Iterable[str]) -> None:
        """Start from the queue of each task that is in flight, and of each that runs in a worker that drains."""
        self.outstanding = Counter(in_flight)
        self._leaving = Counter(leaving)

    def rolled_back(self) -> None:
        """What people allow may have been read as this tick would have left it."""
        self._is_stale = True

    def refresh(self, tx: Transaction) -> None:
        """Read what people allow, if that is not known."""
        if self._is_stale or tx.result.wake.queues_changed:
            self._is_stale = False
            self._limits = {row.name: row for row in queues.read(tx.connection)}
            self._lanes.queue_rates = {row.name: row.rate for row in self._limits.values() if row.rate is not None}

    def ready(self, tx: Transaction) -> Collection[str]:
        """Return the queues with workers that may have something ready: all, unless they are many."""
        served = self._fleet.queues
        most = len(served) // _FEW
        if len(served) < _MANY or len(found := claims.ready_queues(tx.connection, most + 1)) > most:
            return served
        created = () if tx.created is None else tx.created.queues
        return served.keys() & {*found, *self._lanes.served(), *created}

    def rooms(self, tx: Transaction, most: int, executing: Container[str], among: Iterable[str]) -> Rooms:
        """Return how many tasks these queues may be given now, at most so many; some have `executing` tasks only."""
        rooms = Rooms({}, {})
        capabilities, landed_by_queue = self._fleet.capabilities, tx.result.capacity.landed
        executions = capabilities.executions
        gone = executions.among(landed(tx.result, capabilities)) if executions else {}
        for queue in among:
            outstanding = in_slots = self.outstanding[queue] - landed_by_queue.get(queue, 0)
            if executions:
                in_slots -= executions.outstanding[queue] - gone.get(queue, 0)
            if self._leaving:
                in_slots = max(0, in_slots - self._leaving[queue])
            free = rooms.slots[queue] = room(self._fleet.slots(queue), in_slots, self.rates.get(queue, 0.0))
            if queue in executing:
                free = max(free, executions.room(capabilities.watching(queue)))
            limits = self._limits.get(queue)
            if limits is not None:
                if self._lanes.elsewhere:
                    outstanding += self._lanes.elsewhere.get(queue_bucket(queue), 0)
                free = min(free, self._allowed(limits, outstanding, tx.now.timestamp()))
            if free > 0:
                fitting = max(1, int(_MOST_DATA / self._sizes[queue])) if queue in self._sizes else free
                rooms.all[queue] = min(most, free, fitting)
        return rooms

    def _held(self, tx: Transaction) -> dict[str, int]:
        """Return what is in flight of queues with limits, by the names of their buckets."""
        landed_by_queue = tx.result.capacity.landed
        sent = Counter(task.queue for task in tx.result.outgoing.claimed)
        return {
            queue_bucket(name): max(0, self.outstanding[name] - landed_by_queue.get(name, 0) + sent[name])
            for name, limits in self._limits.items()
            if limits.concurrency is not None or limits.rate is not None
        }

    def _allowed(self, limits: QueueRow, outstanding: int, now: float) -> int:
        """Return how many more tasks people allow."""
        if limits.paused:
            return 0
        allowed = self._batch if limits.concurrency is None else limits.concurrency - outstanding
        if limits.rate is not None:
            admitted = self._lanes.buckets.admits(queue_bucket(limits.name), limits.rate, now, _AHEAD)
            allowed = min(allowed, admitted)
        return allowed

    def weigh(self, sizes: Iterable[tuple[str, int]], together: int) -> None:
        """Learn how large tasks of queues are, as far as that limits how many are claimed at once."""
        if not self._sizes and together < _MOST_DATA // 4:
            return
        total: Counter[str] = Counter()
        number: Counter[str] = Counter()
        for queue, size in sizes:
            total[queue] += size
            number[queue] += 1
        for queue in number:
            mean = max(total[queue] / number[queue], self._sizes.get(queue, 0.0) / 2)
            if mean > _LARGE:
                self._sizes[queue] = mean
            else:
                self._sizes.pop(queue, None)

    def due_in(self, now: datetime) -> float:
        """Return how many seconds may pass before a rate allows more; infinite if none is waited for."""
        moment = now.timestamp()
        seconds = self._lanes.due_in(moment)
        times = [] if seconds is None else [seconds]
        for limits in self._limits.values():
            if limits.rate is None or limits.paused:
                continue
            bucket, buckets = queue_bucket(limits.name), self._lanes.buckets
            if buckets.is_unheard(bucket, limits.rate, _AHEAD):
                continue  # until a report has one
            if not buckets.admits(bucket, limits.rate, moment, _AHEAD):
                times.append(buckets.next_admission(bucket, limits.rate, moment) - moment)
        return max(_SHORTEST, min(times, default=math.inf)) if min(times, default=1.0) > 0 else 0.0

    def committed(self, tick: TickResult, sent: Iterable[str]) -> None:
        """Move the counts, with the queue of each task that was sent, and measure how fast each queue drains."""
        for queue, number in tick.capacity.landed.items():
            self.outstanding[queue] -= number
        for queue, number in tick.capacity.finished.items():
            self._finished[queue] += number
        if tick.outgoing.claimed:
            self.outstanding.update(sent)
        monotonic = self._monotonic()
        elapsed = monotonic - self._measured_at
        if elapsed >= _MEASURED:
            for queue in {*self.rates, *self._finished}:
                self.rates[queue] = smoothed_rate(self.rates.get(queue, 0.0), self._finished[queue], elapsed)
                if self.rates[queue] < 1.0:
                    del self.rates[queue]
            self._finished.clear()
            self._measured_at = monotonic
