"""Calls that wait, written once for threads and for event loops.

Such a call is a generator: it yields a `Pause` where there is nothing to do but wait, and what it does in between takes
a moment. `complete` takes the steps in the thread of the caller. `Threads.complete` takes each in a thread of the
client, and holds none during the pauses, so that ten thousand coroutines can wait at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

from orchestrator.domain.ids import to_text
from orchestrator.errors import Unavailable
from orchestrator.telemetry import get_logger
from orchestrator.time_limits import TimeLimit

R = TypeVar("R")


class Pause:
    """Seconds to wait, cut short by `ring`; it may ring before anyone waits, and be used again."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self._rung = threading.Event()
        self._wake: Callable[[], object] | None = None

    def ring(self) -> None:
        """End this pause, or the next one. Any thread may do so."""
        self._rung.set()
        wake = self._wake  # after the flag is set; a wait looks at them in the opposite order
        if wake is not None:
            wake()

    def wait(self) -> None:
        """Hold this thread until the time is up, or it rings."""
        self._rung.wait(self.seconds)
        self._rung.clear()

    async def wait_async(self) -> None:
        """Do the same on the event loop."""
        loop = asyncio.get_running_loop()
        rung = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and no call waits any more
                loop.call_soon_threadsafe(rung.set)

        self._wake = wake
        try:
            if not self._rung.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(rung.wait(), self.seconds)
        finally:
            self._wake = None
        self._rung.clear()


Steps = Generator[Pause, None, R]
"""A call that waits, and what it returns in the end."""
Stream = Generator[Pause | R, None, None]
"""A call that waits between the items that it yields."""


def check_timeout(timeout: object) -> None:
    """Refuse what is no number of seconds, before any request."""
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or math.isnan(timeout):
        raise TypeError(f"timeout: expected a number of seconds, or None to wait for ever, found {timeout!r:.100}.")


ASKED_AT: contextvars.ContextVar[float | None] = contextvars.ContextVar("orchestrator_asked_at", default=None)
"""When a call was made whose first step is taken now; None if that was not before."""


def time_limit(timeout: float | None, *, writes: bool = False) -> TimeLimit:
    """Return the time that a call has, as its first step: counted from when it was made, not from when it is begun.

    On an event loop, a call waits for a thread, which many may want at once. If it `writes`, that is limited too.
    """
    check_timeout(timeout)
    asked_at = ASKED_AT.get()
    if asked_at is not None:
        ASKED_AT.set(None)  # what is called from here has a time of its own
    return TimeLimit(timeout, since=asked_at, writes=writes)


def complete(steps: Steps[R]) -> R:
    """Take all steps in this thread, and return what they lead to."""
    try:
        while True:
            next(steps).wait()
    except StopIteration as end:
        result: R = end.value
        return result
    finally:
        steps.close()


def iterate(stream: Stream[R]) -> Iterator[R]:
    """Yield the items, waiting in this thread."""
    with contextlib.closing(stream):
        for item in stream:
            if isinstance(item, Pause):
                item.wait()
            else:
                yield item


log = get_logger("client")

_ASK_AGAIN = 5.0
"""Seconds in which one waiter asks for all."""
_SAY_AGAIN = 60.0
"""Seconds between two warnings to a caller that still waits."""


class ObstacleLog:
    """Logs what is in the way of one of those that are waited for; nothing is said twice in a minute."""

    def __init__(self, find: Callable[[bytes], list[str]]) -> None:
        """`find` says what keeps something from its end."""
        self._find = find
        self._ask_at = 0.0
        self._told: dict[str, float] = {}

    def look(self, identifier: bytes) -> None:
        """Ask for the obstacle, at most once in a while, and log it."""
        now = time.monotonic()
        if now < self._ask_at:
            return
        self._ask_at = now + _ASK_AGAIN
        with contextlib.suppress(Unavailable):
            for obstacle in self._find(identifier):
                if now - self._told.get(obstacle, -_SAY_AGAIN) >= _SAY_AGAIN:
                    log.warning("client.waiting id=%s: %s", to_text(identifier), obstacle)
                    self._told[obstacle] = now
