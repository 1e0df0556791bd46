"""Turn `os._exit` from a background thread into a failure of the current test.

A worker ends its process when an essential thread fails. A thread left over from an earlier test would end pytest
without any report.
"""

from __future__ import annotations

import os
import threading
import traceback

_exit = os._exit
_process = os.getpid()
_failed: list[str] = []


def _record_exit(status: int) -> None:
    if os.getpid() != _process or threading.current_thread() is threading.main_thread():
        _exit(status)
    _failed.append(f"Thread {threading.current_thread().name}:\n{traceback.format_exc()}")


os._exit = _record_exit  # type: ignore[assignment]


def check() -> None:
    """Fail if a thread has called `os._exit` since the last check."""
    failed, _failed[:] = "\n".join(_failed), []
    assert not failed, failed
