"""The leader's look at Redis and the fleet, about once a second."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.scheduler.code.paging import Paging
from orchestrator.scheduler.dispatch.dispatcher import Dispatcher
from orchestrator.scheduler.fleet.generations import Generations
from orchestrator.scheduler.fleet.reconcile import Reconciler, Suspicion
from orchestrator.scheduler.fleet.view import Fleet
from orchestrator.scheduler.fleet.watch import FleetWatch
from orchestrator.scheduler.leadership import Leadership
from orchestrator.scheduler.link import FAILURES, Link
from orchestrator.store.tasks import waiting
from orchestrator.transport.leader.streams import LeaderStreams

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
        away = [task for task in in_flight if not self.paging.holds(task.id, task.attempt)]
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
