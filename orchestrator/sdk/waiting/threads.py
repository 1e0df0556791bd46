"""Threads for the async variants of blocking calls.

The threads are separate from the default executor of the event loop: if Postgres hangs, its callers block only each
other, not the rest of the program.

A thread takes job after job from a queue, and the loop is notified of many results at once. To submit each job to a
pool would cost the loop a lock, a notification and a switch of the interpreter lock: ten thousand coroutines that begin
to wait for a result would block the loop for a second.
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
from orchestrator.sdk.waiting.steps import CALLED_AT, Pause, Steps, Stream

P = ParamSpec("P")
R = TypeVar("R")
_MAX_THREADS = 16
"""Blocking calls at the same time; further calls wait for a thread."""
_BATCH_SIZE = 100
"""Items of a stream that a thread fetches before it returns them to the loop."""


class Threads:
    """The threads of a client, started on demand."""

    def __init__(self) -> None:
        self._pool = PerProcess(lambda: ThreadPoolExecutor(_MAX_THREADS, "orchestrator-client"))
        self._thread_pool = PerLoop(lambda loop: ThreadPool(loop, self._pool, _MAX_THREADS))

    async def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a blocking call in a thread, with the caller's context variables."""
        if inside_workflow():
            return function(*args, **kwargs)  # nothing blocks inside a workflow: the call is a command, or is refused
        call = partial(contextvars.copy_context().run, function, *args, **kwargs)
        result: R = await self._thread_pool().add(call)
        return result

    async def complete(self, steps: Steps[R]) -> R:
        """Run a call and return its result. No thread is held during its pauses."""
        called_at: float | None = time.monotonic()
        while True:
            segment: _Segment[Any] = await self._advance(steps, called_at)
            called_at = None
            if segment.pause is None:
                result: R = segment.result
                return result
            try:
                await segment.pause.wait_async()
            except BaseException:
                self._drop(steps)
                raise

    async def iterate(self, stream: Stream[R]) -> AsyncIterator[R]:
        """Yield the items of a call. No thread is held during its pauses."""
        called_at: float | None = time.monotonic()
        while True:
            segment: _Segment[R] = await self._advance(stream, called_at)
            called_at = None
            try:
                for item in segment.items:
                    yield item
                if segment.pause is None:
                    return
                await segment.pause.wait_async()
            except BaseException:
                self._drop(stream)
                raise

    async def _advance(self, steps: Generator[Any, None, Any], called_at: float | None) -> _Segment[Any]:
        """Run a call up to its next pause. The first step gets the time of the call."""
        if inside_workflow():
            return _run_to_pause(steps)
        advance = partial(contextvars.copy_context().run, _run_to_pause, steps, called_at)
        segment: _Segment[Any] = await self._thread_pool().add(advance, partial(self._drop, steps))
        return segment

    def _drop(self, steps: Generator[Any, None, Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the interpreter is about to end
            self._pool().submit(steps.close)

    def close(self) -> None:
        """Stop the threads after their current jobs."""
        pool = self._pool.take()
        if pool is not None:
            pool.shutdown(wait=False)


@dataclass
class _Segment(Generic[R]):
    """The items that a call yielded, and the pause after them; without a pause, the call has ended."""

    items: list[R]
    pause: Pause | None
    result: Any = None


def _run_to_pause(steps: Generator[Any, None, Any], called_at: float | None = None) -> _Segment[Any]:
    if called_at is not None:
        CALLED_AT.set(called_at)
    items: list[Any] = []
    try:
        while len(items) < _BATCH_SIZE:
            item = next(steps)
            if isinstance(item, Pause):
                return _Segment(items, item)
            items.append(item)
    except StopIteration as end:
        return _Segment(items, None, end.value)
    return _Segment(items, Pause())


class Job(NamedTuple):
    """A call to run in a thread."""

    call: Callable[[], Any]
    done: asyncio.Future[Any]
    dropped: Callable[[], object] | None
    """Called when the job has ended or is skipped after its caller was cancelled."""


class ThreadPool:
    """The jobs of one event loop, which run in up to `max_threads` threads of a pool."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pool: Callable[[], Executor], max_threads: int) -> None:
        self._loop = loop
        self._pool = pool
        self._max_threads = max_threads
        self._waiting: deque[Job] = deque()
        self._finished: deque[tuple[Job, Any, BaseException | None]] = deque()
        self._working = 0
        self._is_starting = False
        self._is_notified = False

    def add(self, call: Callable[[], Any], dropped: Callable[[], object] | None = None) -> asyncio.Future[Any]:
        """Add a job. The future gets its result or exception."""
        job = Job(call, self._loop.create_future(), dropped)
        self._waiting.append(job)
        if not self._is_starting and self._working < self._max_threads:
            self._is_starting = True
            self._loop.call_soon(self._start_threads)
        return job.done

    def _start_threads(self) -> None:
        self._is_starting = False
        for _ in range(min(len(self._waiting), self._max_threads - self._working)):
            try:
                self._pool().submit(self._work)
            except RuntimeError as error:  # the interpreter is about to end, or there are too many threads
                self._refuse(error)
                return
            self._working += 1

    def _refuse(self, error: RuntimeError) -> None:
        """Fail the waiting jobs, unless a running thread will take them."""
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
                except BaseException as error:  # noqa: BLE001  # the caller raises it
                    problem = error
            self._finish(job, result, problem)
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._thread_ended)

    def _finish(self, job: Job, result: Any, problem: BaseException | None) -> None:
        self._finished.append((job, result, problem))
        if self._is_notified:
            return  # the loop was notified already, and has not run yet
        self._is_notified = True
        try:
            self._loop.call_soon_threadsafe(self._settle)
        except RuntimeError:  # the loop is closed, and no call waits any more
            while self._finished:
                _drop(self._finished.popleft()[0])
            self._is_notified = False

    # -- in the loop

    def _thread_ended(self) -> None:
        self._working -= 1
        if self._waiting and not self._is_starting:
            self._start_threads()

    def _settle(self) -> None:
        self._is_notified = False  # first, so that a job that ends from now on notifies the loop again
        while self._finished:
            job, result, problem = self._finished.popleft()
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
    """Return an exception that a future accepts: StopIteration is not allowed."""
    return RuntimeError(repr(problem)) if isinstance(problem, StopIteration) else problem
