"""Stops workflow code that does not return, so that it does not occupy a slot for ever.

A turn only makes decisions, and takes milliseconds. Its time counts from one event shown to the code to the next, so
that replaying a long history may take long, and from one command to the next, so that a turn may give many commands.
Code inside `ctx.run` does not count. The limit applies to processor time, because a busy machine is not the code's
fault. A turn that uses almost none for five times the limit is blocked in a forbidden wait.
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
from orchestrator.sdk.code.scope import frame_location
from orchestrator.telemetry import get_logger
from orchestrator.workers.running.job import Job

log = get_logger("worker")

_MAX_STEP = 0.1
"""Seconds that count, at most, between two checks: if more have passed, the process or the machine was suspended."""
_BUSY_SHARE = 0.01
"""Share of processor time above which code counts as computing; below, it waits for something or for the processor."""
_MAX_IDLE = 5
"""Multiple of the limit after which a turn that uses no processor time is stopped; others may slow it for a while."""
_MAX_ELAPSED = 10
"""Multiple of the limit after which a turn is stopped, however little processor time it got."""
_MAX_ISOLATED = 30
"""Multiple of the limit after which an activation in a process of its own is stopped, including its replay."""
_MAX_COMMANDS = 200_000
"""Commands in a turn after which further commands no longer count as progress."""


class TurnTooLong(NotDeterministic):
    """The code of a workflow ran for too long without waiting for anything."""


class Turns:
    """Watches the workflow turns of this process."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._verdicts: dict[int, Violation] = {}

    def check(self, running: Running | None, job: Job, now: float) -> None:
        """Stop the turn that a job is running if it takes too long."""
        if job.interrupted_by is not None:
            return
        if running is None:
            self._check_isolated(job, now)
            return
        if not self._is_too_long(running, now):
            return
        location = _location(running.thread)
        commander = running.commander
        name = commander.workflow
        names = name, to_text(job.dispatch.run_id or job.dispatch.id)
        log.error(
            "run.turn_blocked workflow=%s run=%s where=%s: the code does not return", *names, location, extra=job.fields
        )
        error = TurnTooLong(
            f"The code of workflow {name!r} ran for {self._limit:g} s without waiting for anything: {location}. Leave "
            f"long work to tasks; if the workflow itself must take so long, raise the setting turn_timeout."
        )
        if commander.read_only:
            commander.is_dirty = True  # only the query is at fault: it gets an error as its answer
        else:
            self._verdicts[id(job)] = Violation(commander.number, TurnTooLong.__name__, str(error))
            commander.stop(error)
        job.stop_with(EndTurn, now)

    def _check_isolated(self, job: Job, now: float) -> None:
        """Stop an activation in a process of its own, if that process should have stopped its turn and has not."""
        limit = _MAX_ISOLATED * self._limit
        if not job.dispatch.alone or job.starting or now - job.started_at < limit:
            return
        name = job.dispatch.name
        names = name, to_text(job.dispatch.id)
        log.error("run.turn_blocked workflow=%s run=%s: the code does not return", *names, extra=job.fields)
        text = f"The code of workflow {name!r} ran for {limit:g} s in a process of its own, and did not return."
        self._verdicts[id(job)] = Violation(0, TurnTooLong.__name__, text)
        job.stop_with(EndTurn, now)

    def verdict(self, job: Job) -> Activated | None:
        """Return the report of a turn that was stopped here, and forget it. Return None for other jobs."""
        violation = self._verdicts.pop(id(job), None)
        if violation is None:
            return None
        dispatch = job.dispatch
        return Activated(dispatch.id, dispatch.attempt, time.monotonic() - job.started_at, stuck=violation)

    def _is_too_long(self, running: Running, now: float) -> bool:
        commander = running.commander
        seen = _progress(commander)
        used = _processor_time(running.thread, now)
        # Compared before and after reading the clock: another thread may run for long between any two lines here.
        if commander.is_away or not running.seen == seen == _progress(commander):
            running.seen, running.since, running.watched = seen, used, 0.0
        else:
            running.watched += min(now - running.looked_at, _MAX_STEP)
        running.looked_at = now
        busy = used - running.since
        if busy >= self._limit or running.watched >= _MAX_ELAPSED * self._limit:
            return True
        return running.watched >= _MAX_IDLE * self._limit and busy < _BUSY_SHARE * running.watched


def _progress(commander: Commander) -> tuple[int, int]:
    """Return how far the code has come: the number of its step and of its commands."""
    return commander.step, min(commander.commanded, _MAX_COMMANDS)


def _processor_time(thread: int, now: float) -> float:
    """Return the processor time of a thread in seconds. On macOS, return the current time instead."""
    if sys.platform == "darwin":
        return now
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def _location(thread: int) -> str:
    """Return where in the project's own code a thread is, or its innermost line elsewhere."""
    innermost = sys._current_frames().get(thread)
    frame: FrameType | None = innermost
    while frame is not None and not is_own_code(frame):
        frame = frame.f_back
    frame = frame or innermost
    return "at an unknown location" if frame is None else frame_location(frame)
