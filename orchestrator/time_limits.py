"""The deadline of a call, which all requests of the call observe.

A call with a timeout makes several requests to Postgres, Redis or an API. Each request has a timeout of its own, and
with a hanging server these would add up. So the call sets its deadline for its thread, and each request gives up by
then.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from types import TracebackType

GRACE = 1.0
"""Seconds that a call may exceed its timeout, for a last check and for a diagnosis."""
LEAST = 2.0
"""The minimum seconds for a call, even with a timeout of zero, so that one check can be answered."""
_TOO_SHORT = 0.05
"""Remaining seconds in which no further request is made."""


class TimeLimit:
    """The time limit of a call, from its start. Without a timeout it never ends.

    In a `with` block, all requests of the thread observe the limit. The block must not contain a `yield`.
    """

    __slots__ = ("_outer", "deadline", "give_up_at", "is_ended", "on_end", "writes")

    def __init__(self, timeout: float | None, *, since: float | None = None, writes: bool = False) -> None:
        """`since` is the start of the call, if not now. With `writes`, the limit also applies to writes."""
        self.deadline: float | None = None
        self.give_up_at: float | None = None
        """The monotonic time at which the call gives up. None for never."""
        self.writes = writes
        self.is_ended = False
        """Whether nobody waits for the call any more."""
        self.on_end: Callable[[], object] | None = None
        """Called when `is_ended` becomes true, by the watchdog of the request."""
        self._outer: TimeLimit | None = None
        if timeout is not None and timeout != math.inf:
            if since is None:
                since = time.monotonic()
            self.deadline = since + timeout
            self.give_up_at = since + (timeout + GRACE if timeout > LEAST - GRACE else LEAST)

    @property
    def remaining(self) -> float | None:
        """Seconds until the timeout, negative after it. None without a timeout."""
        return None if self.deadline is None else self.deadline - time.monotonic()

    @property
    def is_up(self) -> bool:
        """Whether the timeout has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def for_at_most(self, seconds: float) -> TimeLimit:
        """Return a limit for a part of the call: `seconds`, or the remaining time if that is less."""
        part = TimeLimit(seconds if self.deadline is None else min(seconds, self.deadline - time.monotonic()))
        part.give_up_at, part.writes = self.give_up_at, self.writes
        return part

    def end(self, *_: object) -> None:
        """Let the call give up now, because nobody waits for it. Writes are not interrupted."""
        self.is_ended, self.give_up_at = True, time.monotonic()
        if self.on_end is not None:
            self.on_end()

    def __enter__(self) -> None:
        self._outer = _thread.limit
        _thread.limit = self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _thread.limit = self._outer


class _Thread(threading.local):
    limit: TimeLimit | None = None


_thread = _Thread()


def current() -> TimeLimit | None:
    """Return the limit of this thread's call."""
    return _thread.limit


def give_up_at() -> float | None:
    """Return the monotonic time at which this thread's call gives up, or None for never."""
    limit = _thread.limit
    return None if limit is None else limit.give_up_at


def remaining(most: float) -> float:
    """Return the seconds that a request may take: `most`, or less if this thread's call has less time left."""
    deadline = give_up_at()
    return most if deadline is None else max(0.0, min(most, deadline - time.monotonic()))


def is_over() -> bool:
    """Return whether this thread's call has no time left for another request."""
    limit = _thread.limit
    deadline = None if limit is None else limit.give_up_at
    return deadline is not None and deadline - time.monotonic() < _TOO_SHORT


def spares_writes() -> bool:
    """Return whether this thread's call has a limit that does not apply to writes.

    A read can be interrupted safely. A write during a read comes from a signal handler, with a limit of its own.
    """
    limit = _thread.limit
    return limit is not None and limit.give_up_at is not None and not limit.writes


def extended(seconds: float) -> TimeLimit:
    """Return the limit of this thread's call, extended by time that was not spent waiting."""
    limit = _thread.limit or TimeLimit(None)
    longer = TimeLimit(None, writes=limit.writes)
    longer.give_up_at = None if limit.give_up_at is None else limit.give_up_at + seconds
    return longer


def endless() -> TimeLimit:
    """Return no limit, for requests that must not observe the call's limit."""
    return TimeLimit(None)
