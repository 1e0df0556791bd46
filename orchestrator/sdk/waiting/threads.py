"""Threads for the async variants of calls that block.

They are our own: where Postgres hangs, the calls that wait for it hold up each other, and never what else the program
hands to the threads of its event loop.

A thread that has done one thing takes the next, and the loop hears of many at once. To hand each to a pool would cost
the loop a lock, a notification and a fight for the interpreter every time: ten thousand coroutines that begin to wait
for a result would hold it up for a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from orchestrator.sdk.inside import inside_workflow
from orchestrator.sdk.waiting.per_process import PerLoop, PerProcess
from orchestrator.sdk.waiting.steps import ASKED_AT, Pause, Steps, Stream

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
        """Go on to the next pause; the first step gets the time of the call."""
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


class Job(NamedTuple):
    """Something to be done in a thread."""

    call: Callable[[], Any]
    done: asyncio.Future[Any]
    dropped: Callable[[], object] | None
    """Called when it is over, or will not be begun, if its caller has gone."""


class ThreadPool:
    """Up to `most` threads of a pool, for one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pool: Callable[[], Executor], most: int) -> None:
        self._loop = loop
        self._pool = pool
        self._most = most
        self._waiting: deque[Job] = deque()
        self._ended: deque[tuple[Job, Any, BaseException | None]] = deque()
        self._working = 0
        self._is_starting = False
        self._is_notified = False

    def add(self, call: Callable[[], Any], dropped: Callable[[], object] | None = None) -> asyncio.Future[Any]:
        """Have something done; the future has what it returns or raises."""
        job = Job(call, self._loop.create_future(), dropped)
        self._waiting.append(job)
        if not self._is_starting and self._working < self._most:
            self._is_starting = True
            self._loop.call_soon(self._start_threads)
        return job.done

    def _start_threads(self) -> None:
        self._is_starting = False
        for _ in range(min(len(self._waiting), self._most - self._working)):
            try:
                self._pool().submit(self._work)
            except RuntimeError as error:  # the interpreter is about to end, or there are too many threads
                self._refuse(error)
                return
            self._working += 1

    def _refuse(self, error: RuntimeError) -> None:
        """Fail the jobs that wait, unless threads are at work that will come to them."""
        while self._waiting and not self._working:
            job = self._waiting.popleft()
            if not job.done.done():
                job.done.set_exception(RuntimeError(str(error)))

    # -- in a thread

    def _work(self) -> None:
        while True:
            try:
                job = self._waiting.popleft()
            except IndexError:
                break
            result, problem = None, None
            if not job.done.cancelled():
                try:
                    result = job.call()
                except BaseException as error:  # noqa: BLE001  # it is raised where it was asked for
                    problem = error
            self._hand_back(job, result, problem)
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._thread_ended)

    def _hand_back(self, job: Job, result: Any, problem: BaseException | None) -> None:
        self._ended.append((job, result, problem))
        if self._is_notified:
            return  # the loop has been notified, and has not come to it yet
        self._is_notified = True
        try:
            self._loop.call_soon_threadsafe(self._settle)
        except RuntimeError:  # the loop is closed, and no call waits any more
            while self._ended:
                _drop(self._ended.popleft()[0])
            self._is_notified = False

    # -- in the loop

    def _thread_ended(self) -> None:
        self._working -= 1
        if self._waiting and not self._is_starting:
            self._start_threads()

    def _settle(self) -> None:
        self._is_notified = False  # before it looks: a job that ends now notifies the loop again
        while self._ended:
            job, result, problem = self._ended.popleft()
            if job.done.done():
                _drop(job)
            elif problem is None:
                job.done.set_result(result)
            else:
                job.done.set_exception(_raisable(problem))


def _drop(job: Job) -> None:
    if job.dropped is not None:
        job.dropped()


def _raisable(problem: BaseException) -> BaseException:
    """Return what a future takes: not what ends a generator."""
    return RuntimeError(repr(problem)) if isinstance(problem, StopIteration) else problem
