"""Concurrency and rate limits of lanes: how many more tasks of a lane may start."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import NamedTuple
from uuid import UUID

from orchestrator.domain.limits.buckets import Buckets, Rate
from orchestrator.domain.tasks.task import TaskOptions

MAX_KEY_LENGTH = 200
_SEPARATOR = "|"
"""A character that no task or workflow name contains."""


def lane_name(task: str, key: str | None, options: TaskOptions) -> str | None:
    """Return the lane of a task, or None if the task has neither key nor limit."""
    limited = options.concurrency or options.total_concurrency or options.rate or options.total_rate
    if not limited and key is None:
        return None
    return f"{task if limited else ''}{_SEPARATOR}{key or ''}"


def scoped(workflow: str, key: str) -> str:
    """Return a workflow's key as a key among those of all workflows. Different pairs give different keys."""
    if "/" in workflow:  # otherwise `a/b` and `c` would give the same key as `a` and `b/c`
        return f"{_SEPARATOR}{workflow}{_SEPARATOR}{key}"
    return f"{workflow}/{key}"


def key_text(value: object) -> str | None:
    """Return a key as storable text, or None if the value is not a valid key."""
    if isinstance(value, (str, int, UUID)) and not isinstance(value, bool):
        text = str(value)
        if 0 < len(text) <= MAX_KEY_LENGTH and text.isprintable():
            return text
    return None


def gate_of(lane: str) -> str:
    """Return the gate of a lane."""
    return lane.partition(_SEPARATOR)[0]


def lane_bucket(lane: str) -> str:
    """Return the bucket name for a lane's own rate."""
    return f"lane {lane}"


def gate_bucket(gate: str) -> str:
    """Return the bucket name for the rate that all lanes of a gate share."""
    return f"task {gate}"


def queue_bucket(queue: str) -> str:
    """Return the bucket name for a queue's rate."""
    return f"queue {queue}"


def limited_by(bucket: str) -> str:
    """Return the lane or gate of a bucket. For a queue's bucket, return the bucket's name."""
    kind, _, name = bucket.partition(" ")
    return bucket if kind == "queue" else name


class Granted(NamedTuple):
    """The turns that a lane's limits allow."""

    turns: int
    is_full: bool
    """Fewer turns than requested: the next one is allowed when a task of the lane ends or its start is reported."""
    until: float | None
    """Fewer turns than requested: the time at which the rate allows the next one."""


class LaneLimits:
    """The tasks in flight of each lane and gate, and their rates."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._in_flight: dict[str, int] = {}
        """Tasks in flight by lane and by gate. Names of gates contain no separator."""
        self.elsewhere: Mapping[str, int] = {}
        """Tasks in flight in other shards, by lane and by gate."""

    def recount(self, lanes: Iterable[str]) -> None:
        """Replace the counts. `lanes` holds one name for each task in flight."""
        self._in_flight.clear()
        for lane in lanes:
            self.count(lane, 1)

    def count(self, lane: str, number: int) -> None:
        """Change the number of tasks in flight."""
        counts = self._in_flight
        for name in (lane, gate_of(lane)):
            count = counts.get(name, 0) + number
            if count > 0:
                counts[name] = count
            else:
                counts.pop(name, None)

    def _count_of(self, name: str) -> int:
        count = self._in_flight.get(name, 0)
        return count + self.elsewhere.get(name, 0) if self.elsewhere else count

    def limited(self) -> dict[str, int]:
        """Return the tasks in flight by lane and gate, for those with limits."""
        return {name: number for name, number in self._in_flight.items() if gate_of(name)}

    def is_full(self, lane: str, options: TaskOptions) -> bool:
        """Return whether a lane has no room before a task ends or its start is reported."""
        if options.concurrency is not None and self._count_of(lane) >= options.concurrency:
            return True
        return options.rate is not None and self._buckets.waits_for_report(lane_bucket(lane), options.rate)

    def is_open(self, gate: str, options: TaskOptions, now: float) -> bool:
        """Return whether the limits shared by all lanes of a gate allow another task."""
        if options.total_concurrency is not None and self._count_of(gate) >= options.total_concurrency:
            return False
        return options.total_rate is None or self._buckets.admits(gate_bucket(gate), options.total_rate, now) > 0

    def opens_at(self, gate: str, options: TaskOptions, now: float) -> float | None:
        """Return the time at which a gate's shared rate allows another task, or None if it does not wait for a time."""
        rate = options.total_rate
        if rate is None or self._buckets.admits(gate_bucket(gate), rate, now):
            return None
        if self._buckets.waits_for_report(gate_bucket(gate), rate):
            return None
        return self._buckets.next_admission(gate_bucket(gate), rate, now)

    def take(self, lane: str, options: TaskOptions, requested: int, now: float) -> Granted:
        """Count as many turns as the lane's own limits allow."""
        turns = requested
        if options.concurrency is not None:
            turns = min(turns, max(0, options.concurrency - self._count_of(lane)))
        if options.rate is None:
            self.spend(lane, options, now, turns)
            return Granted(turns, turns < requested, None)
        admitted = self._buckets.admits(lane_bucket(lane), options.rate, now)
        self.spend(lane, options, now, min(turns, admitted))
        if admitted < turns and self._buckets.waits_for_report(lane_bucket(lane), options.rate):
            return Granted(admitted, True, None)
        if admitted < turns:
            return Granted(admitted, False, self._buckets.next_admission(lane_bucket(lane), options.rate, now))
        return Granted(turns, turns < requested, None)

    def spend(self, lane: str, options: TaskOptions, now: float, number: int) -> None:
        """Count started tasks of a lane. A negative number takes back tasks that did not start after all."""
        if number == 0:
            return
        self.count(lane, number)
        unreported = reports_start(options)
        if options.rate is not None:
            self._buckets.spend(lane_bucket(lane), options.rate, now, number, unreported=unreported)
        if options.total_rate is not None:
            self._buckets.spend(gate_bucket(gate_of(lane)), options.total_rate, now, number, unreported=unreported)


# -- unreported attempts: dispatched, but no worker has reported the start yet
#
# Workers report the start of a task with a rate at once. Until then the message may wait in a stream that no worker
# reads, or in a process that is suspended, and the task may start at any moment.


Attempt = tuple[bytes, int]

_LATE = 0.25
"""Seconds between dispatch and reported start, at most, for a start to count from its dispatch. A later start counts
from its report. The tolerance lets busy workers reach the rate."""


class DispatchedAttempt(NamedTuple):
    at: float
    lane: str | None
    buckets: tuple[tuple[str, Rate], ...]
    """The buckets from which a token was spent, and their rates."""


def reports_start(options: TaskOptions) -> bool:
    """Return whether tasks with these options have a rate and a worker reports their start at once.

    Executions are excluded: they need no slot, and their start is reported only when the external service accepts them.
    """
    return (options.rate is not None or options.total_rate is not None) and options.executor is None


def lane_buckets(lane: str, options: TaskOptions) -> tuple[tuple[str, Rate], ...]:
    """Return the buckets of a lane and its gate, for those that have rates."""
    own = () if options.rate is None else ((lane_bucket(lane), options.rate),)
    shared = () if options.total_rate is None else ((gate_bucket(gate_of(lane)), options.total_rate),)
    return (*own, *shared)


class UnreportedStarts:
    """All unreported attempts. `Buckets.unreported` counts them by bucket when their tokens are spent."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._dispatched: dict[Attempt, DispatchedAttempt] = {}
        self._unknown: set[Attempt] = set()
        """Unreported attempts in lanes whose rates a new leader does not know yet."""

    def __bool__(self) -> bool:
        return bool(self._dispatched)

    def add(self, attempt: Attempt, dispatched: DispatchedAttempt) -> None:
        """Add a counted attempt. If the attempt is present already, add its buckets."""
        previous = self._dispatched.get(attempt)
        if previous is not None:
            dispatched = DispatchedAttempt(previous.at, previous.lane, (*previous.buckets, *dispatched.buckets))
        self._dispatched[attempt] = dispatched

    def recount(self, attempts: Iterable[tuple[Attempt, DispatchedAttempt]], unknown: Container[str] = ()) -> None:
        """Replace all attempts by those dispatched but not started. `unknown` are lanes whose rates are not loaded."""
        previous, self._dispatched = self._dispatched, {}
        self._unknown.clear()
        self._buckets.unreported.clear()
        for attempt, dispatched in attempts:
            if attempt in previous:
                dispatched = dispatched._replace(at=previous[attempt].at)
            self._dispatched[attempt] = dispatched
            self._buckets.unreported.update(name for name, _ in dispatched.buckets)
            if dispatched.lane in unknown:
                self._unknown.add(attempt)

    def complete(self, options_of: Callable[[str], TaskOptions | None]) -> None:
        """Count the attempts of lanes whose rates have been loaded meanwhile."""
        for attempt in list(self._unknown):
            known = self._dispatched.get(attempt)
            options = None if known is None or known.lane is None else options_of(known.lane)
            if known is None or options is not None:
                self._unknown.discard(attempt)
            if known is not None and known.lane is not None and options is not None and reports_start(options):
                more = lane_buckets(known.lane, options)
                self._dispatched[attempt] = known._replace(buckets=(*known.buckets, *more))
                self._buckets.unreported.update(name for name, _ in more)

    def remove(self, attempt: Attempt, now: float | None = None) -> str | None:
        """Remove an attempt that has started or will not start. Return its lane, if any."""
        dispatched = self._dispatched.pop(attempt, None)
        if dispatched is None:
            return None
        for name, rate in dispatched.buckets:
            if now is not None and now - dispatched.at > _LATE:
                self._buckets.began_late(name, rate, now)
            self._buckets.count_unreported(name, -1)
        return dispatched.lane
