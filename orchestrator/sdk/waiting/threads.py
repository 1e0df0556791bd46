"""Threads for the async variants of calls that block.

They are our own: where Postgres hangs, the calls that wait for it hold up each other, and never what else the program
hands to the threads of its event loop.
"""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import AsyncIterator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

from orchestrator.sdk.inside import inside_workflow
from orchestrator.sdk.waiting.per_loop import PerLoop
from orchestrator.sdk.waiting.per_process import PerProcess
from orchestrator.sdk.waiting.steps import ASKED_AT, Pause, Steps, Stream
from orchestrator.sdk.waiting.thread_pool import ThreadPool

P = ParamSpec("P")
R = TypeVar("R")
_MOST = 16
"""Calls that block at the same time; others wait for a thread."""
_AT_ONCE = 100
"""Items of a stream that are fetched in one go."""


class Threads:
    """A few threads, started as they are needed."""

    def __init__(self) -> None:
        self._pool = PerProcess(lambda: ThreadPoolExecutor(_MOST, "orchestrator-client"))
        self._thread_pool = PerLoop(lambda loop: ThreadPool(loop, self._pool, _MOST))

    async def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a blocking call beside the event loop, in the caller's context."""
        if inside_workflow():
            return function(*args, **kwargs)  # in a workflow nothing blocks: it is a command, or is refused
        call = partial(contextvars.copy_context().run, function, *args, **kwargs)
        result: R = await self._thread_pool().add(call)
        return result

    async def complete(self, steps: Steps[R]) -> R:
        """Take all steps of a call that waits, and return what they lead to; a pause holds no thread."""
        asked_at: float | None = time.monotonic()
        while True:
            leg: _Leg[Any] = await self._advance(steps, asked_at)
            asked_at = None
            if leg.pause is None:
                result: R = leg.result
                return result
            try:
                await leg.pause.wait_async()
            except BaseException:
                self._drop(steps)
                raise

    async def iterate(self, stream: Stream[R]) -> AsyncIterator[R]:
        """Yield the items of a call that waits in between."""
        asked_at: float | None = time.monotonic()
        while True:
            leg: _Leg[R] = await self._advance(stream, asked_at)
            asked_at = None
            try:
                for item in leg.items:
                    yield item
                if leg.pause is None:
                    return
                await leg.pause.wait_async()
            except BaseException:
                self._drop(stream)
                raise

    async def _advance(self, steps: Generator[Any, None, Any], asked_at: float | None) -> _Leg[Any]:
        """Go on to the next pause; the first step is told when the call was made."""
        if inside_workflow():
            return _walk(steps)
        walk = partial(contextvars.copy_context().run, _walk, steps, asked_at)
        leg: _Leg[Any] = await self._thread_pool().add(walk, partial(self._drop, steps))
        return leg

    def _drop(self, steps: Generator[Any, None, Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the interpreter is about to end
            self._pool().submit(steps.close)

    def close(self) -> None:
        """Let the threads end with what they do now."""
        pool = self._pool.take()
        if pool is not None:
            pool.shutdown(wait=False)


@dataclass
class _Leg(Generic[R]):
    """A part of the way: the items that were yielded, and the pause that follows; without one, it is over."""

    items: list[R]
    pause: Pause | None
    result: Any = None


def _walk(steps: Generator[Any, None, Any], asked_at: float | None = None) -> _Leg[Any]:
    """Go on to the next pause."""
    if asked_at is not None:
        ASKED_AT.set(asked_at)
    items: list[Any] = []
    try:
        while len(items) < _AT_ONCE:
            item = next(steps)
            if isinstance(item, Pause):
                return _Leg(items, item)
            items.append(item)
    except StopIteration as end:
        return _Leg(items, None, end.value)
    return _Leg(items, Pause())
