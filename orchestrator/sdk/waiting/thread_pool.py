"""What the coroutines of one event loop have done in threads.

A thread that has done one thing takes the next, and the loop hears of many at once. To hand each to a pool would cost
the loop a lock, a notification and a fight for the interpreter every time: ten thousand coroutines that begin to wait
for a result would hold it up for a second.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, NamedTuple


class Job(NamedTuple):
    """Something to be done in a thread."""

    call: Callable[[], Any]
    done: asyncio.Future[Any]
    dropped: Callable[[], object] | None
    """Called when it is over, or will not be begun, if nobody waits for it any more."""


class ThreadPool:
    """Up to `most` threads of a pool, for one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pool: Callable[[], Executor], most: int) -> None:
        self._loop = loop
        self._pool = pool
        self._most = most
        self._waiting: deque[Job] = deque()
        self._ended: deque[tuple[Job, Any, BaseException | None]] = deque()
        self._working = 0
        self._is_hiring = False
        self._is_telling = False

    def add(self, call: Callable[[], Any], dropped: Callable[[], object] | None = None) -> asyncio.Future[Any]:
        """Have something done; the future has what it returns or raises."""
        job = Job(call, self._loop.create_future(), dropped)
        self._waiting.append(job)
        if not self._is_hiring and self._working < self._most:
            self._is_hiring = True
            self._loop.call_soon(self._hire)
        return job.done

    def _hire(self) -> None:
        self._is_hiring = False
        for _ in range(min(len(self._waiting), self._most - self._working)):
            try:
                self._pool().submit(self._work)
            except RuntimeError as error:  # the interpreter is about to end, or there are too many threads
                self._refuse(error)
                return
            self._working += 1

    def _refuse(self, error: RuntimeError) -> None:
        """Tell those who wait that there is no thread, unless some are at work, who will come to them."""
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
            self._tell(job, result, problem)
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._leave)

    def _tell(self, job: Job, result: Any, problem: BaseException | None) -> None:
        self._ended.append((job, result, problem))
        if self._is_telling:
            return  # the loop has been told, and not come to it yet
        self._is_telling = True
        try:
            self._loop.call_soon_threadsafe(self._settle)
        except RuntimeError:  # the loop is closed, and nobody waits any more
            while self._ended:
                _drop(self._ended.popleft()[0])
            self._is_telling = False

    # -- in the loop

    def _leave(self) -> None:
        self._working -= 1
        if self._waiting and not self._is_hiring:
            self._hire()

    def _settle(self) -> None:
        self._is_telling = False  # before it looks: who comes now tells the loop again
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
