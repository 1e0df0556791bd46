"""Gantt charts: one row for each step of a run, and one line for the waits and attempts of a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from operator import itemgetter
from types import MappingProxyType
from typing import Any
from urllib.parse import urlencode

from orchestrator.monitoring.times import present
from orchestrator.store.insights import AttemptView, RunView, StepView, TaskView

_MAX_ROWS = 200
_VISIBLE_ROWS = 30
"""Rows that are visible before the others are expanded."""
_TICKS = (
    *(unit * one for unit in (0.001, 0.01, 0.1, 1, 10) for one in (1, 2, 5)),
    *(60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 14_400, 21_600, 43_200),
)
"""Possible distances of axis marks, in seconds."""


@dataclass(frozen=True)
class Row:
    """A row for a step, task, timer or child run. Positions are percentages of the chart's duration."""

    name: str
    state: str
    x: float
    width: float
    seconds: float
    is_critical: bool = False
    link: str = ""
    ready: float | None = None
    """The position at which all dependencies had ended: from there on the step waited in its queue."""
    limited: float | None = None
    """The position until which the step waited for a limit."""
    tried: float | None = None
    """The start of the first attempt, if there were several: from there on the step did not wait for a slot."""
    is_group: bool = False
    """Whether the row is a group of steps, from the first start to the last end; there may be gaps."""


@dataclass(frozen=True)
class Gantt:
    """A Gantt chart."""

    rows: list[Row]
    start: datetime
    end: datetime
    left_out: int

    @property
    def parts(self) -> tuple[list[tuple[int, Row]], list[tuple[int, Row]]]:
        """The visible rows with their numbers, and the collapsed ones. In long charts, failed rows stay visible."""
        rows = [*enumerate(self.rows, 1)]
        if len(rows) <= _VISIBLE_ROWS + 5:
            return rows, []
        urgent = sorted(rows, key=lambda numbered: numbered[1].state != "failed")
        return sorted(urgent[:_VISIBLE_ROWS], key=itemgetter(0)), sorted(urgent[_VISIBLE_ROWS:], key=itemgetter(0))

    @property
    def seconds(self) -> float:
        """The duration so far."""
        return (self.end - self.start).total_seconds()

    @property
    def is_retried(self) -> bool:
        return any(row.tried is not None for row in self.rows)

    @property
    def ticks(self) -> list[float]:
        """Positions of the axis marks, in seconds from the start: four to eight round numbers."""
        target = self.seconds / 5
        size = next((tick for tick in _TICKS if tick >= target), None) or 86_400 * -(-target // 86_400)
        return [size * number for number in range(int(self.seconds / size) + 1)] if self.seconds > 0 else [0.0]


def gantt_of_steps(
    run: RunView,
    steps: Sequence[StepView],
    critical: frozenset[str],
    now: datetime,
    limited: Mapping[str, datetime] = MappingProxyType({}),
    firsts: Mapping[str, StepView] = MappingProxyType({}),
    ends: Mapping[str, datetime | None] = MappingProxyType({}),
    tried: Mapping[str, datetime] = MappingProxyType({}),
) -> Gantt:
    """Return the chart of a run's steps in the order of their starts, including steps whose tasks wait.

    `limited` has the times until which steps waited for a limit. `firsts` has the first step of each group, which
    stands for the waits of the group. `ends` has the end of every step, `tried` the start of the first of several
    attempts.
    """
    start, end = run.started_at or run.created_at, run.ended_at or now
    visible = [step for step in steps if step.started_at is not None or (step.state == "open" and not run.ended_at)]
    started = sorted(visible, key=lambda step: _begin(step, end))
    if started:
        start = min(start, _begin(started[0], end))
    ends = {step.name: step.ended_at for step in steps} | dict(ends)
    rows = []
    for step in started[:_MAX_ROWS]:
        first = firsts.get(step.name, step)
        parent_ends = [ends.get(name) for name in first.depends_on]
        ready = max((parent_end for parent_end in parent_ends if parent_end is not None), default=start)
        has_no_task = step.kind == "group" or step.started_at is None
        link = "" if has_no_task else f"/ui/runs/{run.id}?{urlencode({'step': step.name})}"
        begin = _begin(step, end)
        chart_row = row(step.name, step.state, begin, step.ended_at or end, start, end, step.name in critical, link)
        if step.started_at is None:
            chart_row = replace(chart_row, x=100.0, width=0.0, seconds=max(0.0, (end - ready).total_seconds()))
        if (first_begin := tried.get(step.name)) is not None and first_begin < begin:
            begin = first_begin
            chart_row = replace(chart_row, tried=_percent(begin, start, end))
        ready = min(ready, begin)
        until = limited.get(first.name)
        chart_row = replace(chart_row, ready=_percent(ready, start, end), is_group=step.kind == "group")
        if until is not None and until > ready:
            chart_row = replace(chart_row, limited=_percent(min(until, begin), start, end))
        rows.append(chart_row)
    return Gantt(rows, start, end, max(0, len(started) - _MAX_ROWS))


def _begin(step: StepView, default: datetime) -> datetime:
    return step.started_at or default


def _percent(moment: datetime, start: datetime, end: datetime) -> float:
    """Return a moment as a percentage of the chart's duration."""
    total = max((end - start).total_seconds(), 1e-6)
    return round(min(99.5, max(0.0, 100 * (moment - start).total_seconds() / total)), 3)


def row(
    name: str,
    state: str,
    begin: datetime,
    stop: datetime,
    start: datetime,
    end: datetime,
    is_critical: bool = False,
    link: str = "",
) -> Row:
    total = max((end - start).total_seconds(), 1e-6)
    seconds = max(0.0, (stop - begin).total_seconds())
    x = _percent(begin, start, end)
    width = round(min(max(100 * seconds / total, 0.5), 100 - x), 3)
    return Row(name, state, x, width, seconds, is_critical, link)


_BEGINS = {"task_scheduled": "tasks", "timer_started": "", "promise_created": "", "child_started": "runs"}
_ENDS = {
    "task_completed": "success",
    "task_failed": "failed",
    "task_cancelled": "cancelled",
    "timer_fired": "success",
    "timer_cancelled": "cancelled",
    "promise_resolved": "success",
    "promise_rejected": "failed",
    "promise_cancelled": "cancelled",
    "child_completed": "success",
    "child_failed": "failed",
    "child_cancelled": "cancelled",
}
_WORDS = {"timer_started": "sleep", "promise_created": "promise"}


def gantt_of_events(run: RunView, events: Sequence[Mapping[str, Any]], now: datetime) -> Gantt:
    """Return the chart of the tasks, timers, promises and children of a workflow as code."""
    start, end = run.started_at or run.created_at, run.ended_at or now
    started: dict[str, Mapping[str, Any]] = {}
    ended: dict[str, tuple[str, datetime]] = {}
    for event in events:
        if event["type"] in _BEGINS:
            started[event["id"]] = event
        elif event["type"] in _ENDS:
            ended[event["id"]] = _ENDS[event["type"]], _at(event)
    displayed = [*started.items()][-_MAX_ROWS:]
    if displayed:
        start = min(start, _at(displayed[0][1])) if len(started) <= _MAX_ROWS else _at(displayed[0][1])
    rows = []
    for id, event in displayed:
        state, stop = ended.get(id, ("open", end))
        label = _WORDS.get(event["type"])
        name = event.get("name") or event.get("workflow") or ""
        path = _BEGINS[event["type"]]
        link = f"/ui/{path}/{id}" if path else ""
        rows.append(row(f"{label} {name}".strip() if label else name, state, _at(event), stop, start, end, False, link))
    return Gantt(rows, start, end, max(0, len(started) - _MAX_ROWS))


def _at(event: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(event["at"])


@dataclass(frozen=True)
class Stretch:
    """A part of a task's line. Positions are percentages."""

    kind: str
    """`wait`, `between` (a failed or lost attempt and the next one), or the outcome of an attempt."""
    x: float
    width: float
    seconds: float
    attempt: int | None = None


@dataclass(frozen=True)
class Line:
    """The waits and attempts of a task."""

    stretches: list[Stretch]
    start: datetime
    end: datetime
    waited: float
    ran: float
    between: float = 0.0
    """Seconds between failed or lost attempts and the next ones: backoff, or until a manual retry."""

    @property
    def seconds(self) -> float:
        """The duration so far."""
        return (self.end - self.start).total_seconds()


def timeline(task: TaskView, attempts: Sequence[AttemptView], now: datetime | None = None) -> Line:
    """Return the waits and attempts of a task, from its creation to its end or now."""
    now = now or present()
    end = max(task.ended_at or now, task.created_at)
    total = max((end - task.created_at).total_seconds(), 1e-6)
    stretches: list[Stretch] = []
    spent = dict.fromkeys(("wait", "between", "ran"), 0.0)
    gap = "wait"
    reached = task.created_at

    def add(kind: str, start: datetime, stop: datetime, attempt: int | None = None) -> float:
        seconds = max(0.0, (stop - start).total_seconds())
        offset = 100 * max(0.0, (start - task.created_at).total_seconds()) / total
        stretches.append(Stretch(kind, round(offset, 3), round(max(100 * seconds / total, 0.4), 3), seconds, attempt))
        return seconds

    for attempt in attempts:
        if attempt.started_at is None:
            continue
        stop = min(attempt.ended_at or now, end)
        if attempt.started_at > reached:
            spent[gap] += add(gap, reached, attempt.started_at)
        gap = "between" if attempt.outcome in ("failed", "lost") else "wait"
        spent["ran"] += add(attempt.outcome, attempt.started_at, stop, attempt.attempt)
        reached = max(reached, stop)
    if reached < end and task.ended_at is None and task.status != "running":
        spent[gap] += add(gap, reached, end)
    return Line(stretches, task.created_at, end, spent["wait"], spent["ran"], spent["between"])
