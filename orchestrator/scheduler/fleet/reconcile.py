"""Find lost messages, and attempts whose workers have died.

Every task in flight is held by a live worker, or in a stream that nobody has read yet, or on its way back in the
events. Otherwise it was lost. The order matters: first the heartbeats and streams (`suspects`), then all events to the
end, and only then the verdict. The guards of the transitions make it harmless for attempts that moved in between.

    held by a live worker                   leave it alone, however long it runs
    message not received by any worker      leave it alone, unless its task has expired: a backlog is not a loss
    message to one worker, not received
      for two seconds                       the worker is busy or gone: return the task at no cost. A task other than
                                            a turn is returned only if the worker can be kept from receiving it, and
                                            if the worker is gone or another one that knows the task has a free slot
    message received by a live worker,
      not listed for a whole TTL            the answer to the worker's read was lost: return it at no cost,
                                            or as a loss if its task limits its starts
    message received by a dead worker       a loss: dispatch again, alone
    no message, running on a dead worker    a loss: dispatch again, alone
    no message and no holder for a
      whole TTL                             the message was lost: return it at no cost,
                                            or as a loss if its task limits its starts

A heartbeat may be older than the message that its worker has just received. After a whole TTL no such heartbeat can
arrive anymore; two checks within moments would prove nothing.

A worker reported dead by its parent leaves messages of attempts no longer in flight. Those raise no suspicion, so all
queues are swept from time to time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from orchestrator.domain.tasks.task import Lost, Returned
from orchestrator.scheduler.code.paging import Paging
from orchestrator.scheduler.dispatch.dispatcher import Dispatcher
from orchestrator.scheduler.fleet.capabilities import Placement
from orchestrator.scheduler.fleet.generations import Generations
from orchestrator.scheduler.fleet.view import Fleet
from orchestrator.scheduler.fleet.watch import FleetWatch
from orchestrator.scheduler.leadership import Leadership
from orchestrator.scheduler.link import FAILURES, Link
from orchestrator.scheduler.tasks.locked import VERDICT, Reported
from orchestrator.store.tasks import waiting
from orchestrator.store.tasks.waiting import InFlight
from orchestrator.transport.codec import Malformed, decode_dispatches
from orchestrator.transport.keys import is_private, private_queue, worker_of
from orchestrator.transport.leader.queues import Message, Queues
from orchestrator.transport.leader.streams import LeaderStreams

_MINIMUM_AGE = 1.0
"""Seconds since the dispatch before a task is suspected, so that the streams of a fast queue are never read."""
_UNRECEIVED_AFTER = 2.0
"""Seconds that a worker has to receive a message that was sent only to it, before the task is returned."""


@dataclass
class Suspicion:
    """The suspected attempts of a fleet check, not yet compared with the latest events."""

    has_read_tasks: bool = True
    """The tasks in flight were read. Otherwise, earlier suspicions still stand."""
    tasks: list[InFlight] = field(default_factory=list)
    where: dict[tuple[bytes, int], tuple[str, Message]] = field(default_factory=dict)
    """Queue and message of each suspected attempt that has one."""
    names: dict[tuple[bytes, int], str] = field(default_factory=dict)
    """The task name in each of those messages."""
    taken_back: set[tuple[str, str]] = field(default_factory=set)
    """Queues and messages that were sent to one worker, which will not receive them anymore."""
    stale: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Messages of attempts that are no longer in flight, by queue."""


class Reconciler:
    """Decides which attempts are lost. Between checks it remembers only when each attempt was first missing."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._missing_since: dict[tuple[bytes, int], float] = {}

    @property
    def is_waiting(self) -> bool:
        """Return whether an attempt is missing that will be lost unless a worker lists it within a TTL."""
        return bool(self._missing_since)

    def suspects(
        self, queues: Queues, generation: str, in_flight: Sequence[InFlight], sweep: Iterable[str] = ()
    ) -> Suspicion:
        """Return the tasks in flight that no live worker lists, and their messages.

        Messages of attempts not in flight are searched in the queues of these tasks, and in the queues to `sweep`.
        """
        held = self._fleet.held()
        suspicion = Suspicion(
            tasks=[task for task in in_flight if task.age > _MINIMUM_AGE and (task.id, task.attempt) not in held]
        )
        current = {(task.id, task.attempt) for task in in_flight}
        for queue in sorted({*sweep, *self._private(suspicion.tasks), *(task.queue for task in suspicion.tasks)}):
            for message in queues.messages(generation, queue):
                try:
                    names = {(task.id, task.attempt): task.name for task in decode_dispatches(message.body)}
                except Malformed:
                    continue  # the worker that reads the message quarantines it
                for attempt in names:
                    suspicion.where[attempt] = (queue, message)
                suspicion.names.update(names)
                if not current.intersection(names):
                    suspicion.stale[queue].append(message.entry)
        self._take_back(queues, generation, suspicion)
        return suspicion

    def _private(self, tasks: Sequence[InFlight]) -> set[str]:
        """Return the private streams that may have messages of these tasks.

        If a task is about to be declared lost, return those of all workers: an earlier leader may have placed it.
        """
        placed = {worker for task in tasks if (worker := self._fleet.capabilities.holder(task.id)) is not None}
        homes = {task.worker for task in tasks if task.is_turn_task and task.worker}
        early = self._fleet.fair_time - self._fleet.ttl / 2
        if any(self._missing_since.get((task.id, task.attempt), math.inf) <= early for task in tasks):
            homes |= set(self._fleet.beats)
        return {private_queue(worker) for worker in placed | homes}

    def _take_back(self, queues: Queues, generation: str, suspicion: Suspicion) -> None:
        """Take messages back from workers that have not received them, where that is still possible."""
        entries: dict[str, set[str]] = defaultdict(set)
        for task in suspicion.tasks:
            queue, message = suspicion.where.get((task.id, task.attempt), ("", None))
            if message is None or message.consumer is not None or task.is_turn_task:
                continue
            if task.has_expired:
                entries[queue].add(message.entry)
            elif is_private(queue) and task.age > _UNRECEIVED_AFTER:
                place = Placement(worker_of(queue), task.queue, (suspicion.names[task.id, task.attempt],))
                if not self._fleet.capabilities.is_of_use(place):
                    entries[queue].add(message.entry)
        for queue, unreceived in entries.items():
            taken = queues.take_back(generation, queue, sorted(unreceived))
            suspicion.taken_back.update((queue, entry) for entry in taken)

    def judge(self, suspicion: Suspicion) -> tuple[list[Reported], dict[str, list[str]]]:
        """Return the reports of lost and returned attempts, and the messages to withdraw, by queue."""
        if not suspicion.has_read_tasks:
            return [], {}
        fleet = self._fleet
        reports: list[Reported] = []
        withdraw: dict[str, list[str]] = defaultdict(list)
        missing: dict[tuple[bytes, int], float] = {}
        for task in suspicion.tasks:
            attempt = (task.id, task.attempt)
            queue, message = suspicion.where.get(attempt, ("", None))
            if message is not None and message.consumer is None:
                if (queue, message.entry) in suspicion.taken_back:
                    reports.append((VERDICT, "nobody", Returned(task.id, task.attempt, "not received")))
                elif is_private(queue) and task.is_turn_task and task.age > _UNRECEIVED_AFTER:
                    reports.append((VERDICT, "nobody", Returned(task.id, task.attempt, "not received")))
                    withdraw[queue].append(message.entry)
                continue
            owner = message.consumer if message is not None else task.worker
            if owner is not None and fleet.is_dead(owner):
                lost = Lost(task.id, task.attempt, alone=False, unheard=fleet.silence(owner))
                reports.append((VERDICT, owner, lost))
            elif owner is not None and owner not in fleet.beats:
                continue
            else:
                missing[attempt] = self._missing_since.get(attempt, fleet.fair_time)
                if fleet.in_grace or fleet.fair_time - missing[attempt] < fleet.ttl:
                    continue
                returned = Returned(
                    task.id, task.attempt, "message lost", begun=message is None
                )  # Redis may have lost it
                reports.append((VERDICT, owner or "nobody", returned))
            if message is not None:
                withdraw[queue].append(message.entry)
        self._missing_since = missing
        for queue, entries in suspicion.stale.items():
            withdraw[queue].extend(entries)
        return reports, {queue: sorted(set(entries)) for queue, entries in withdraw.items()}


# -- the periodic check of Redis and the fleet, about once a second

_SWEEP_INTERVAL = 10.0
"""Seconds between two sweeps for messages of attempts not in flight."""
_MAX_SWEPT = 1_000
"""Queues in one sweep. The next one continues behind them."""
_PAUSE_FACTOR = 20.0
"""The pause between two reads of the tasks in flight, as a multiple of a read's duration. An open transaction makes
reads slow by keeping dead rows in the index."""
_MAX_PAUSE = 30.0
"""Seconds between two reads of the tasks in flight, at most: the machine may only have been busy. After a loss of
data in Redis, or with attempts missing, they are read earlier."""


def pause_after(took: float) -> float:
    """Return the seconds until the next read of the tasks in flight, given the duration of the last."""
    return min(_PAUSE_FACTOR * took, _MAX_PAUSE)


@dataclass
class FleetCheck:
    """Checks what Redis has lost, which workers are live, and which tasks seem lost."""

    streams: LeaderStreams
    leadership: Leadership
    generations: Generations
    link: Link
    fleet: Fleet
    watch: FleetWatch
    dispatcher: Dispatcher
    paging: Paging
    reconciler: Reconciler
    monotonic: Callable[[], float]
    _sweep_at: float = 0.0
    _last_swept: str = ""
    _count_at: float = 0.0
    _counted_at: float = 0.0

    def run(self) -> Suspicion:
        """Check Redis and the fleet. Return the suspected attempts."""
        suspicion = Suspicion(has_read_tasks=False)
        try:
            if self.generations.keep(self.monotonic()):
                self.fleet.grace()
                self._count_at = 0.0
                if self.generations.is_rewound:
                    self.watch.check_all_attempts()
            self.watch.read_heartbeats()
            self.link.changes.observe(self.streams.fleet.is_watched, self.fleet.beats.values())
            if self._is_count_due():
                suspicion = self._suspects()
            self.link.worked()
        except FAILURES as error:
            self.link.failed(error, is_look=True)
        return suspicion

    def _is_count_due(self) -> bool:
        """Return whether to read the tasks in flight. Missing attempts can be judged after a TTL."""
        at = min(self._count_at, self._counted_at + self.fleet.ttl) if self.reconciler.is_waiting else self._count_at
        return self.monotonic() >= at

    def _suspects(self) -> Suspicion:
        began, sweep = self.monotonic(), self._sweep()
        if not self.dispatcher.in_flight and not sweep:
            return Suspicion()
        with self.leadership.reading() as connection:
            in_flight = waiting.in_flight(connection)
        self._counted_at = began
        self._count_at = began + pause_after(self.monotonic() - began)
        self.dispatcher.recount(in_flight)
        self.watch.order_returns(in_flight)
        held = self.paging.held
        unpaged = [task for task in in_flight if (task.id, task.attempt) not in held]
        return self.reconciler.suspects(self.streams.queues, self.generations.cursor.generation, unpaged, sweep)

    def _sweep(self) -> list[str]:
        """Sometimes forget dead workers. Return the queues to sweep for their messages, in rotation."""
        if self.monotonic() < self._sweep_at:
            return []
        self._sweep_at = self.monotonic() + _SWEEP_INTERVAL
        all_queues = sorted(self.fleet.queues)
        begin = bisect_right(all_queues, self._last_swept)
        queues = all_queues[begin : begin + _MAX_SWEPT]
        self._last_swept = queues[-1] if len(queues) == _MAX_SWEPT else ""
        return self.streams.fleet.forget_gone(self.generations.cursor.generation, queues)
