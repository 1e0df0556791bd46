"""The schedules that an application declares, in memory: when the next fires, and what it starts."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from orchestrator.domain.dag.expression import parse_template
from orchestrator.domain.schedules.schedule import Schedule, delay_of, fire_text, from_data, next_fire
from orchestrator.domain.states import ENDED_TASK_STATES
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.sdk.dag.schedule_fields import checked_schedule
from orchestrator.sdk.schedule_declarations import CodeDeclaration, TaskDeclaration, plain_times
from orchestrator.sdk.tasks.task import Task
from orchestrator.testing.records import TestedTask


@dataclass
class Fire:
    """A fire of a schedule."""

    target: Task[..., Any] | CodeWorkflow[..., Any]
    params: dict[str, Any]
    cancels: bool
    """Cancel what is still open of it."""
    still_open: list[TestedTask]
    """Tasks of the schedule that have not ended; add the one that is started now."""


class MemorySchedules:
    """Says when declared schedules fire."""

    def __init__(self, declared: Iterable[TaskDeclaration | CodeDeclaration], now: float) -> None:
        self._due: list[tuple[float, int, TaskDeclaration | CodeDeclaration]] = []
        self._open: dict[int, list[TestedTask]] = {}
        """Of each schedule, by its position: tasks that had not ended when it fired last."""
        self._queued: dict[int, deque[Fire]] = {}
        """Of each schedule, by its position: fires that wait for these tasks (`overlap="queue"`)."""
        for position, one in enumerate(declared):
            self._plan(one, position, now)

    @property
    def next_fire(self) -> float | None:
        """When the next schedule fires."""
        return self._due[0][0] if self._due else None

    def take(self) -> Fire | None:
        """Return the next fire, and plan the one after it; None if it is skipped or waits."""
        due, position, declared = heapq.heappop(self._due)
        overlap = self._plan(declared, position, due).overlap
        still_open = [one for one in self._open.get(position, ()) if one.state not in ENDED_TASK_STATES]
        if still_open and overlap == "skip":
            return None
        self._open[position] = still_open
        waiting = self._queued.setdefault(position, deque())
        target = declared.task if isinstance(declared, TaskDeclaration) else declared.workflow
        about = {"workflow": declared.target_name, "fire_time": fire_text(datetime.fromtimestamp(due, UTC))}
        params = parse_template(dict(declared.params)).render({"run": about})
        fire = Fire(target, params, overlap == "cancel_previous", still_open)
        if overlap != "queue" or not (still_open or waiting):
            return fire
        waiting.append(fire)
        return None

    def take_queued(self) -> Fire | None:
        """Return a fire that has waited for the one before it, which has ended now."""
        for position, waiting in self._queued.items():
            if waiting and all(one.state in ENDED_TASK_STATES for one in self._open[position]):
                fire = waiting.popleft()
                self._open[position] = fire.still_open = []
                return fire
        return None

    def _plan(self, declared: TaskDeclaration | CodeDeclaration, position: int, after: float) -> Schedule:
        schedule = from_data(checked_schedule(plain_times(declared.times)))
        fire = None if schedule.paused else next_fire(schedule, datetime.fromtimestamp(after, UTC))
        if fire is not None:
            due = (fire + delay_of(schedule, declared.key)).timestamp()
            heapq.heappush(self._due, (due, position, declared))
        return schedule
