"""Interrupt code that runs: a thread from another thread, and a coroutine at its next await."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from types import TracebackType
from typing import Any

from orchestrator.errors import SoftTimeout
from orchestrator.workers.running.delivery import DELIVERY


def interrupt_thread(thread: int, reason: type[BaseException]) -> None:
    """Raise `reason` in a thread. It arrives at that thread's next bytecode, not inside a blocking call."""
    DELIVERY.send(thread, reason)


def stack_of(thread: int) -> TracebackType | None:
    """Return where a thread that runs a task is now, as the traceback of an error there: from its runner's frame on."""
    frame, found = sys._current_frames().get(thread), None
    while frame is not None:
        found = TracebackType(found, frame, frame.f_lasti, frame.f_lineno or 0)
        if frame.f_code.co_filename.replace("\\", "/").endswith("/running/runner.py"):
            return found
        frame = frame.f_back
    return None


def uninterrupted() -> None:
    """Take back an exception that was meant for the current thread and has not arrived yet."""
    DELIVERY.take_back()


class AwaitInterrupted(SoftTimeout, asyncio.CancelledError):
    """The soft timeout of a coroutine.

    To the task it is a SoftTimeout. To what the task awaits, such as a TaskGroup, it is a cancellation too, so that
    nothing is left running behind its back.
    """


class Interruptible:
    """A coroutine in which one cancellation, the first for which `is_soft` says so, arrives as a soft timeout."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], is_soft: Callable[[], bool]) -> None:
        self._coroutine = coroutine
        self._is_soft = is_soft
        self._is_warned = False

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Callable[[], Any] = partial(self._coroutine.send, None)
        while True:
            try:
                awaited = step()
            except StopIteration as end:
                return end.value
            try:
                step = partial(self._coroutine.send, (yield awaited))
            except BaseException as error:  # noqa: BLE001  # whatever arrives here belongs inside the coroutine
                step = partial(self._coroutine.throw, self._translated(error))

    def _translated(self, error: BaseException) -> BaseException:
        if not isinstance(error, asyncio.CancelledError) or self._is_warned or not self._is_soft():
            return error
        self._is_warned = True
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()  # the task may go on, and what it awaits from here on is not cancelled
        return AwaitInterrupted()
