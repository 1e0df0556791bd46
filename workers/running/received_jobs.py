"""The jobs that a worker process has received, how fast they end, and how many more it may receive."""

from __future__ import annotations

import math
import threading
import time

from orchestrator.workers.parent.held import HeldAttempts
from orchestrator.workers.running.job import Job

_MEMORY = 0.5
"""Seconds that make up most of how full this process has been of late."""


class Pace:
    """Averages over the last looks."""

    def __init__(self, concurrency: int, least: float) -> None:
        self._concurrency = concurrency
        self._least = least
        """Seconds between two looks, at least."""
        self._looked_at = self._measured_at = time.monotonic()
        self._full = 0.0
        """The part of the slots that was taken at the last look."""
        self.load = 0.0
        """How full this process has been of late: 1 where every slot was taken."""
        self.rate = 0.0
        """Tasks that have ended in a second."""
        self.finished = 0
        """Tasks that have ended since the last look."""

    def measure(self, now: float, jobs: int) -> None:
        """Look at how many jobs are here."""
        self.load = self._full + (self.load - self._full) * math.exp((self._looked_at - now) / _MEMORY)
        self._full, self._looked_at = min(1.0, jobs / self._concurrency), now
        elapsed = now - self._measured_at
        if elapsed >= self._least:
            self.rate = 0.5 * self.rate + 0.5 * self.finished / elapsed
            self.finished = 0
            self._measured_at = now


LOOK = 0.05
"""Seconds between two looks at the clock while anything is here."""

_AHEAD = 0.02
"""Seconds of work that may be received ahead of free slots."""
_LEAST_READ = 0.7
"""Share of that for which one reads again: each read costs as much as some tasks."""


class ReceivedJobs:
    """Jobs that were received and whose code has not ended."""

    def __init__(self, concurrency: int, held: HeldAttempts) -> None:
        self._concurrency = concurrency
        self._held = held
        self.jobs: dict[int, Job] = {}
        """By the id of the object."""
        self.freed = threading.Event()
        """There may be room."""
        self.ended = 0
        """How many jobs have run to their end in this very process."""
        self.pace = Pace(concurrency, LOOK)

    def room(self) -> int:
        """Return how many tasks may be received now: free slots, and what is finished in the next 20 ms."""
        return min(self._concurrency + self._ahead() - len(self.jobs), self._held.room)

    def _ahead(self) -> int:
        return min(500, int(self.pace.rate * _AHEAD))

    def _is_worth_a_read(self) -> bool:
        """Say whether there is room, and not only for a few of the many tasks that are received ahead."""
        return self.room() > self._ahead() * _LEAST_READ

    def wait_for_room(self, timeout: float) -> int:
        """Return the room, waiting for some if there is none."""
        if not self._is_worth_a_read():
            self.freed.clear()
            if not self._is_worth_a_read():
                self.freed.wait(timeout)
        return max(0, self.room())

    def among(self, wanted: set[tuple[bytes, int]]) -> list[Job]:
        """Return those of these attempts that are here."""
        return [job for job in self.snapshot() if (job.dispatch.id, job.dispatch.attempt) in wanted]

    def snapshot(self) -> list[Job]:
        """Return what waits or runs here."""
        return list(self.jobs.values())

    def remove(self, job: Job) -> None:
        """Let go of a job whose code has ended, or that was handed back."""
        self.jobs.pop(id(job), None)
        self.pace.finished += 1
        # A waiting thread has cleared it before its last look; it would wait again for more than this one place.
        if not self.freed.is_set() and (not self.jobs or self._is_worth_a_read()):
            self.freed.set()

    def wait_until_idle(self, timeout: float) -> bool:
        """Wait until nothing is left here but code that does not end."""
        deadline = time.monotonic() + timeout
        while any(not job.lingers for job in self.snapshot()):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.freed.clear()
            if any(not job.lingers for job in self.snapshot()):
                self.freed.wait(min(left, 1.0))
        return True

    @property
    def used(self) -> int:
        """Return how many tasks this process has run or received to run; child processes count their own."""
        return self.ended + sum(not job.is_isolated for job in self.snapshot())
