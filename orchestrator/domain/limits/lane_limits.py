"""How many more tasks of a lane may start: what is in flight is counted, and what rates allow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from orchestrator.domain.limits.buckets import Buckets
from orchestrator.domain.limits.names import gate_bucket, gate_of, lane_bucket
from orchestrator.domain.limits.unheard import is_heard_of
from orchestrator.domain.tasks.task import TaskOptions


class Granted(NamedTuple):
    """What a lane's own limits allow."""

    turns: int
    is_full: bool
    """Fewer than were wanted: more are allowed when one of its tasks has landed, or has been heard of."""
    until: float | None
    """Fewer than were wanted: when its rate allows one more."""


class LaneLimits:
    """What is in flight of each lane, and of all lanes of a gate; and the rates they keep."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._in_flight: dict[str, int] = {}
        """By lane, and by gate (which has no separator in its name)."""

    def recount(self, lanes: Iterable[str]) -> None:
        """Start from what is in flight, one name for each task."""
        self._in_flight.clear()
        for lane in lanes:
            self.count(lane, 1)

    def count(self, lane: str, number: int) -> None:
        """Note that so many more, or fewer, are in flight."""
        counts = self._in_flight
        for name in (lane, gate_of(lane)):
            count = counts.get(name, 0) + number
            if count > 0:
                counts[name] = count
            else:
                counts.pop(name, None)

    def is_full(self, lane: str, options: TaskOptions) -> bool:
        """Say whether a lane has as many in flight, or unheard of, as it may have."""
        if options.concurrency is not None and self._in_flight.get(lane, 0) >= options.concurrency:
            return True
        return options.rate is not None and self._buckets.is_unheard(lane_bucket(lane), options.rate)

    def is_open(self, gate: str, options: TaskOptions, now: float) -> bool:
        """Say whether one more may start of all lanes of a gate together."""
        if options.total_concurrency is not None and self._in_flight.get(gate, 0) >= options.total_concurrency:
            return False
        return options.total_rate is None or self._buckets.admits(gate_bucket(gate), options.total_rate, now) > 0

    def opens_at(self, gate: str, options: TaskOptions, now: float) -> float | None:
        """Return when the rate that lanes of a gate share allows one more; None if no time has to pass for that."""
        rate = options.total_rate
        if rate is None or self._buckets.admits(gate_bucket(gate), rate, now):
            return None
        if self._buckets.is_unheard(gate_bucket(gate), rate):
            return None
        return self._buckets.next_admission(gate_bucket(gate), rate, now)

    def take(self, lane: str, options: TaskOptions, wanted: int, now: float) -> Granted:
        """Count as many turns as a lane's own limits allow."""
        turns = wanted
        if options.concurrency is not None:
            turns = min(turns, max(0, options.concurrency - self._in_flight.get(lane, 0)))
        if options.rate is None:
            self.spend(lane, options, now, turns)
            return Granted(turns, turns < wanted, None)
        admitted = self._buckets.admits(lane_bucket(lane), options.rate, now)
        self.spend(lane, options, now, min(turns, admitted))
        if admitted < turns and self._buckets.is_unheard(lane_bucket(lane), options.rate):
            return Granted(admitted, True, None)
        if admitted < turns:
            return Granted(admitted, False, self._buckets.next_admission(lane_bucket(lane), options.rate, now))
        return Granted(turns, turns < wanted, None)

    def spend(self, lane: str, options: TaskOptions, now: float, number: int) -> None:
        """Note that so many of a lane start; fewer than none have not started after all."""
        if number == 0:
            return
        self.count(lane, number)
        unheard = is_heard_of(options)
        if options.rate is not None:
            self._buckets.spend(lane_bucket(lane), options.rate, now, number, unheard=unheard)
        if options.total_rate is not None:
            self._buckets.spend(gate_bucket(gate_of(lane)), options.total_rate, now, number, unheard=unheard)
