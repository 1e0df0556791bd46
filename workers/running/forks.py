"""Handling of forks that tasks make of a worker process with `os.fork`.

A fork has a single thread, which belongs to the code of the task. It must end with that code: otherwise it would run
and report the jobs of the worker process a second time. It ends as a program does: with exit code 0, with the code of
`sys.exit`, or with a traceback and 1.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from orchestrator.errors import WrongState

T = TypeVar("T")

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that a worker process handles; a fork gets their default handlers."""
_mask = threading.local()
_is_fork = False
_listeners: list[Callable[[], None]] = []
_is_watching = False


def watch_forks() -> None:
    """Detect forks of this process from now on."""
    global _is_watching
    if not _is_watching:
        _is_watching = True
        os.register_at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_forked)


def on_fork(listener: Callable[[], None]) -> None:
    """Register a function to call in each fork, in the thread that has forked."""
    _listeners.append(listener)


def _block_signals() -> None:
    """Block signals until the fork has handlers of its own: a signal would be lost."""
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _forked() -> None:
    global _is_fork
    _is_fork = True
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    _unblock_signals()
    for listener in _listeners:
        listener()


def is_fork() -> bool:
    """Return whether this process is a fork of a worker process."""
    return _is_fork


def refuse_in_fork() -> None:
    """Raise an error in a fork, which must not use the worker's connections."""
    if _is_fork:
        raise WrongState(
            "A process that was forked inside a task cannot enqueue: it is a copy of the worker process, whose "
            "connections it shares. Enqueue in the task itself, before or after."
        )


def end_fork(error: BaseException | None = None) -> None:
    """End this process if it is a fork. `error` is the exception that ended the task's code."""
    if not _is_fork:
        return
    code: Any = 0
    if isinstance(error, SystemExit):
        code = error.code
    elif error is not None:
        code = 1
        with contextlib.suppress(Exception):
            traceback.print_exception(error)
    if code is not None and not isinstance(code, int):  # a message, as in sys.exit("message")
        with contextlib.suppress(Exception):
            print(code, file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit((code or 0) & 0xFF)


class TaskThreads(ThreadPoolExecutor):
    """Threads for `asyncio.to_thread` in tasks. A fork made in a thread ends with the thread's function."""

    def submit(self, function: Callable[..., T], /, *arguments: Any, **keywords: Any) -> Future[T]:
        """Run a function in a thread."""
        return super().submit(_run, function, *arguments, **keywords)


def _run(function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
    try:
        value = function(*arguments, **keywords)
    except BaseException as error:
        end_fork(error)
        raise
    end_fork()
    return value
