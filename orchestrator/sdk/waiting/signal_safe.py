"""Do something that a signal handler must not find half done: load modules.

Handlers run in the main thread, in the middle of whatever it does. One that needs a module which is being loaded there
gets the part of it that exists by then. Where another thread loads it, the handler waits for that thread.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


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
