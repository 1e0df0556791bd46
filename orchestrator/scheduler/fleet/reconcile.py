"""Find what was lost on the way: messages that are gone, and attempts whose worker has died.

Every in-flight task is somewhere: held by a live worker, or in a stream that nobody has read yet, or on its way
back in the events. What is nowhere was lost. The order of looking matters: first the heartbeats and the streams
(`suspects`), then all events up to the end, and only then the judgement, which the guards of the transitions
make harmless for everything that moved in between.

    held by a live worker                   leave it alone, however long it runs
    message not received by anyone          leave it alone: a backlog is not a loss; unless its task has expired
    message to one worker that does not
      receive it, for two seconds           it is busy or gone: take the message back, free; a task only if it can
                                            be made sure that the worker does not receive it after all, and if
                                            others that know it have free slots, or the worker is gone
    message received by a live worker that
      does not list it, for a whole TTL     the answer to its read was lost: take the message back, free
    message received by a dead worker       a loss: dispatched again, alone
    no message, running on a dead worker    a loss: dispatched again, alone
    no message, nobody has it, for a
      whole TTL                             the message was lost: dispatched again, free

A heartbeat may be older than the message that its worker has just received. After a whole TTL none that is still to be
seen can be; two looks, which can follow each other within moments, would prove nothing.

A worker that died, and whose parent said so, leaves messages behind of which nothing is in flight any more. Nobody
suspects anything then, so now and then all queues are swept.
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
from orchestrator.scheduler.tasks.reports import Reported
from orchestrator.store.tasks import waiting
from orchestrator.store.tasks.waiting import InFlight
from orchestrator.transport.codec import Malformed, decode_dispatches
from orchestrator.transport.keys import is_private, private_queue, worker_of
from orchestrator.transport.leader.queues import Message, Queues
from orchestrator.transport.leader.streams import LeaderStreams

_MINIMUM_AGE = 1.0
"""Seconds since the dispatch before anyone asks: a fast queue is never read through."""
_UNRECEIVED_AFTER = 2.0
"""Seconds that the worker with a workflow in memory has to receive a message, before any worker may have it."""


@dataclass
class Suspicion:
    """Suspects, before the events were read to their end."""

    looked: bool = True
    """The tasks in flight were read. If not, what was missing before may still be."""
    tasks: list[InFlight] = field(default_factory=list)
    where: dict[tuple[bytes, int], tuple[str, Message]] = field(default_factory=dict)
    """For attempts that still have a message: queue and message."""
    names: dict[tuple[bytes, int], str] = field(default_factory=dict)
    """For the same: what they call."""
    taken_back: set[tuple[str, str]] = field(default_factory=set)
    """Queues and messages that were sent to one worker, and that will not be received any more."""
    stale: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """By queue, messages of attempts that are no longer in flight."""


class Reconciler:
    """Judges what is lost; remembers only since when it has missed something."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._missing_since: dict[tuple[bytes, int], float] = {}

    @property
    def is_waiting(self) -> bool:
        """Say whether something is missing that is lost if no worker lists it within a TTL."""
        return bool(self._missing_since)

    def suspects(
        self, queues: Queues, generation: str, in_flight: Sequence[InFlight], sweep: Iterable[str] = ()
    ) -> Suspicion:
        """Return the in-flight tasks that no live worker lists, and where their messages stand.

        Messages that belong to nothing in flight are looked for in the queues of such tasks, and in those to `sweep`.
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
                    continue  # the worker that reads it sets it aside
                for attempt in names:
                    suspicion.where[attempt] = (queue, message)
                suspicion.names.update(names)
                if not current.intersection(names):
                    suspicion.stale[queue].append(message.entry)
        self._take_back(queues, generation, suspicion)
        return suspicion

    def _private(self, tasks: Sequence[InFlight]) -> set[str]:
        """Return the streams of single workers in which messages of these tasks may stand.

        Where a task is about to be given up for lost, they are those of all workers: another leader may have placed it.
        """
        placed = {worker for task in tasks if (worker := self._fleet.capabilities.holder(task.id)) is not None}
        homes = {task.worker for task in tasks if task.is_turn_task and task.worker}
        early = self._fleet.fair_time - self._fleet.ttl / 2
        if any(self._missing_since.get((task.id, task.attempt), math.inf) <= early for task in tasks):
            homes |= set(self._fleet.beats)
        return {private_queue(worker) for worker in placed | homes}

    def _take_back(self, queues: Queues, generation: str, suspicion: Suspicion) -> None:
        """Take messages of tasks back from workers that do not receive them, if it is not too late for that."""
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
        """Return what is to be reported of lost attempts, and the messages to withdraw, by queue."""
        if not suspicion.looked:
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
                    reports.append(("reconcile", "nobody", Returned(task.id, task.attempt, "not received")))
                elif is_private(queue) and task.is_turn_task and task.age > _UNRECEIVED_AFTER:
                    reports.append(("reconcile", "nobody", Returned(task.id, task.attempt, "not received")))
                    withdraw[queue].append(message.entry)
                continue
            owner = message.consumer if message is not None else task.worker
            if owner is not None and fleet.is_dead(owner):
                lost = Lost(task.id, task.attempt, alone=False, unheard=fleet.silence(owner))
                reports.append(("reconcile", owner, lost))
            elif owner is not None and owner not in fleet.beats:
                continue
            else:
                missing[attempt] = self._missing_since.get(attempt, fleet.fair_time)
                if fleet.in_grace or fleet.fair_time - missing[attempt] < fleet.ttl:
                    continue
                gone = Returned(task.id, task.attempt, "message lost", begun=message is None)  # Redis may have lost it
                reports.append(("reconcile", owner or "nobody", gone))
            if message is not None:
                withdraw[queue].append(message.entry)
        self._missing_since = missing
        for queue, entries in suspicion.stale.items():
            withdraw[queue].extend(entries)
        return reports, {queue: sorted(set(entries)) for queue, entries in withdraw.items()}


# -- the leader's look at Redis and the fleet, about once a second

_SWEEP_EVERY = 10.0
"""Seconds between two looks for messages that belong to nothing."""
_MOST_SWEPT = 1_000
"""Queues of one such look; the next one goes on with those behind them."""
_COUNT_PAUSE = 20.0
"""Between two looks at what is in flight, so many times as long as one takes: where a transaction of others keeps dead
rows in the index, it takes long, and must not take all the time."""
_LONGEST_PAUSE = 30.0
"""Seconds after which there is another look all the same: the last one may have taken long because the machine was
busy. When Redis has lost its data, or something is missing, there is one earlier."""


def pause_after(took: float) -> float:
    """Return in how many seconds what is in flight is counted again, after that took so long."""
    return min(_COUNT_PAUSE * took, _LONGEST_PAUSE)


@dataclass
class FleetCheck:
    """Finds what Redis has lost, which workers live, and which tasks seem to be nowhere."""

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
    _swept_to: str = ""
    _count_at: float = 0.0
    _counted_at: float = 0.0

    def run(self) -> Suspicion:
        """Look at Redis and the fleet, and note which in-flight tasks seem to be nowhere."""
        suspicion = Suspicion(looked=False)
        try:
            if self.generations.keep(self.monotonic()):
                self.fleet.grace()
                self._count_at = 0.0
                if self.generations.is_rewound:
                    self.watch.doubt_all()
            self.watch.read_heartbeats()
            self.link.changes.look(self.streams.fleet.is_watched, self.fleet.beats.values())
            if self._is_count_due():
                suspicion = self._suspects()
            self.link.worked()
        except FAILURES as error:
            self.link.failed(error, is_look=True)
        return suspicion

    def _is_count_due(self) -> bool:
        """Say whether to look at what is in flight; what was missing at the last look can be judged after a TTL."""
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
        self.watch.ask_back(in_flight)
        held = self.paging.held
        away = [task for task in in_flight if (task.id, task.attempt) not in held]
        return self.reconciler.suspects(self.streams.queues, self.generations.cursor.generation, away, sweep)

    def _sweep(self) -> list[str]:
        """Now and then, forget workers that are gone; return queues in which they may have left messages, by turns."""
        if self.monotonic() < self._sweep_at:
            return []
        self._sweep_at = self.monotonic() + _SWEEP_EVERY
        every = sorted(self.fleet.queues)
        begin = bisect_right(every, self._swept_to)
        queues = every[begin : begin + _MOST_SWEPT]
        self._swept_to = queues[-1] if len(queues) == _MOST_SWEPT else ""
        return self.streams.fleet.forget_gone(self.generations.cursor.generation, queues)
