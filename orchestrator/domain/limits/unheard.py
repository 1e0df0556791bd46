"""Attempts that were handed out under a rate, and of which nobody has heard yet that they have begun, or ended.

A worker says at once that it has begun a task with a rate. Until then the task is *unheard* of: it may stand in a
stream that nobody reads, or wait in a process that stands still, and may begin at any moment.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import NamedTuple

from orchestrator.domain.limits.buckets import Buckets, Rate
from orchestrator.domain.limits.names import gate_bucket, gate_of, lane_bucket
from orchestrator.domain.tasks.task import TaskOptions

Attempt = tuple[bytes, int]

_LATE = 0.25
"""Seconds between hand-out and news of a start after which it counts from the news on: workers, too, have other things
to do, and a rate should be reached where they are busy."""


class Handed(NamedTuple):
    """An attempt that was handed out."""

    at: float
    lane: str | None
    buckets: tuple[tuple[str, Rate], ...]
    """From which a token was spent, and the rates."""


def is_heard_of(options: TaskOptions) -> bool:
    """Say whether tasks with these options keep a rate, and a worker says at once that it has begun one of them.

    What is done outside of workers needs no slot, and is said to have begun only when whoever does it has taken it on.
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
