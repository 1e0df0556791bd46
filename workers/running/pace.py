"""How busy a worker process has been of late, and how fast tasks end there."""

from __future__ import annotations

import time

_MEMORY = 0.1
"""Weight of the latest look in how full this process has been of late."""


class Pace:
    """Averages over the last looks."""

    def __init__(self, concurrency: int, least: float) -> None:
        self._concurrency = concurrency
        self._least = least
        """Seconds between two looks, at least."""
        self._measured_at = time.monotonic()
        self.load = 0.0
        """How full this process has been: 1 where every slot was taken."""
        self.rate = 0.0
        """Tasks that have ended in a second."""
        self.finished = 0
        """Tasks that have ended since the last look."""

    def measure(self, now: float, jobs: int) -> None:
        """Look at how many jobs are here; where there are none, the process is idle at once."""
        self.load = self.load + _MEMORY * (min(1.0, jobs / self._concurrency) - self.load) if jobs else 0.0
        elapsed = now - self._measured_at
        if elapsed >= self._least:
            self.rate = 0.5 * self.rate + 0.5 * self.finished / elapsed
            self.finished = 0
            self._measured_at = now
