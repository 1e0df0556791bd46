"""What becomes of the copies of a worker process that tasks make with `os.fork`.

A fork has one thread, the one that forked. It belongs to the code of the task, and only as long as that lasts: were it
to go on after that, it would run what waits in this process and report it, beside the process that it is a copy of.
So it ends where the code of the task does, as a program ends: with 0, as `sys.exit` says, or with a traceback and 1.
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
"""Signals that a worker process handles, and that end a fork."""
_mask = threading.local()
_is_fork = False
_listeners: list[Callable[[], None]] = []
_is_watching = False


def watch_forks() -> None:
    """From now on, know forks of this process as such."""
    global _is_watching
    if not _is_watching:
        _is_watching = True
        os.register_at_fork(before=_hold_signals, after_in_parent=_let_signals_in, after_in_child=_forked)


def on_fork(listener: Callable[[], None]) -> None:
    """Have this called in a fork, by the thread that has forked."""
    _listeners.append(listener)


def _hold_signals() -> None:
    """Let no signal reach a fork before it has handlers of its own: it would be lost."""
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _let_signals_in() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _forked() -> None:
    global _is_fork
    _is_fork = True
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    _let_signals_in()
    for listener in _listeners:
        listener()


def is_fork() -> bool:
    """Say whether this process is a copy of a worker process."""
    return _is_fork


def refuse_in_fork() -> None:
    """Raise where a fork would talk to the leader through connections that are not its own."""
    if _is_fork:
        raise WrongState(
            "A process that was forked inside a task cannot enqueue: it is a copy of the worker process, whose "
            "connections it shares. Enqueue in the task itself, before or after."
        )


def end_fork(error: BaseException | None = None) -> None:
    """End this process if it is a fork in which the code of a task has ended, in this way."""
    if not _is_fork:
        return
    code: Any = 0
    if isinstance(error, SystemExit):
        code = error.code
    elif error is not None:
        code = 1
        with contextlib.suppress(Exception):
            traceback.print_exception(error)
    if code is not None and not isinstance(code, int):  # as sys.exit("words") does
        with contextlib.suppress(Exception):
            print(code, file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit((code or 0) & 0xFF)


class TaskThreads(ThreadPoolExecutor):
    """Threads for `asyncio.to_thread` in tasks: a fork that is made in one ends with what the thread was to do."""

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
