"""How often something may start: token buckets, each kept as one time stamp.

A rate of 10 a second has a bucket of ten tokens that refills evenly, one every tenth of a second. Instead of the number
of tokens, a bucket remembers when everything admitted so far would be due at the even rate. If that lies in the past,
the bucket is full; and a bucket that is full need not be remembered at all.

Nobody starts anything at the very moment at which it is due. What is late by less than `_LATE` keeps its place in the
even rate, as if it had been on time, so that a bucket of one token, too, gives what its rate says.

A token is spent when a task is handed out, and the task begins when a worker has come to it. Where that takes long,
what has been handed out would gather, and begin all at once. So a bucket also knows how many are *unheard* of
(`Unheard`), and admits no more while those are as many as may begin at once. When one of them turns out to have
begun late, the bucket holds what it would hold if all of them had been handed out only then.
"""

from __future__ import annotations

import math
import re
from collections import Counter

import msgspec

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_RATE = re.compile(r"(\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)?(s|sec|second|m|min|minute|h|hour|d|day)")
_ROUNDING = 1e-6
"""Share of an interval by which arithmetic may be off."""
_LATE = 0.05
"""Seconds by which a start may be late and still count as one on time: the leader has other things to do."""
AHEAD = 0.1
"""Seconds of a rate that may be dispatched before a start is reported, where that is more than the burst."""


class Rate(msgspec.Struct, frozen=True, array_like=True):
    """So many starts in so many seconds: `Rate(100, per=60, burst=10)`."""

    count: float
    """Starts in that time."""
    per: float = 1.0
    """Seconds."""
    burst: int | None = None
    """Starts that may happen at once after a quiet time; as many as `count` if nothing is said."""


def interval(rate: Rate) -> float:
    """Return the seconds between two starts at the even rate."""
    return rate.per / rate.count


def bucket_size(rate: Rate) -> int:
    """Return how many tokens the bucket of a rate holds."""
    return max(1, int(rate.count) if rate.burst is None else rate.burst)


def lateness(rate: Rate) -> float:
    """Return the seconds by which a full bucket may be late; one of several tokens makes up for it by itself."""
    return max(0.0, _LATE - (bucket_size(rate) - 1) * interval(rate))


def most_unheard(rate: Rate, ahead: float = AHEAD) -> int:
    """Return how many may be dispatched without a reported start: as many as may start at once."""
    return max(bucket_size(rate), math.ceil(ahead / interval(rate) - _ROUNDING))


def parse_rate(text: str) -> Rate | None:
    """Return a rate written as `10/s`, `100/minute` or `5/10s`; None if it is not one."""
    found = _RATE.fullmatch(text.replace(" ", ""))
    if found is None:
        return None
    count, per = float(found[1]), float(found[2] or 1) * _UNITS[found[3][0]]
    return Rate(count, per) if count > 0 and per > 0 else None


class Buckets:
    """Every bucket that is not full, and what is unheard of each."""

    def __init__(self) -> None:
        self.due: dict[str, float] = {}
        """By name, when everything admitted so far would be due at the even rate."""
        self.changed: set[str] = set()
        """Buckets that have been used since they were last saved."""
        self.unheard: Counter[str] = Counter()
        """By name, how many were dispatched without a reported start."""

    def admits(self, name: str, rate: Rate, now: float, ahead: float = AHEAD) -> int:
        """Return how many may be handed out now."""
        tokens = bucket_size(rate) - math.ceil(self._ahead(name, rate, now) - _ROUNDING)
        return max(0, min(tokens, most_unheard(rate, ahead) - self.unheard[name]))

    def is_unheard(self, name: str, rate: Rate, ahead: float = AHEAD) -> bool:
        """Say whether nothing may be handed out before something is heard of what has been, whatever the time."""
        return self.unheard[name] >= most_unheard(rate, ahead)

    def began_late(self, name: str, rate: Rate, now: float) -> None:
        """Note that one that is unheard of begins now, long after its token was spent: so may all the others.

        The tokens that have come in meanwhile are theirs, as far as the bucket had no room for more.
        """
        due = now + min(self.unheard[name], bucket_size(rate)) * interval(rate)
        if due > self.due.get(name, 0.0):
            self.due[name] = due
            self.changed.add(name)

    def spend(self, name: str, rate: Rate, now: float, count: int = 1, *, unheard: bool = False) -> None:
        """Note that so many are handed out; fewer than none gives tokens back. `unheard`: it will be heard of them."""
        self.due[name] = now + (self._ahead(name, rate, now) + count) * interval(rate)
        self.changed.add(name)
        if unheard:
            self.count_unheard(name, count)

    def count_unheard(self, name: str, count: int) -> None:
        """Note that so many more, or fewer, are unheard of."""
        self.unheard[name] += count
        if self.unheard[name] <= 0:
            del self.unheard[name]

    def next_admission(self, name: str, rate: Rate, now: float) -> float:
        """Return when one more may start."""
        return now + (self._ahead(name, rate, now) - (bucket_size(rate) - 1)) * interval(rate)

    def _ahead(self, name: str, rate: Rate, now: float) -> float:
        """Return by how many starts a bucket is ahead of the even rate; below zero if it is a little late.

        None is ahead by more than its size. One that seems to be was used before the clock was set back, or the rate
        was another then.
        """
        due = self.due.get(name)
        if due is None or due < now - lateness(rate):
            return 0.0
        latest = now + bucket_size(rate) * interval(rate)
        if due > latest:
            due = self.due[name] = latest
        return (due - now) / interval(rate)

    def forget_full(self, now: float) -> None:
        """Forget the buckets that have filled up again and are saved."""
        for name in [name for name, due in self.due.items() if due <= now - _LATE and name not in self.changed]:
            del self.due[name]
