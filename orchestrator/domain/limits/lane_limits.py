"""How many more tasks of a lane may start: what is in flight is counted, and what rates allow."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import NamedTuple
from uuid import UUID

from orchestrator.domain.limits.buckets import Buckets, Rate
from orchestrator.domain.tasks.task import TaskOptions

LONGEST_KEY = 200
_SEPARATOR = "|"
"""No name of a task or workflow has it."""


def lane_name(task: str, key: str | None, options: TaskOptions) -> str | None:
    """Return the lane of a task: None if it has neither key nor limit."""
    limited = options.concurrency or options.total_concurrency or options.rate or options.total_rate
    if not limited and key is None:
        return None
    return f"{task if limited else ''}{_SEPARATOR}{key or ''}"


def scoped(workflow: str, key: str) -> str:
    """Return a key of one workflow as it stands among those of all; no two that differ give the same."""
    if "/" in workflow:  # of which `a/b` and `c` would read like `a` and `b/c`
        return f"{_SEPARATOR}{workflow}{_SEPARATOR}{key}"
    return f"{workflow}/{key}"


def key_text(value: object) -> str | None:
    """Return a key as text that can be stored, compared and shown; None for what is no key."""
    if isinstance(value, (str, int, UUID)) and not isinstance(value, bool):
        text = str(value)
        if 0 < len(text) <= LONGEST_KEY and text.isprintable():
            return text
    return None


def gate_of(lane: str) -> str:
    """Return the gate before which a lane stands."""
    return lane.partition(_SEPARATOR)[0]


def lane_bucket(lane: str) -> str:
    """Return the name of the bucket of a lane's rate."""
    return f"lane {lane}"


def gate_bucket(gate: str) -> str:
    """Return the name of the bucket of the rate that lanes of one gate share."""
    return f"task {gate}"


def queue_bucket(queue: str) -> str:
    """Return the name of a queue's bucket."""
    return f"queue {queue}"


def limited_by(bucket: str) -> str:
    """Return the lane, the gate or the bucket of a queue that a bucket is of."""
    kind, _, name = bucket.partition(" ")
    return bucket if kind == "queue" else name


class Granted(NamedTuple):
    """The limits of a lane."""

    turns: int
    is_full: bool
    """Fewer than were wanted: more are allowed when one of its tasks has landed, or has been heard of."""
    until: float | None
    """Fewer than were wanted: when its rate allows one more."""


class LaneLimits:
    """Tasks in flight of each lane, and of all lanes of a gate; and the rates they keep."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._in_flight: dict[str, int] = {}
        """By lane, and by gate (which has no separator in its name)."""
        self.elsewhere: Mapping[str, int] = {}
        """Of the same, in other shards."""

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

    def _held(self, name: str) -> int:
        held = self._in_flight.get(name, 0)
        return held + self.elsewhere.get(name, 0) if self.elsewhere else held

    def limited(self) -> dict[str, int]:
        """Return what is in flight of lanes and gates with limits."""
        return {name: number for name, number in self._in_flight.items() if gate_of(name)}

    def is_full(self, lane: str, options: TaskOptions) -> bool:
        """Say whether a lane has as many in flight, or unheard of, as it may have."""
        if options.concurrency is not None and self._held(lane) >= options.concurrency:
            return True
        return options.rate is not None and self._buckets.is_unheard(lane_bucket(lane), options.rate)

    def is_open(self, gate: str, options: TaskOptions, now: float) -> bool:
        """Say whether one more may start of all lanes of a gate together."""
        if options.total_concurrency is not None and self._held(gate) >= options.total_concurrency:
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
            turns = min(turns, max(0, options.concurrency - self._held(lane)))
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


# -- unheard attempts
#
# A worker says at once that it has begun a task with a rate. Until then the task is *unheard* of: it may stand in a
# stream that no worker reads, or wait in a process that stands still, and may begin at any moment.


Attempt = tuple[bytes, int]

_LATE = 0.25
"""Seconds between hand-out and news of a start after which it counts from the news on: workers, too, have other things
to do, and a rate should be reached where they are busy."""


class Handed(NamedTuple):
    at: float
    lane: str | None
    buckets: tuple[tuple[str, Rate], ...]
    """From which a token was spent, and the rates."""


def is_heard_of(options: TaskOptions) -> bool:
    """Say whether tasks with these options keep a rate, and a worker reports at once that it has begun one of them.

    An execution needs no slot, and is reported as begun only when the other side has accepted it.
    """
    return (options.rate is not None or options.total_rate is not None) and options.executor is None


def lane_buckets(lane: str, options: TaskOptions) -> tuple[tuple[str, Rate], ...]:
    """Return the buckets of a lane and of its gate, as far as there are rates."""
    own = () if options.rate is None else ((lane_bucket(lane), options.rate),)
    shared = () if options.total_rate is None else ((gate_bucket(gate_of(lane)), options.total_rate),)
    return (*own, *shared)


class Unheard:
    """All such attempts. How many there are of each bucket is counted there, when their tokens are spent."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._handed: dict[Attempt, Handed] = {}
        self._unknown: set[Attempt] = set()
        """Of these, the ones of lanes whose rates are not known yet: a leader has just begun."""

    def __bool__(self) -> bool:
        return bool(self._handed)

    def add(self, attempt: Attempt, handed: Handed) -> None:
        """Take note of an attempt that has been counted; one that is known already has used another bucket too."""
        before = self._handed.get(attempt)
        if before is not None:
            handed = Handed(before.at, before.lane, (*before.buckets, *handed.buckets))
        self._handed[attempt] = handed

    def recount(self, found: Iterable[tuple[Attempt, Handed]], unknown: Container[str] = ()) -> None:
        """Start from what is dispatched and has not begun; the rates of some lanes may be `unknown`."""
        known, self._handed = self._handed, {}
        self._unknown.clear()
        self._buckets.unheard.clear()
        for attempt, handed in found:
            if attempt in known:
                handed = handed._replace(at=known[attempt].at)
            self._handed[attempt] = handed
            self._buckets.unheard.update(name for name, _ in handed.buckets)
            if handed.lane in unknown:
                self._unknown.add(attempt)

    def complete(self, options_of: Callable[[str], TaskOptions | None]) -> None:
        """Count what is unheard of lanes whose rates have become known."""
        for attempt in list(self._unknown):
            handed = self._handed.get(attempt)
            options = None if handed is None or handed.lane is None else options_of(handed.lane)
            if handed is None or options is not None:
                self._unknown.discard(attempt)
            if handed is not None and handed.lane is not None and options is not None and is_heard_of(options):
                more = lane_buckets(handed.lane, options)
                self._handed[attempt] = handed._replace(buckets=(*handed.buckets, *more))
                self._buckets.unheard.update(name for name, _ in more)

    def hear(self, attempt: Attempt, now: float | None = None) -> str | None:
        """Take note that an attempt has begun, or will not; return its lane, if it was unheard of and has one."""
        handed = self._handed.pop(attempt, None)
        if handed is None:
            return None
        for name, rate in handed.buckets:
            if now is not None and now - handed.at > _LATE:
                self._buckets.began_late(name, rate, now)
            self._buckets.count_unheard(name, -1)
        return handed.lane
