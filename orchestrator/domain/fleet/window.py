"""How much of a queue is handed to the fleet ahead of time.

The rest stays in Postgres, where priority, pause, limits and cancel still work on it.
"""

from __future__ import annotations

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
