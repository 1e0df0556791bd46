"""How much of a queue is handed to the fleet ahead of time.

The rest stays in Postgres, where priority, pause, limits and cancel still work on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from orchestrator.domain.durations import SECONDS

HORIZON = 0.1
"""Seconds of work that a queue keeps ready beyond its free slots, so that no worker waits for a tick."""


def room(slots: int, outstanding: int, rate: float) -> int:
    """Return how many tasks a queue may be given now.

    `slots` is what its live workers run at once, `outstanding` what is dispatched and has not ended, and
    `rate` how many tasks a second they have been finishing. Without a worker there is no room at all.
    """
    return max(0, slots + int(rate * HORIZON) - outstanding) if slots else 0


def smoothed_rate(previous: float, finished: int, seconds: float) -> float:
    """Return the finishing rate after `finished` more tasks in `seconds`; about half of it is the last 0.2 s."""
    weight = min(1.0, seconds / 0.3)
    return previous + weight * (finished / max(seconds, 1e-3) - previous)


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
