"""Calls that wait, written once for threads and for event loops.

Such a call is a generator. It yields a `Pause` to wait, and its work between pauses is short. `complete` runs the
generator in the caller's thread. `Threads.complete` runs each step in a thread of the client, and holds no thread
during pauses, so that ten thousand coroutines can wait at once.
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
    """A wait of some seconds that `ring` cuts short, even before the wait begins. A pause can be used again."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self._rung = threading.Event()
        self._wake: Callable[[], object] | None = None

    def ring(self) -> None:
        """End the current wait, or the next one. Thread-safe."""
        self._rung.set()
        wake = self._wake  # read after the flag is set; `wait_async` uses the opposite order
        if wake is not None:
            wake()

    def wait(self) -> None:
        """Block this thread until the time is up or the pause rings."""
        self._rung.wait(self.seconds)
        self._rung.clear()

    async def wait_async(self) -> None:
        """Wait on the event loop until the time is up or the pause rings."""
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
"""A call that yields pauses and returns a result."""
Stream = Generator[Pause | R, None, None]
"""A call that yields items and pauses."""


def check_timeout(timeout: object) -> None:
    """Refuse a timeout that is not a number of seconds, before any request."""
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or math.isnan(timeout):
        raise TypeError(f"timeout: expected a number of seconds, or None to wait forever, found {timeout!r:.100}.")


CALLED_AT: contextvars.ContextVar[float | None] = contextvars.ContextVar("orchestrator_asked_at", default=None)
"""The time of a call whose first step begins now; None if the call was made just now."""


def time_limit(timeout: float | None, *, writes: bool = False) -> TimeLimit:
    """Return the time limit of a call, in its first step. The limit counts from the call, not from its first step.

    On an event loop, a call may wait for a free thread first. With `writes`, the limit applies to writes, too.
    """
    check_timeout(timeout)
    called_at = CALLED_AT.get()
    if called_at is not None:
        CALLED_AT.set(None)  # nested calls have time limits of their own
    return TimeLimit(timeout, since=called_at, writes=writes)


def complete(steps: Steps[R]) -> R:
    """Run a call in this thread and return its result."""
    try:
        while True:
            next(steps).wait()
    except StopIteration as end:
        result: R = end.value
        return result
    finally:
        steps.close()


def iterate(stream: Stream[R]) -> Iterator[R]:
    """Yield the items of a call, waiting in this thread."""
    with contextlib.closing(stream):
        for item in stream:
            if isinstance(item, Pause):
                item.wait()
            else:
                yield item


log = get_logger("client")

_QUERY_INTERVAL = 5.0
"""Seconds between two queries for obstacles, over all waiters."""
_LOG_INTERVAL = 60.0
"""Seconds between two warnings about the same obstacle."""


class ObstacleLog:
    """Logs obstacles that keep an awaited task or run from ending. An obstacle is logged once a minute at most."""

    def __init__(self, find: Callable[[bytes], list[str]]) -> None:
        """Create a log; `find` returns the obstacles of a task or run."""
        self._find = find
        self._next_query = 0.0
        self._logged_at: dict[str, float] = {}

    def check(self, identifier: bytes) -> None:
        """Query and log the obstacles of a task or run, unless there was a query a moment ago."""
        now = time.monotonic()
        if now < self._next_query:
            return
        self._next_query = now + _QUERY_INTERVAL
        with contextlib.suppress(Unavailable):
            for obstacle in self._find(identifier):
                if now - self._logged_at.get(obstacle, -_LOG_INTERVAL) >= _LOG_INTERVAL:
                    log.warning("client.waiting id=%s: %s", to_text(identifier), obstacle)
                    self._logged_at[obstacle] = now
