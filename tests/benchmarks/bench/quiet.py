"""Waits for a quiet machine, because other work would be measured too."""

from __future__ import annotations

import time

import psutil

QUIET = 10.0
"""Allowed CPU usage of other processes, in percent of all cores."""


def wait_for_quiet(patience: float) -> float:
    """Wait for two quiet seconds, at most `patience` seconds; return the CPU usage of other processes."""
    deadline = time.monotonic() + patience
    busy = float(psutil.cpu_percent(interval=2.0))
    while busy > QUIET and time.monotonic() < deadline:
        busy = float(psutil.cpu_percent(interval=2.0))
    return busy
