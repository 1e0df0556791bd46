"""How many tasks a worker process may run before another takes its place (`--max-tasks-per-process`)."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.workers.parent.messages import Leaving
from orchestrator.workers.running.received_jobs import ReceivedJobs

_NO_LIMIT = 1_000_000
"""More than there is ever room for."""
_SUCCESSION = 3.0
"""Seconds that a successor takes to be ready, roughly."""


class Age:
    """Counts what a process has used up of `most`, and has the parent start a successor in time."""

    def __init__(self, most: int | None, received: ReceivedJobs, notify_parent: Callable[[Leaving], None]) -> None:
        self._most = most
        self._received = received
        self._notify_parent = notify_parent
        self._is_leaving = False
        self._is_spent = False
        """It has received as many tasks as it may run."""

    def stay(self) -> None:
        """Go on all the same: there is no successor."""
        self._most = None

    def left(self) -> int:
        """Return how many tasks this process may still take."""
        return _NO_LIMIT if self._most is None else max(0, self._most - self._received.used)

    def check(self) -> None:
        """Have a successor ready by the time that this process has run all it may; then take no more."""
        most = self._most
        if most is None or self._is_spent:
            return
        left = max(0, most - self._received.used)
        if left == 0:
            self._is_spent = True
            self._notify_parent(Leaving(f"it has run {most} tasks", at_once=True, is_last=False))
        elif not self._is_leaving and left <= min(most / 2, max(most / 5, self._received.pace.rate * _SUCCESSION)):
            self._is_leaving = True
            self._notify_parent(Leaving(f"it has run {self._received.ended} tasks of {most}", at_once=False))
