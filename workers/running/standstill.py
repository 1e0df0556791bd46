"""Handling of a stalled event loop, which a task blocks.

Tasks that wait for the loop could run elsewhere, so they are handed back. Then this process receives only tasks that no
other worker takes. If such a task is dispatched to this process again, no other worker has a free slot, and it cannot
run here either: it is handed back with a delay, which doubles each time. So such tasks do not circulate, and leave the
slots to tasks that need no event loop. One task stays for a while, so that the loop has work when it recovers. A loop
that stays blocked for long is abandoned, with its process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestrator.telemetry import get_logger
from orchestrator.workers.parent.held import HeldAttempts
from orchestrator.workers.running.coroutines import Coroutines
from orchestrator.workers.running.job import Job, Stage

log = get_logger("worker")

BLOCKED_AFTER = 1.0
"""Seconds after which a blocked event loop is logged; a healthy one responds sooner."""
BLOCKED_FOR = 5.0
"""Seconds after which the process of a blocked event loop is replaced; even a loaded loop responds sooner."""
_STALLED_AFTER = 0.2
"""Seconds of a stall after which tasks that wait for the loop are handed back."""
_HAND_BACK_AFTER = 0.2
"""Seconds that a received task may wait for a thread before it is handed back."""
_HAND_BACK_PLACED_AFTER = 10.0
"""Seconds that a task sent only to this worker may wait before it is handed back. Few workers can run it, and the
leader asks for it when they have room (`spare`). Otherwise it would come back, and lose its place in the queue."""
_FIRST_DELAY = 0.2
_MAX_DELAY = 1.0
"""Bounds of the delay of tasks that were handed back, in seconds. It doubles each time that a task comes back."""


class Standstill:
    """Watches an event loop. `on_standstill` is called with the reason when the loop is abandoned."""

    def __init__(
        self, coroutines: Coroutines, held: HeldAttempts, on_standstill: Callable[[str], None], blocked_for: float
    ) -> None:
        self._coroutines = coroutines
        self._held = held
        self._on_standstill = on_standstill
        self._blocked_for = blocked_for
        self._stalled_for = 0.0
        self._handed_back: set[bytes] = set()
        """Tasks that were handed back since the loop last responded."""
        self._delay = 0.0
        self._delayed_at = 0.0
        self._is_given_up = False
        self._is_slow = False

    def patience(self, job: Job) -> float:
        """Return how many seconds a received task may wait in this process: 0 if it needs a stalled loop."""
        if job.is_placed:
            return _HAND_BACK_PLACED_AFTER
        return 0.0 if job.on_loop and self.is_stalled else _HAND_BACK_AFTER

    @property
    def is_stalled(self) -> bool:
        """Return whether the loop has been stalled for so long that tasks should not wait for it."""
        return self._stalled_for >= _STALLED_AFTER

    def is_blocked(self) -> bool:
        """Return whether a task blocks the event loop, and with it all other asynchronous tasks."""
        return self._coroutines.is_blocked(BLOCKED_AFTER)

    def is_hopeless(self, jobs: Sequence[Job]) -> bool:
        """Return whether all remaining jobs were on an event loop that is closed."""
        orphaned = self._coroutines.orphaned()
        return bool(orphaned) and all(job in orphaned or job.lingers for job in jobs)

    def mark_blocking(self) -> None:
        """Report to the parent which tasks must run alone next time: those that block the event loop, or may have
        closed it."""
        job = self._coroutines.blocking()
        for suspect in self._coroutines.orphaned() | ({job} if job is not None else set()):
            if suspect.stage is Stage.RUNNING:
                self._held.mark_blocking(suspect.slot)

    @property
    def hands_back(self) -> bool:
        """Return whether tasks were handed back because the loop is stalled."""
        return bool(self._handed_back)

    def check(self, now: float) -> None:
        """Check whether the loop responds. Log which task blocks it, and abandon the loop if that lasts."""
        self._stalled_for = stalled_for = self._coroutines.measure_stall(now)
        if not stalled_for:
            self._clear()
        if stalled_for > self._blocked_for and not self._is_given_up:
            self._is_given_up = True
            self._on_standstill(self._coroutines.describe_block())
        elif stalled_for > BLOCKED_AFTER and not self._is_slow:
            log.warning("process.event_loop_slow: %s; all other async tasks wait", self._coroutines.describe_block())
        self._is_slow = stalled_for > BLOCKED_AFTER

    def reset(self) -> None:
        """Forget the stall, because no task is left that could block the loop."""
        self._stalled_for = 0.0
        self._clear()

    def delay(self, task: bytes, now: float) -> float:
        """Return the delay for a task that is handed back now: 0 while another worker may take the task."""
        if task in self._handed_back and now >= self._delayed_at + self._delay:
            self._delay = min(_MAX_DELAY, max(_FIRST_DELAY, 2 * self._delay))
            self._delayed_at = now
        self._handed_back.add(task)
        return self._delay

    def may_stay(self, task: bytes, waited: float) -> bool:
        """Return whether a task may wait here for the loop to recover: no other worker has taken it."""
        return task in self._handed_back and waited <= _MAX_DELAY

    def _clear(self) -> None:
        self._handed_back.clear()
        self._delay = self._delayed_at = 0.0
