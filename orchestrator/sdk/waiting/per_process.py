"""What a process has for itself: connections, threads and locks, none of which a fork may share with its parent; what
each event loop of a process has; and what a signal handler must not find half done.

A fork is noticed by its process id, not by a hook of the interpreter, because some servers fork without telling Python.
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
    """A lock that is free after a fork, and that a signal handler may take a second time."""

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
    """Something that each process makes when it first needs it. What a fork inherits, it neither uses nor closes."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = ProcessLock()
        self._process = 0
        self._made: T | None = None
        self._inherited: list[T | None] = []
        """Kept, because a driver may take leave of the server when it is forgotten, on a line that is not its own."""

    def __call__(self) -> T:
        if self._process != os.getpid():
            self._renew()
        assert self._made is not None
        return self._made

    def take(self) -> T | None:
        """Return what this process has made, and forget it; None if there is nothing."""
        with self._lock:
            if self._process != os.getpid():
                return None
            made, self._made, self._process = self._made, None, 0
            return made

    def _renew(self) -> None:
        process = os.getpid()
        with self._lock:
            if self._process == process:
                return
            made = self._make()
            if self._process != process:  # a signal handler has been here meanwhile
                self._inherited.append(self._made)
                self._made = made
                self._process = process


class PerLoop(Generic[T]):
    """Something that each event loop makes when it first needs it. Loops that are closed are forgotten."""

    def __init__(self, make: Callable[[asyncio.AbstractEventLoop], T]) -> None:
        self._make = make
        self._made: PerProcess[dict[asyncio.AbstractEventLoop, T]] = PerProcess(dict)

    def __call__(self) -> T:
        loop, made = asyncio.get_running_loop(), self._made()
        found = made.get(loop)
        if found is None:
            for other in list(made):  # those of other threads come and go
                if other.is_closed():
                    made.pop(other, None)
            found = made[loop] = self._make(loop)
        return found


def signal_safe(make: Callable[[], T]) -> T:
    """Return what `make` returns or raise what it raises; where possible, no signal handler can interrupt it."""
    if threading.current_thread() is not threading.main_thread() or _is_importing():
        return make()
    made: Future[T] = Future()
    try:
        threading.Thread(target=_fulfil, args=(made, make), name="orchestrator-loading", daemon=True).start()
    except RuntimeError:  # the interpreter is about to end, or there are too many threads
        return make()
    return made.result()


def _fulfil(made: Future[T], make: Callable[[], T]) -> None:
    try:
        made.set_result(make())
    except BaseException as error:  # noqa: BLE001  # it is raised where it was asked for
        made.set_exception(error)


def _is_importing() -> bool:
    """Say whether this thread is loading a module: another one could wait for that, and this one for the other."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
    return False
