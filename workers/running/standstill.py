"""What is done about an event loop that does not turn, because a task keeps it.

Tasks that wait for it could run elsewhere, so they are handed back, and this process takes only what nobody else does.
Where they come back all the same, nobody has room, and it cannot run them either: then they are to stay away, each time
for longer. So they do not go round, and do not take the places of tasks that need no event loop, which go on. One of
them stays for a while, so that the loop has something to begin with when it turns again. A loop that does not turn for
long is given up, with its process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestrator.telemetry import get_logger
from orchestrator.workers.parent.held import HeldAttempts
from orchestrator.workers.running.coroutines import Coroutines
from orchestrator.workers.running.job import Job, Stage

log = get_logger("worker")

BLOCKED_AFTER = 1.0
"""Seconds in which a healthy event loop turns."""
BLOCKED_FOR = 5.0
"""Seconds in which even a burdened event loop turns; one that has not is given up, with its process."""
_STANDS_AFTER = 0.2
"""Seconds after which what waits for the event loop is better off elsewhere."""
_HAND_BACK_AFTER = 0.2
"""Seconds that a received task may wait for a thread before another worker may have it."""
_HAND_BACK_PLACED_AFTER = 10.0
"""The same for one that was sent to this worker alone: few others know it, and the leader asks for it if they have room
(`spare`). Where all of them are full, it would only come back, and others would have taken its place in the line."""
_FIRST_DELAY = 0.2
_LONGEST_DELAY = 1.0
"""Seconds for which tasks of this worker alone stay away; twice as long each time that they come back."""


class Standstill:
    """Watches an event loop. `on_standstill` is called with the reason when it is given up."""

    def __init__(
        self, coroutines: Coroutines, held: HeldAttempts, on_standstill: Callable[[str], None], blocked_for: float
    ) -> None:
        self._coroutines = coroutines
        self._held = held
        self._on_standstill = on_standstill
        self._blocked_for = blocked_for
        self._standing = 0.0
        self._handed_back: set[bytes] = set()
        """Tasks that were handed back since the loop has last turned."""
        self._delay = 0.0
        self._delayed_at = 0.0
        self._is_given_up = False
        self._is_slow = False

    def patience(self, job: Job) -> float:
        """Return for how many seconds a received task may wait here; not at all for a loop that stands still."""
        if job.is_placed:
            return _HAND_BACK_PLACED_AFTER
        return 0.0 if job.on_loop and self.lasts else _HAND_BACK_AFTER

    @property
    def lasts(self) -> bool:
        """Say whether the loop has not turned for so long that nothing that waits for it should stay here."""
        return self._standing >= _STANDS_AFTER

    def is_blocked(self) -> bool:
        """Say whether a task keeps the event loop, and with it all other asynchronous tasks, from running."""
        return self._coroutines.is_blocked(BLOCKED_AFTER)

    def is_hopeless(self, jobs: Sequence[Job]) -> bool:
        """Say whether all that is left of these was on an event loop that is closed."""
        lost = self._coroutines.lost()
        return bool(lost) and all(job in lost or job.lingers for job in jobs)

    def mark_blocking(self) -> None:
        """Report to the parent which tasks run alone next time: those that block the event loop, or may have closed
        it."""
        job = self._coroutines.blocking()
        for suspect in self._coroutines.lost() | ({job} if job is not None else set()):
            if suspect.stage is Stage.RUNNING:
                self._held.mark_blocking(suspect.slot)

    @property
    def sends_away(self) -> bool:
        """Say whether tasks have come that cannot run because the loop does not turn."""
        return bool(self._handed_back)

    def look(self, now: float) -> None:
        """Look whether the loop turns. Log which task blocks it; if that does not end, give the loop up."""
        self._standing = standing = self._coroutines.watch(now)
        if not standing:
            self._forget()
        if standing > self._blocked_for and not self._is_given_up:
            self._is_given_up = True
            self._on_standstill(self._coroutines.standstill())
        elif standing > BLOCKED_AFTER and not self._is_slow:
            log.warning("process.event_loop_slow: %s; all other async tasks wait", self._coroutines.standstill())
        self._is_slow = standing > BLOCKED_AFTER

    def rest(self) -> None:
        """No task here could block the loop, so it is not checked for a while."""
        self._standing = 0.0
        self._forget()

    def delay(self, task: bytes, now: float) -> float:
        """Return for how long a task that is handed back now is to stay away: not at all while others may have it."""
        if task in self._handed_back and now >= self._delayed_at + self._delay:
            self._delay = min(_LONGEST_DELAY, max(_FIRST_DELAY, 2 * self._delay))
            self._delayed_at = now
        self._handed_back.add(task)
        return self._delay

    def may_stay(self, task: bytes, waited: float) -> bool:
        """Say whether the loop may begin with this task when it turns: no other worker has taken it."""
        return task in self._handed_back and waited <= _LONGEST_DELAY

    def _forget(self) -> None:
        self._handed_back.clear()
        self._delay = self._delayed_at = 0.0
