"""When a task waited and when it ran, on one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from orchestrator.monitoring.times import present
from orchestrator.store.insights import AttemptView, TaskView


@dataclass(frozen=True)
class Stretch:
    """A part of the line, in hundredths of it."""

    kind: str
    """`wait`, or how an attempt ended."""
    x: float
    width: float
    seconds: float
    attempt: int | None = None


@dataclass(frozen=True)
class Line:
    """All of it."""

    stretches: list[Stretch]
    start: datetime
    end: datetime
    waited: float
    ran: float

    @property
    def seconds(self) -> float:
        """How long it took, or takes so far."""
        return (self.end - self.start).total_seconds()


def timeline(task: TaskView, attempts: Sequence[AttemptView], now: datetime | None = None) -> Line:
    """Return the waits and runs of a task, from when it was enqueued to its end or to now."""
    now = now or present()
    end = max(task.ended_at or now, task.created_at)
    whole = max((end - task.created_at).total_seconds(), 1e-6)
    stretches: list[Stretch] = []
    waited = ran = 0.0
    reached = task.created_at

    def add(kind: str, start: datetime, stop: datetime, attempt: int | None = None) -> float:
        seconds = max(0.0, (stop - start).total_seconds())
        offset = 100 * max(0.0, (start - task.created_at).total_seconds()) / whole
        stretches.append(Stretch(kind, round(offset, 3), round(max(100 * seconds / whole, 0.4), 3), seconds, attempt))
        return seconds

    for attempt in attempts:
        if attempt.started_at is None:
            continue
        stop = min(attempt.ended_at or now, end)
        if attempt.started_at > reached:
            waited += add("wait", reached, attempt.started_at)
        ran += add(attempt.outcome, attempt.started_at, stop, attempt.attempt)
        reached = max(reached, stop)
    if reached < end and task.ended_at is None and task.status != "running":
        waited += add("wait", reached, end)
    return Line(stretches, task.created_at, end, waited, ran)
