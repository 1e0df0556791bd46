"""How often something may start: token buckets, each kept as one time stamp.

A rate of 10 a second has a bucket of ten tokens that refills evenly, one every tenth of a second. Instead of the number
of tokens, a bucket remembers when everything admitted so far would be due at the even rate. If that lies in the past,
the bucket is full; and a bucket that is full need not be remembered at all.

Nobody starts anything at the very moment at which it is due. What is late by less than `_LATE` keeps its place in the
even rate, as if it had been on time, so that a bucket of one token, too, gives what its rate says.
"""

from __future__ import annotations

import math
import re

import msgspec

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_RATE = re.compile(r"(\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)?(s|sec|second|m|min|minute|h|hour|d|day)")
_ROUNDING = 1e-6
"""Share of an interval by which arithmetic may be off."""
_LATE = 0.05
"""Seconds by which a start may be late and still count as one on time: the leader has other things to do."""


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


def parse_rate(text: str) -> Rate | None:
    """Return a rate written as `10/s`, `100/minute` or `5/10s`; None if it is not one."""
    found = _RATE.fullmatch(text.replace(" ", ""))
    if found is None:
        return None
    count, per = float(found[1]), float(found[2] or 1) * _UNITS[found[3][0]]
    return Rate(count, per) if count > 0 and per > 0 else None


class Buckets:
    """Every bucket that is not full."""

    def __init__(self) -> None:
        self.due: dict[str, float] = {}
        """By name, when everything admitted so far would be due at the even rate."""
        self.changed: set[str] = set()
        """Buckets that have been used since they were last saved."""

    def admits(self, name: str, rate: Rate, now: float) -> int:
        """Return how many may start now."""
        return max(0, bucket_size(rate) - math.ceil(self._ahead(name, rate, now) - _ROUNDING))

    def spend(self, name: str, rate: Rate, now: float, count: int = 1) -> None:
        """Note that so many start; fewer than none gives tokens back."""
        self.due[name] = now + (self._ahead(name, rate, now) + count) * interval(rate)
        self.changed.add(name)

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
