"""Threads that would end this very process: they end alone, and the test that runs then fails.

A worker ends its process if a thread fails without which it cannot work. Here such a thread may be left by a test that
is over, and pytest would end without a word of what failed.
"""

from __future__ import annotations

import os
import threading
import traceback

_exit = os._exit
_process = os.getpid()
_failed: list[str] = []


def _end_thread(status: int) -> None:
    if os.getpid() != _process or threading.current_thread() is threading.main_thread():
        _exit(status)
    _failed.append(f"Thread {threading.current_thread().name}:\n{traceback.format_exc()}")


os._exit = _end_thread  # type: ignore[assignment]


def check() -> None:
    """Fail if a thread has ended since the last check."""
    failed, _failed[:] = "\n".join(_failed), []
    assert not failed, failed
