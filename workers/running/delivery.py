"""Exceptions that are on their way to threads, beside threads whose calls are watched.

An exception that is meant for a thread arrives at its next bytecode; a thread in a blocking call gets it when the call
returns. Until then the interpreter has all threads look for it. In Python 3.11 a thread whose calls are watched, as in
the code of workflows, does not get beyond its first call while there is something to look for: one task that does not
stop would hold up all turns of its process. So the look is called off while turns run, and called for again when none
does; what has been sent stays with its thread. Where turns run without a break, the clock calls for it now and then,
for a moment, in which they stand still.

Later releases of Python need none of this.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterator
from functools import partial
from types import TracebackType
from typing import Any

from orchestrator.errors import SoftTimeout

_MOMENT = 0.01
"""Seconds for which turns stand still at a look of the clock, if something is on its way."""


class _Instead(BaseException):
    """Replaces an exception that comes too late, or that is for another job."""


def _set(thread: int, reason: type[BaseException] | None) -> None:
    what = None if reason is None else ctypes.py_object(reason)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)


def _call_for_it() -> None:
    """Have all threads look for what is meant for them; nothing may be on its way to the current one."""
    _set(threading.get_ident(), None)


def _call_off() -> None:
    """Have no thread look any more; an exception on its way to the current one is gone.

    A thread that finds something ends the look of all, so another exception is raised here, and caught. Merely clearing
    the exception of this thread would leave the interpreter looking for it before every call.
    """
    with contextlib.suppress(_Instead):
        _set(threading.get_ident(), _Instead)
        while True:
            pass


class Delivery:
    """Sends exceptions to threads; `stands_still` says whether watched threads do meanwhile."""

    def __init__(self, *, stands_still: bool = sys.version_info < (3, 12)) -> None:
        self._stands_still = stands_still
        self._lock = threading.Lock()
        self._on_the_way: dict[int, object] = {}
        """Threads that something is meant for. What arrives is taken out without the lock: its thread may hold that."""
        self._classes: dict[type[BaseException], type[BaseException]] = {}
        self._watched = 0
        self._is_called_for = False
        self._is_moment = False

    def send(self, thread: int, reason: type[BaseException]) -> None:
        """Raise `reason` in a thread. It arrives at that thread's next bytecode, not inside a blocking call."""
        if not self._stands_still or thread == threading.get_ident():
            _set(thread, reason)
            return
        with self._lock:
            self._on_the_way[thread] = reason
            _set(thread, self._noted(reason))
            self._is_called_for = True
            if self._watched:
                self._call_off()

    def take_back(self) -> None:
        """Take back an exception that was sent to the current thread and has not arrived; no more are sent to it."""
        self._on_the_way.pop(threading.get_ident(), None)
        _call_off()

    def arrived(self) -> None:
        """Note that the current thread has got what was meant for it."""
        self._on_the_way.pop(threading.get_ident(), None)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Let the calls of this thread be watched in here, whatever is on its way to others."""
        if not self._stands_still:
            yield
            return
        with self._lock:
            self._watched += 1
            if self._is_called_for and not self._is_moment:
                self._call_off()
        try:
            yield
        finally:
            with self._lock:
                self._watched -= 1
                if self._on_the_way and not self._watched:
                    self._call_for_it()

    def look(self) -> None:
        """Have threads look for what has been sent and has not arrived, if only for a moment. Called by the clock."""
        if not self._on_the_way and not self._is_called_for:
            return
        with self._lock:
            if not self._on_the_way:
                self._call_off()
                return
            self._call_for_it()
            if not self._watched:
                return
            self._is_moment = True
        time.sleep(_MOMENT)
        with self._lock:
            self._is_moment = False
            if self._watched:
                self._call_off()

    def _noted(self, reason: type[BaseException]) -> type[BaseException]:
        """Return a class like `reason` that notes when it is raised: that is when the interpreter makes an instance."""
        if (noted := self._classes.get(reason)) is None:

            def initialize(error: BaseException, *args: Any) -> None:
                self.arrived()
                reason.__init__(error, *args)

            members = {"__init__": initialize, "__module__": reason.__module__, "__qualname__": reason.__qualname__}
            noted = self._classes[reason] = type(reason.__name__, (reason,), members)
        return noted

    def _call_for_it(self) -> None:
        self._is_called_for = True
        _call_for_it()

    def _call_off(self) -> None:
        self._is_called_for = False
        _call_off()


DELIVERY = Delivery()
"""That of this process: there is one interpreter."""


# -- interrupt code that runs: a thread from another thread, and a coroutine at its next await


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
