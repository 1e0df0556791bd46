"""End with the parent: what `orchestrator dev` started must not outlive it, even if it is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

FOLLOW = "ORCHESTRATOR_FOLLOW"
"""The variable in which a parent leaves its process id to those who shall end with it."""
_PR_SET_PDEATHSIG = 1


def follow_parent() -> None:
    """Ask the kernel for a SIGTERM when the parent dies, if the parent wants that. Only Linux can do this."""
    parent = os.environ.pop(FOLLOW, None)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it died before the kernel was asked
        sys.exit(1)
