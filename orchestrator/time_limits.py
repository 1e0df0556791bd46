"""The deadline of a call, known to everything that the call asks.

A call with a timeout asks Postgres, Redis or an API more than once: whether something has ended, and in the end what
keeps it. Each of these has a limit of its own, for calls without a timeout, and where a server hangs, these add up. So
the call sets its deadline, in its thread, and each request there gives up by then.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from types import TracebackType

GRACE = 1.0
"""Seconds that a call may take beyond its timeout, for a last look and for saying what is in the way."""
LEAST = 2.0
"""Seconds that a call has in any case, also one with a timeout of zero: that is to look once, and to be answered."""
_TOO_SHORT = 0.05
"""Seconds in which nothing is asked any more."""


class TimeLimit:
    """The time of one call, from when it was made; without a timeout, there is no end to it.

    While the block of a `with` lasts, what its thread asks keeps to the limit. The block must not be left by a `yield`.
    """

    __slots__ = ("_before", "deadline", "give_up_at", "is_ended", "on_end", "writes")

    def __init__(self, timeout: float | None, *, since: float | None = None, writes: bool = False) -> None:
        """`since` is when the call was made, if that was not now; if it `writes`, that keeps to the limit too."""
        self.deadline: float | None = None
        self.give_up_at: float | None = None
        """When the call gives up, by the monotonic clock; None if it never does."""
        self.writes = writes
        self.is_ended = False
        """Whether nobody waits for the call any more."""
        self.on_end: Callable[[], object] | None = None
        """Called when `is_ended` becomes true, by the watchdog of the request."""
        self._before: TimeLimit | None = None
        if timeout is not None and timeout != math.inf:
            if since is None:
                since = time.monotonic()
            self.deadline = since + timeout
            self.give_up_at = since + (timeout + GRACE if timeout > LEAST - GRACE else LEAST)

    @property
    def left(self) -> float | None:
        """Seconds up to the timeout, which are negative when it has passed; None if there is none."""
        return None if self.deadline is None else self.deadline - time.monotonic()

    @property
    def is_up(self) -> bool:
        """Whether the timeout has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def for_at_most(self, seconds: float) -> TimeLimit:
        """Return a limit for a part of the call that waits so many seconds, or for what is left."""
        part = TimeLimit(seconds if self.deadline is None else min(seconds, self.deadline - time.monotonic()))
        part.give_up_at, part.writes = self.give_up_at, self.writes
        return part

    def end(self, *_: object) -> None:
        """Have the call give up now: nobody waits for it any more. What it writes is not broken off."""
        self.is_ended, self.give_up_at = True, time.monotonic()
        if self.on_end is not None:
            self.on_end()

    def __enter__(self) -> None:
        self._before = _thread.limit
        _thread.limit = self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _thread.limit = self._before


class _Thread(threading.local):
    """What one thread is about."""

    limit: TimeLimit | None = None


_thread = _Thread()


def current() -> TimeLimit | None:
    """Return the limit of this thread's call."""
    return _thread.limit


def give_up_at() -> float | None:
    """Return when this thread's call gives up, by the monotonic clock; None if it never does."""
    limit = _thread.limit
    return None if limit is None else limit.give_up_at


def left(most: float) -> float:
    """Return how many seconds something may take that takes so many at most where nobody is in a hurry."""
    until = give_up_at()
    return most if until is None else max(0.0, min(most, until - time.monotonic()))


def is_over() -> bool:
    """Say whether this thread's call has no time left to ask anything."""
    limit = _thread.limit
    until = None if limit is None else limit.give_up_at
    return until is not None and until - time.monotonic() < _TOO_SHORT


def spares_writes() -> bool:
    """Say whether this thread's call has a limit that does not apply to writes.

    A read is broken off without harm. A write during one comes from a signal handler, with a call of its own.
    """
    limit = _thread.limit
    return limit is not None and limit.give_up_at is not None and not limit.writes


def extended(seconds: float) -> TimeLimit:
    """Return the limit of this thread's call with so much more: what was done in that time was no waiting."""
    limit = _thread.limit or TimeLimit(None)
    longer = TimeLimit(None, writes=limit.writes)
    longer.give_up_at = None if limit.give_up_at is None else limit.give_up_at + seconds
    return longer


def endless() -> TimeLimit:
    """Return no limit, for what is not to keep to that of the call."""
    return TimeLimit(None)
