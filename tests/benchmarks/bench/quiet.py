"""Waiting for a quiet moment: other work on the machine would be measured too."""

from __future__ import annotations

import time

import psutil

QUIET = 10.0
"""Per cent of all cores that others may use."""


def wait_for_quiet(patience: float) -> float:
    """Wait for two quiet seconds, but not longer than that; return the share of the CPU that others still use."""
    deadline = time.monotonic() + patience
    busy = float(psutil.cpu_percent(interval=2.0))
    while busy > QUIET and time.monotonic() < deadline:
        busy = float(psutil.cpu_percent(interval=2.0))
    return busy
