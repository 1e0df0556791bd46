"""How often something may start: token buckets, each kept as one time stamp.

A rate of 10 a second has a bucket of ten tokens that refills evenly, one every tenth of a second. Instead of the number
of tokens, a bucket remembers when everything admitted so far would be due at the even rate. If that lies in the past,
the bucket is full; and a bucket that is full need not be remembered at all.
"""

from __future__ import annotations

import math
import re

import msgspec

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_RATE = re.compile(r"(\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)?(s|sec|second|m|min|minute|h|hour|d|day)")
_ROUNDING = 1e-6
"""Share of an interval by which arithmetic may be off."""


class Rate(msgspec.Struct, frozen=True, array_like=True):
    """So many starts in so many seconds: `Rate(100, per=60, burst=10)`."""

    count: float
    per: float = 1.0
    """Seconds."""
    burst: int | None = None
    """Starts that may happen at once after a quiet time; as many as `count` if nothing is said."""

    @property
    def interval(self) -> float:
        """Seconds between two starts at the even rate."""
        return self.per / self.count

    @property
    def size(self) -> int:
        """How many tokens the bucket holds."""
        return max(1, int(self.count) if self.burst is None else self.burst)


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
        ahead = (self.due.get(name, now) - now) / rate.interval
        return max(0, rate.size - max(0, math.ceil(ahead - _ROUNDING)))

    def spend(self, name: str, rate: Rate, now: float, count: int = 1) -> None:
        """Note that so many start; fewer than none gives tokens back."""
        self.due[name] = max(self.due.get(name, now), now) + count * rate.interval
        self.changed.add(name)

    def next_admission(self, name: str, rate: Rate) -> float:
        """Return when one more may start."""
        return self.due.get(name, -math.inf) - (rate.size - 1) * rate.interval

    def forget_full(self, now: float) -> None:
        """Forget the buckets that have filled up again and are saved."""
        for name in [name for name, due in self.due.items() if due <= now and name not in self.changed]:
            del self.due[name]
