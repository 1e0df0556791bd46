"""Raises exceptions in other threads (`PyThreadState_SetAsyncExc`), and works around a bug of CPython 3.11.

An exception set for a thread is raised at the thread's next bytecode; in a blocking call, when the call returns. Until
then the interpreter makes all threads check for it. In Python 3.11, a thread that is profiled (`sys.setprofile`, used
for workflow code) does not get beyond its first call during that time: one task that does not stop would block all
workflow turns of its process. So checking is turned off while turns run, and turned on again afterwards; an exception
that was set stays with its thread. If turns run without a break, the clock turns checking on now and then for a
moment, in which the turns pause.

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

_PAUSE = 0.01
"""Seconds for which turns pause while pending exceptions are delivered."""


class _Replacement(BaseException):
    """Replaces an exception that comes too late, or that is for another job."""


def _set(thread: int, reason: type[BaseException] | None) -> None:
    exception = None if reason is None else ctypes.py_object(reason)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), exception)


def _start_checking() -> None:
    """Have all threads check for exceptions. None may be pending for the current thread."""
    _set(threading.get_ident(), None)


def _stop_checking() -> None:
    """Have no thread check for exceptions. An exception pending for the current thread is discarded.

    A thread that receives an exception ends the checks of all threads, so another exception is raised and caught here.
    Merely clearing this thread's exception would leave the interpreter checking before every call.
    """
    with contextlib.suppress(_Replacement):
        _set(threading.get_ident(), _Replacement)
        while True:
            pass


class Delivery:
    """Sends exceptions to threads. `blocks_watched`: whether pending exceptions block watched threads (Python 3.11)."""

    def __init__(self, *, blocks_watched: bool = sys.version_info < (3, 12)) -> None:
        self._blocks_watched = blocks_watched
        self._lock = threading.Lock()
        self._pending: dict[int, object] = {}
        """Pending exceptions by thread. Delivered ones are removed without the lock, which their thread may hold."""
        self._classes: dict[type[BaseException], type[BaseException]] = {}
        self._watched = 0
        self._is_checking = False
        self._is_paused = False

    def send(self, thread: int, reason: type[BaseException]) -> None:
        """Raise `reason` in a thread at its next bytecode. It does not interrupt a blocking call."""
        if not self._blocks_watched or thread == threading.get_ident():
            _set(thread, reason)
            return
        with self._lock:
            self._pending[thread] = reason
            _set(thread, self._recording_class(reason))
            self._is_checking = True
            if self._watched:
                self._stop_checking()

    def discard(self) -> None:
        """Discard an exception that is pending for the current thread. None may be sent to the thread meanwhile."""
        self._pending.pop(threading.get_ident(), None)
        _stop_checking()

    def mark_delivered(self) -> None:
        """Note that the current thread has received its exception."""
        self._pending.pop(threading.get_ident(), None)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Return a context in which the calls of this thread may be watched, whatever is pending for other threads."""
        if not self._blocks_watched:
            yield
            return
        with self._lock:
            self._watched += 1
            if self._is_checking and not self._is_paused:
                self._stop_checking()
        try:
            yield
        finally:
            with self._lock:
                self._watched -= 1
                if self._pending and not self._watched:
                    self._start_checking()

    def deliver_pending(self) -> None:
        """Have threads check for pending exceptions, if only for a moment. Called by the clock."""
        if not self._pending and not self._is_checking:
            return
        with self._lock:
            if not self._pending:
                self._stop_checking()
                return
            self._start_checking()
            if not self._watched:
                return
            self._is_paused = True
        time.sleep(_PAUSE)
        with self._lock:
            self._is_paused = False
            if self._watched:
                self._stop_checking()

    def _recording_class(self, reason: type[BaseException]) -> type[BaseException]:
        """Return a subclass of `reason` that records its delivery: when the interpreter makes an instance to raise."""
        if (recording := self._classes.get(reason)) is None:

            def initialize(error: BaseException, *args: Any) -> None:
                self.mark_delivered()
                reason.__init__(error, *args)

            members = {"__init__": initialize, "__module__": reason.__module__, "__qualname__": reason.__qualname__}
            recording = self._classes[reason] = type(reason.__name__, (reason,), members)
        return recording

    def _start_checking(self) -> None:
        self._is_checking = True
        _start_checking()

    def _stop_checking(self) -> None:
        self._is_checking = False
        _stop_checking()


DELIVERY = Delivery()
"""The delivery of this process: there is one interpreter."""


# -- interrupting running code: a thread from another thread, and a coroutine at its next await


def stack_of(thread: int) -> TracebackType | None:
    """Return the current stack of a task's thread, from the runner's frame on, as a traceback for an error."""
    frame, traceback = sys._current_frames().get(thread), None
    while frame is not None:
        traceback = TracebackType(traceback, frame, frame.f_lasti, frame.f_lineno or 0)
        if frame.f_code.co_filename.replace("\\", "/").endswith("/running/runner.py"):
            return traceback
        frame = frame.f_back
    return None


def discard_interruption() -> None:
    """Discard an exception that is pending for the current thread."""
    DELIVERY.discard()


class AwaitInterrupted(SoftTimeout, asyncio.CancelledError):
    """The soft timeout of a coroutine.

    For the task it is a SoftTimeout. For the objects that the task awaits, such as a TaskGroup, it is also a
    cancellation, so that they leave nothing running.
    """


class Interruptible:
    """Wraps a coroutine, and turns the first cancellation for which `is_soft` returns True into a soft timeout."""

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
            except BaseException as error:  # noqa: BLE001  # anything raised here belongs inside the coroutine
                step = partial(self._coroutine.throw, self._translated(error))

    def _translated(self, error: BaseException) -> BaseException:
        if not isinstance(error, asyncio.CancelledError) or self._is_warned or not self._is_soft():
            return error
        self._is_warned = True
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()  # the task may go on, and its later awaits are not cancelled
        return AwaitInterrupted()
