"""End with the parent, and say of what a process died.

A process without heartbeats must not go on with a task that runs elsewhere by then.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent dies; on other systems, a closed pipe must do."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before the kernel was asked
        os._exit(1)


def ending(code: int) -> str:
    """Return what a process died of, by its exit code as `subprocess` has it: `exit code 3`, `signal 9 (SIGKILL)`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:  # most of the real-time signals have no name
        return f"signal {-code}"
