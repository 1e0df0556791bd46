"""Values for each process or event loop, such as connections, threads and locks, and safety in signal handlers.

A forked process must not share such values with its parent. A fork is detected by the process id, not by a hook of the
interpreter, because some servers fork without notifying Python.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class ProcessLock:
    """A lock that is free after a fork, and reentrant for signal handlers."""

    def __init__(self) -> None:
        self._locks: dict[int, threading.RLock] = {}

    def __enter__(self) -> None:
        self._mine.acquire()

    def __exit__(self, *_: object) -> None:
        self._mine.release()

    @property
    def _mine(self) -> threading.RLock:
        return self._locks.setdefault(os.getpid(), threading.RLock())


class PerProcess(Generic[T]):
    """A value that each process creates on first use. A forked process neither uses nor closes inherited values."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = ProcessLock()
        self._process = 0
        self._value: T | None = None
        self._inherited: list[T | None] = []
        """References that prevent garbage collection: it could make a driver say goodbye on its parent's connection."""

    def __call__(self) -> T:
        if self._process != os.getpid():
            self._renew()
        assert self._value is not None
        return self._value

    def take(self) -> T | None:
        """Return the value of this process and forget it; None if there is no value."""
        with self._lock:
            if self._process != os.getpid():
                return None
            value, self._value, self._process = self._value, None, 0
            return value

    def _renew(self) -> None:
        process = os.getpid()
        with self._lock:
            if self._process == process:
                return
            value = self._make()
            if self._process != process:  # a signal handler created one meanwhile
                self._inherited.append(self._value)
                self._value = value
                self._process = process


class PerLoop(Generic[T]):
    """A value that each event loop creates on first use. Values of closed loops are dropped."""

    def __init__(self, make: Callable[[asyncio.AbstractEventLoop], T]) -> None:
        self._make = make
        self._values: PerProcess[dict[asyncio.AbstractEventLoop, T]] = PerProcess(dict)

    def __call__(self) -> T:
        loop, values = asyncio.get_running_loop(), self._values()
        value = values.get(loop)
        if value is None:
            for other in list(values):  # other threads add and remove loops meanwhile
                if other.is_closed():
                    values.pop(other, None)
            value = values[loop] = self._make(loop)
        return value


def signal_safe(make: Callable[[], T]) -> T:
    """Call `make` and return its result; in another thread where possible, so that no signal can interrupt it."""
    if threading.current_thread() is not threading.main_thread() or _is_importing():
        return make()
    future: Future[T] = Future()
    try:
        threading.Thread(target=_fulfil, args=(future, make), name="orchestrator-loading", daemon=True).start()
    except RuntimeError:  # the interpreter is about to end, or there are too many threads
        return make()
    return future.result()


def _fulfil(future: Future[T], make: Callable[[], T]) -> None:
    try:
        future.set_result(make())
    except BaseException as error:  # noqa: BLE001  # the caller raises it
        future.set_exception(error)


def _is_importing() -> bool:
    """Return whether this thread is importing a module: to wait for another thread could then deadlock."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
    return False
