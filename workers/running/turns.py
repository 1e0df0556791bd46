"""Code of workflows that does not come back: noticed, named, and ended, so that it holds no slot for ever.

A turn only decides what is to be done, and takes milliseconds. It counts from one event that the code is shown to the
next, so that a long history may be replayed as long as that takes, and from one command to the next, so that many may
be given at once. What `ctx.run` runs does not count. What counts is processor time, for a busy machine is nobody's
fault; a turn that uses none of it for five times as long waits for something that it must not.
"""

from __future__ import annotations

import sys
import time
from types import FrameType

from orchestrator.domain.code.activation import Activated, Violation
from orchestrator.domain.ids import to_text
from orchestrator.errors import NotDeterministic
from orchestrator.sdk.code.commander import Commander
from orchestrator.sdk.code.endings import EndTurn
from orchestrator.sdk.code.engine import Running
from orchestrator.sdk.code.guards import is_own_code
from orchestrator.sdk.code.scope import place
from orchestrator.telemetry import get_logger
from orchestrator.workers.running.job import Job

log = get_logger("worker")

_LONGEST_LOOK = 0.1
"""Seconds that count between two looks: more have passed only if this process, or the machine, stood still."""
_BUSY = 0.01
"""Share of the time that code uses at least which computes; others wait, for something or for their turn."""
_MOST_WAITING = 5
"""After so many times its limit a turn has ended that uses no processor: others may keep it from that for a while."""
_MOST = 10
"""After so many times its limit a turn has ended, however little of the processor it was given."""
_MOST_ALONE = 30
"""After so many times its limit an activation has ended that runs in a process of its own, replay and all."""
_MOST_COMMANDS = 200_000
"""Code that goes on commanding after so many in one turn does not come back either."""


class TurnTooLong(NotDeterministic):
    """The code of a workflow has run for too long without waiting for anything."""


class Turns:
    """Watches the turns that run in this process."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._verdicts: dict[int, Violation] = {}

    def check(self, running: Running | None, job: Job, now: float) -> None:
        """Look at what runs of a job; end it if that takes too long."""
        if job.interrupted_by is not None:
            return
        if running is None:
            self._check_isolated(job, now)
            return
        if not self._is_too_long(running, now):
            return
        where = _place(running.thread)
        commander = running.commander
        name = commander.workflow
        whose = name, to_text(job.dispatch.run_id or job.dispatch.id)
        log.error(
            "run.turn_blocked workflow=%s run=%s where=%s: the code does not return", *whose, where, extra=job.fields
        )
        error = TurnTooLong(
            f"The code of workflow {name!r} ran for {self._limit:g} s without waiting for anything: {where}. "
            f"A workflow decides what is to be done, and tasks do it; if it must take so long, raise the setting "
            f"turn_timeout."
        )
        if commander.read_only:
            commander.spoilt = True  # only the query is at fault, and gets an error for an answer
        else:
            self._verdicts[id(job)] = Violation(commander.number, TurnTooLong.__name__, str(error))
            commander.stop(error)
        job.stop_with(EndTurn, now)

    def _check_isolated(self, job: Job, now: float) -> None:
        """End what runs alone in a process of its own, which watches its turns itself, and has not ended it."""
        limit = _MOST_ALONE * self._limit
        if not job.dispatch.alone or job.starting or now - job.started_at < limit:
            return
        name = job.dispatch.name
        whose = name, to_text(job.dispatch.id)
        log.error("run.turn_blocked workflow=%s run=%s: the code does not return", *whose, extra=job.fields)
        text = f"The code of workflow {name!r} ran for {limit:g} s in a process of its own, and did not come back."
        self._verdicts[id(job)] = Violation(0, TurnTooLong.__name__, text)
        job.stop_with(EndTurn, now)

    def verdict(self, job: Job) -> Activated | None:
        """Return the report of a turn that was ended here, and forget it; None for all others."""
        violation = self._verdicts.pop(id(job), None)
        if violation is None:
            return None
        dispatch = job.dispatch
        return Activated(dispatch.id, dispatch.attempt, time.monotonic() - job.started_at, stuck=violation)

    def _is_too_long(self, running: Running, now: float) -> bool:
        commander = running.commander
        seen = _seen(commander)
        used = _processor_time(running.thread, now)
        # Compared on both sides of the reading: another thread may run between any two lines here, for long.
        if commander.is_away or not running.seen == seen == _seen(commander):
            running.seen, running.since, running.watched = seen, used, 0.0
        else:
            running.watched += min(now - running.looked_at, _LONGEST_LOOK)
        running.looked_at = now
        busy = used - running.since
        if busy >= self._limit or running.watched >= _MOST * self._limit:
            return True
        return running.watched >= _MOST_WAITING * self._limit and busy < _BUSY * running.watched


def _seen(commander: Commander) -> tuple[int, int]:
    """Return how far the code has come."""
    return commander.step, min(commander.commanded, _MOST_COMMANDS)


def _processor_time(thread: int, now: float) -> float:
    """Return how long a thread has used a processor; where the system does not say, how late it is."""
    if sys.platform == "darwin":
        return now
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def _place(thread: int) -> str:
    """Return where in the project's own code a thread is; elsewhere, if it is nowhere there."""
    innermost = sys._current_frames().get(thread)
    frame: FrameType | None = innermost
    while frame is not None and not is_own_code(frame):
        frame = frame.f_back
    frame = frame or innermost
    return "at an unknown place" if frame is None else place(frame)
