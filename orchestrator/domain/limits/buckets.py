"""Rate limits: token buckets, each stored as one timestamp.

A rate of 10 per second has a bucket of ten tokens that refills evenly, one every tenth of a second. A bucket does not
store its number of tokens, but the time at which all admitted starts would be due at the even rate. If that time has
passed, the bucket is full, and a full bucket need not be stored at all.

No start happens exactly when it is due. A start that is late by less than `_LATE` counts as on time, so that a bucket
of one token reaches its rate, too.

A token is spent when a task is dispatched; the task starts when a worker gets to it. With slow workers, dispatched
tasks would pile up and then start all at once. So a bucket also counts the dispatched attempts whose start is not yet
reported (`unreported`), and admits no more while they are as many as may start at once. If one of them started late,
the bucket is set as if all of them had been dispatched only then.
"""

from __future__ import annotations

import math
import re
from collections import Counter

import msgspec

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_RATE = re.compile(r"(\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)?(s|sec|second|m|min|minute|h|hour|d|day)")
_ROUNDING = 1e-6
"""Tolerance for rounding errors, as a fraction of the interval."""
_LATE = 0.05
"""Seconds by which a start may be late and still count as on time, because the leader has other work, too."""
AHEAD = 0.1
"""Seconds' worth of a rate that may be dispatched with unreported starts, if that is more than the burst."""


class Rate(msgspec.Struct, frozen=True, array_like=True):
    """A number of starts per time: `Rate(100, per=60, burst=10)`."""

    count: float
    """Starts per `per` seconds."""
    per: float = 1.0
    """The period, in seconds."""
    burst: int | None = None
    """Starts that may happen at once after an idle time. Defaults to `count`."""


def interval(rate: Rate) -> float:
    """Return the seconds between two starts at the even rate."""
    return rate.per / rate.count


def bucket_size(rate: Rate) -> int:
    """Return the capacity of a rate's bucket, in tokens."""
    return max(1, int(rate.count) if rate.burst is None else rate.burst)


def lateness(rate: Rate) -> float:
    """Return the seconds by which a start may be late and count as on time. Larger buckets need less: they catch up."""
    return max(0.0, _LATE - (bucket_size(rate) - 1) * interval(rate))


def max_unreported(rate: Rate, ahead: float = AHEAD) -> int:
    """Return how many attempts may be dispatched with unreported starts: as many as may start at once."""
    return max(bucket_size(rate), math.ceil(ahead / interval(rate) - _ROUNDING))


def parse_rate(text: str) -> Rate | None:
    """Parse a rate such as `10/s`, `100/minute` or `5/10s`. Return None if the text is not a rate."""
    match = _RATE.fullmatch(text.replace(" ", ""))
    if match is None:
        return None
    count, per = float(match[1]), float(match[2] or 1) * _UNITS[match[3][0]]
    return Rate(count, per) if count > 0 and per > 0 else None


class Buckets:
    """All buckets that are not full, and the attempts with unreported starts of each."""

    def __init__(self) -> None:
        self.due: dict[str, float] = {}
        """By bucket, the Unix time at which all admitted starts would be due at the even rate."""
        self.changed: set[str] = set()
        """Buckets that have changed since they were saved."""
        self.unreported: Counter[str] = Counter()
        """By bucket, the number of dispatched attempts whose start is not reported."""

    def admits(self, name: str, rate: Rate, now: float, ahead: float = AHEAD) -> int:
        """Return how many tasks may be dispatched now."""
        tokens = bucket_size(rate) - math.ceil(self._ahead(name, rate, now) - _ROUNDING)
        return max(0, min(tokens, max_unreported(rate, ahead) - self.unreported[name]))

    def waits_for_report(self, name: str, rate: Rate, ahead: float = AHEAD) -> bool:
        """Return whether the bucket admits no task before a start is reported, whatever the time."""
        return self.unreported[name] >= max_unreported(rate, ahead)

    def began_late(self, name: str, rate: Rate, now: float) -> None:
        """Apply the report of a late start. All other unreported attempts may start now, too.

        The bucket is set as if all of them were dispatched now: they use the tokens that have accrued since.
        """
        due = now + min(self.unreported[name], bucket_size(rate)) * interval(rate)
        if due > self.due.get(name, 0.0):
            self.due[name] = due
            self.changed.add(name)

    def spend(self, name: str, rate: Rate, now: float, count: int = 1, *, unreported: bool = False) -> None:
        """Spend `count` tokens; a negative count returns tokens. `unreported`: the start will be reported."""
        self.due[name] = now + (self._ahead(name, rate, now) + count) * interval(rate)
        self.changed.add(name)
        if unreported:
            self.count_unreported(name, count)

    def count_unreported(self, name: str, count: int) -> None:
        """Change the number of attempts with unreported starts."""
        self.unreported[name] += count
        if self.unreported[name] <= 0:
            del self.unreported[name]

    def next_admission(self, name: str, rate: Rate, now: float) -> float:
        """Return the time at which another task may start."""
        return now + (self._ahead(name, rate, now) - (bucket_size(rate) - 1)) * interval(rate)

    def _ahead(self, name: str, rate: Rate, now: float) -> float:
        """Return by how many starts a bucket is ahead of the even rate; negative if it is slightly late.

        A bucket cannot be ahead by more than its size. If it seems to be, the clock was set back or the rate was
        changed.
        """
        due = self.due.get(name)
        if due is None or due < now - lateness(rate):
            return 0.0
        latest = now + bucket_size(rate) * interval(rate)
        if due > latest:
            due = self.due[name] = latest
        return (due - now) / interval(rate)

    def forget_full(self, now: float) -> None:
        """Remove saved buckets that are full again."""
        for name in [name for name, due in self.due.items() if due <= now - _LATE and name not in self.changed]:
            del self.due[name]
