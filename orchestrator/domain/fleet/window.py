"""How many tasks of a queue are dispatched to workers ahead of free slots.

All others stay in Postgres, where priority, pause, limits and cancel still apply to them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from orchestrator.domain.durations import SECONDS

HORIZON = 0.1
"""Seconds of work dispatched beyond the free slots of a queue, so that no worker waits for a tick."""


def room(slots: int, outstanding: int, rate: float) -> int:
    """Return how many tasks of a queue may be dispatched now.

    `slots` is the concurrency of its live workers, `outstanding` the dispatched tasks that have not ended, and `rate`
    the tasks that the workers finish per second. Without workers there is no room.
    """
    return max(0, slots + int(rate * HORIZON) - outstanding) if slots else 0


def smoothed_rate(previous: float, finished: int, seconds: float) -> float:
    """Return the rate of finished tasks per second, smoothed. The last 0.2 s have about half the weight."""
    weight = min(1.0, seconds / 0.3)
    return previous + weight * (finished / max(seconds, 1e-3) - previous)


TARGET_LATENCY = 10.0
"""Seconds within which ready tasks should start."""
_UTILISATION = 0.8
"""The share of the slots that arriving tasks should fill on average. The rest absorbs bursts."""


def wanted_slots(*, ready: int, busy: int, oldest: float | None, rate: float, run_time: float | None) -> int:
    """Return how many slots keep up with arriving tasks and start the backlog in time; at least the busy ones.

    `rate` is the number of tasks that start per second. The slots for the backlog depend on the time remaining for its
    oldest task. If no run time is known, one slot more than the busy ones is requested to measure it.
    """
    if run_time is None:
        return busy + 1 if ready else busy
    remaining = max(TARGET_LATENCY - (oldest or 0.0), TARGET_LATENCY / 4)
    arriving = rate * run_time / _UTILISATION
    return math.ceil(round(max(busy, arriving) + ready * run_time / remaining, 6))


def mean_time(counts: Sequence[int]) -> float | None:
    """Return the mean of a duration histogram with the bounds `SECONDS`, or None if it is empty."""
    bounds = (0.0, *SECONDS, 2 * SECONDS[-1])
    middles = [(low + high) / 2 for low, high in pairwise(bounds)]
    total = sum(counts)
    return sum(count * middle for count, middle in zip(counts, middles, strict=False)) / total if total else None
