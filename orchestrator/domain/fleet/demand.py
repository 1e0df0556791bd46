"""How many slots a queue wants: from what arrives, how long it runs, and how long it has waited."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from orchestrator.domain.durations import SECONDS

TARGET_LATENCY = 10.0
"""Seconds within which ready tasks should start."""
_UTILISATION = 0.8
"""Part of the slots that arriving tasks fill; the rest takes what arrives unevenly."""


def wanted_slots(*, ready: int, busy: int, oldest: float | None, rate: float, run_time: float | None) -> int:
    """Return how many slots keep up with what arrives and start what is ready in time, and no fewer than are busy.

    `rate` are the tasks that start each second. The slots for the backlog depend on the time that is left for its
    oldest task. If no run time is known, one slot more than are busy shows what it is.
    """
    if run_time is None:
        return busy + 1 if ready else busy
    left = max(TARGET_LATENCY - (oldest or 0.0), TARGET_LATENCY / 4)
    arriving = rate * run_time / _UTILISATION
    return math.ceil(round(max(busy, arriving) + ready * run_time / left, 6))


def mean_time(counts: Sequence[int]) -> float | None:
    """Return the mean of a histogram of times with the bounds `SECONDS`; None if it is empty."""
    bounds = (0.0, *SECONDS, 2 * SECONDS[-1])
    middles = [(low + high) / 2 for low, high in pairwise(bounds)]
    total = sum(counts)
    return sum(count * middle for count, middle in zip(counts, middles, strict=False)) / total if total else None
