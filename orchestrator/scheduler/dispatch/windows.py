"""The window of each queue: free slots and a little more, within the limits that people set."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable
from datetime import datetime
from typing import NamedTuple

from orchestrator.domain.fleet.window import room, smoothed_rate
from orchestrator.domain.limits.lane_limits import queue_bucket
from orchestrator.scheduler.dispatch.executing import out_of_flight
from orchestrator.scheduler.fleet.view import Fleet
from orchestrator.scheduler.limits import LaneService
from orchestrator.scheduler.tick_result import TickResult
from orchestrator.scheduler.transaction import Transaction
from orchestrator.store.limits import queues
from orchestrator.store.limits.queues import QueueRow
from orchestrator.store.tasks import claims

_RATE_AHEAD = 0.25
"""Seconds of a queue's rate that may be dispatched before a start is reported. Workers do not know the rates of queues,
and report a start only when the task has run for a while."""
_MIN_INTERVAL = 0.01
"""Seconds between two checks of a rate that rarely allows a task, at least."""
_MEASURING_INTERVAL = 0.02
"""Seconds between two measurements of a queue's throughput, at least."""
_MAX_DATA = 16_000_000
"""Bytes of payload claimed from a queue at once, estimated from recent claims."""
_LARGE_PAYLOAD = 10_000
"""Bytes of payload from which on the number of claimed tasks is limited by size."""

_MANY_QUEUES = 100
"""Number of queues from which on a claim first queries which of them have ready tasks."""
_READY_DIVISOR = 4
"""The query helps if at most one queue in this many has ready tasks."""


class Rooms(NamedTuple):
    """How many tasks a claim may take from each queue."""

    all: dict[str, int]
    """Tasks of any kind, for queues with room."""
    slots: dict[str, int]
    """Tasks that need slots, for all queues. Executions need none."""


class Windows:
    """Tracks the tasks in flight, the payload sizes and the throughput of each queue."""

    def __init__(self, fleet: Fleet, lanes: LaneService, batch: int, monotonic: Callable[[], float]) -> None:
        self._fleet = fleet
        self._lanes = lanes
        lanes.queues_held = self._held
        lanes.held = fleet.held
        self._batch = batch
        self._monotonic = monotonic
        self._limits: dict[str, QueueRow] = {}
        self._is_stale = True
        """The limits must be read before the next claim."""
        self.outstanding: Counter[str] = Counter()
        self._leaving: Counter[str] = Counter()
        """Tasks in flight in draining workers at the last count. Their slots are not reused."""
        self._sizes: dict[str, float] = {}
        """The mean payload size of queues with large payloads."""
        self.rates: dict[str, float] = {}
        self._measured_at = 0.0
        self._finished: Counter[str] = Counter()

    def recount(self, in_flight: Iterable[str], leaving: Iterable[str]) -> None:
        """Count the tasks in flight by queue, and those in draining workers."""
        self.outstanding = Counter(in_flight)
        self._leaving = Counter(leaving)

    def rolled_back(self) -> None:
        """Mark the limits as stale: they may have been read in the transaction that was rolled back."""
        self._is_stale = True

    def refresh(self, tx: Transaction) -> None:
        """Read the limits that people set, if they may have changed."""
        if self._is_stale or tx.result.wake.queues_changed:
            self._is_stale = False
            self._limits = {row.name: row for row in queues.read(tx.connection)}
            self._lanes.queue_rates = {row.name: row.rate for row in self._limits.values() if row.rate is not None}

    def ready(self, tx: Transaction) -> Collection[str]:
        """Return the queues that may have ready tasks and have workers: all of them, unless there are many."""
        served = self._fleet.queues
        limit = len(served) // _READY_DIVISOR
        if len(served) < _MANY_QUEUES or len(found := claims.ready_queues(tx.connection, limit + 1)) > limit:
            return served
        created = () if tx.created is None else tx.created.queues
        return served.keys() & {*found, *self._lanes.served(), *created}

    def rooms(self, tx: Transaction, limit: int, executing: Container[str], candidates: Iterable[str]) -> Rooms:
        """Return how many tasks to claim from each queue. Queues in `executing` last had only executions."""
        rooms = Rooms({}, {})
        capabilities, landed_by_queue = self._fleet.capabilities, tx.result.capacity.out_of_flight
        executions = capabilities.executions
        gone = executions.among(out_of_flight(tx.result, capabilities)) if executions else {}
        for queue in candidates:
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
                fitting = max(1, int(_MAX_DATA / self._sizes[queue])) if queue in self._sizes else free
                rooms.all[queue] = min(limit, free, fitting)
        return rooms

    def _held(self, tx: Transaction) -> dict[str, int]:
        """Return the tasks in flight of queues with limits, by bucket name."""
        landed_by_queue = tx.result.capacity.out_of_flight
        sent = Counter(task.queue for task in tx.result.outgoing.claimed)
        return {
            queue_bucket(name): max(0, self.outstanding[name] - landed_by_queue.get(name, 0) + sent[name])
            for name, limits in self._limits.items()
            if limits.concurrency is not None or limits.rate is not None
        }

    def _allowed(self, limits: QueueRow, outstanding: int, now: float) -> int:
        if limits.paused:
            return 0
        allowed = self._batch if limits.concurrency is None else limits.concurrency - outstanding
        if limits.rate is not None:
            admitted = self._lanes.buckets.admits(queue_bucket(limits.name), limits.rate, now, _RATE_AHEAD)
            allowed = min(allowed, admitted)
        return allowed

    def weigh(self, sizes: Iterable[tuple[str, int]], together: int) -> None:
        """Update the mean payload sizes of queues, if large ones occur. `together`: the total size in bytes."""
        if not self._sizes and together < _MAX_DATA // 4:
            return
        total: Counter[str] = Counter()
        number: Counter[str] = Counter()
        for queue, size in sizes:
            total[queue] += size
            number[queue] += 1
        for queue in number:
            mean = max(total[queue] / number[queue], self._sizes.get(queue, 0.0) / 2)
            if mean > _LARGE_PAYLOAD:
                self._sizes[queue] = mean
            else:
                self._sizes.pop(queue, None)

    def due_in(self, now: datetime) -> float:
        """Return the seconds until a rate allows another task; infinite if no rate is waited for."""
        timestamp = now.timestamp()
        seconds = self._lanes.due_in(timestamp)
        times = [] if seconds is None else [seconds]
        for limits in self._limits.values():
            if limits.rate is None or limits.paused:
                continue
            bucket, buckets = queue_bucket(limits.name), self._lanes.buckets
            if buckets.waits_for_report(bucket, limits.rate, _RATE_AHEAD):
                continue  # a report of the start will free it
            if not buckets.admits(bucket, limits.rate, timestamp, _RATE_AHEAD):
                times.append(buckets.next_admission(bucket, limits.rate, timestamp) - timestamp)
        return max(_MIN_INTERVAL, min(times, default=math.inf)) if min(times, default=1.0) > 0 else 0.0

    def committed(self, tick: TickResult, sent: Iterable[str]) -> None:
        """Update the tasks in flight and the throughput of queues. `sent` has the queue of each sent task."""
        for queue, number in tick.capacity.out_of_flight.items():
            self.outstanding[queue] -= number
        for queue, number in tick.capacity.finished.items():
            self._finished[queue] += number
        if tick.outgoing.claimed:
            self.outstanding.update(sent)
        monotonic = self._monotonic()
        elapsed = monotonic - self._measured_at
        if elapsed >= _MEASURING_INTERVAL:
            for queue in {*self.rates, *self._finished}:
                self.rates[queue] = smoothed_rate(self.rates.get(queue, 0.0), self._finished[queue], elapsed)
                if self.rates[queue] < 1.0:
                    del self.rates[queue]
            self._finished.clear()
            self._measured_at = monotonic
