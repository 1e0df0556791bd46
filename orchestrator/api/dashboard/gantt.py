"""When things ran: those of a run, each on a line of its own, and the waits and attempts of a task on one line."""

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

_MOST_ROWS = 200
_FEW_ROWS = 30
"""Rows that are in view before somebody opens the others."""
_TICKS = (
    *(unit * one for unit in (0.001, 0.01, 0.1, 1, 10) for one in (1, 2, 5)),
    *(60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 14_400, 21_600, 43_200),
)
"""Seconds between two marks of an axis."""


@dataclass(frozen=True)
class Row:
    """One step, task, timer or child, in hundredths of the time that is shown."""

    name: str
    state: str
    x: float
    width: float
    seconds: float
    is_critical: bool = False
    link: str = ""
    ready: float | None = None
    """Where it could have begun, if all it depends on had ended before: from there on it waited in its queue."""
    limited: float | None = None
    """Until where it waited for a limit before that."""
    tried: float | None = None
    """Where its first attempt began, if another one followed: from there on it waited for no slot."""
    is_group: bool = False
    """Whether it spans several steps, from the first start to the last end: nothing need have run all the time."""


@dataclass(frozen=True)
class Gantt:
    """All of it."""

    rows: list[Row]
    start: datetime
    end: datetime
    left_out: int

    @property
    def parts(self) -> tuple[list[tuple[int, Row]], list[tuple[int, Row]]]:
        """The rows that are in view, numbered, and those that are folded: of many, the first and all that failed."""
        rows = [*enumerate(self.rows, 1)]
        if len(rows) <= _FEW_ROWS + 5:
            return rows, []
        urgent = sorted(rows, key=lambda one: one[1].state != "failed")
        return sorted(urgent[:_FEW_ROWS], key=itemgetter(0)), sorted(urgent[_FEW_ROWS:], key=itemgetter(0))

    @property
    def seconds(self) -> float:
        """How long it took, or takes so far."""
        return (self.end - self.start).total_seconds()

    @property
    def is_retried(self) -> bool:
        return any(row.tried is not None for row in self.rows)

    @property
    def ticks(self) -> list[float]:
        """Seconds from the start for the marks of the axis: round ones, four to eight of them."""
        wanted = self.seconds / 5
        size = next((one for one in _TICKS if one >= wanted), None) or 86_400 * -(-wanted // 86_400)
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
    """Return the steps that have begun, in the order of their beginnings, and those whose tasks still wait.

    `limited` says until when steps waited for a limit. A group waited like its step that began first, of
    `firsts`; `ends` are those of all steps. `tried` says when the first attempts of steps began that had another.
    """
    start, end = run.started_at or run.created_at, run.ended_at or now
    there = [step for step in steps if step.started_at is not None or (step.state == "open" and not run.ended_at)]
    begun = sorted(there, key=lambda step: _begin(step, end))
    if begun:
        start = min(start, _begin(begun[0], end))
    ends = {step.name: step.ended_at for step in steps} | dict(ends)
    rows = []
    for step in begun[:_MOST_ROWS]:
        first = firsts.get(step.name, step)
        above = [ends.get(name) for name in first.depends_on]
        ready = max((one for one in above if one is not None), default=start)
        is_no_task = step.kind == "group" or step.started_at is None
        link = "" if is_no_task else f"/ui/runs/{run.id}?{urlencode({'step': step.name})}"
        begin = _begin(step, end)
        found = row(step.name, step.state, begin, step.ended_at or end, start, end, step.name in critical, link)
        if step.started_at is None:
            found = replace(found, x=100.0, width=0.0, seconds=max(0.0, (end - ready).total_seconds()))
        if (first_begin := tried.get(step.name)) is not None and first_begin < begin:
            begin = first_begin
            found = replace(found, tried=_place(begin, start, end))
        ready = min(ready, begin)
        until = limited.get(first.name)
        found = replace(found, ready=_place(ready, start, end), is_group=step.kind == "group")
        if until is not None and until > ready:
            found = replace(found, limited=_place(min(until, begin), start, end))
        rows.append(found)
    return Gantt(rows, start, end, max(0, len(begun) - _MOST_ROWS))


def _begin(step: StepView, otherwise: datetime) -> datetime:
    return step.started_at or otherwise


def _place(moment: datetime, start: datetime, end: datetime) -> float:
    """Return a moment in hundredths of the time that is shown."""
    whole = max((end - start).total_seconds(), 1e-6)
    return round(min(99.5, max(0.0, 100 * (moment - start).total_seconds() / whole)), 3)


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
    whole = max((end - start).total_seconds(), 1e-6)
    seconds = max(0.0, (stop - begin).total_seconds())
    x = _place(begin, start, end)
    width = round(min(max(100 * seconds / whole, 0.5), 100 - x), 3)
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
    """Return what a run of code has asked for, from when it did to when that had ended."""
    start, end = run.started_at or run.created_at, run.ended_at or now
    begun: dict[str, Mapping[str, Any]] = {}
    ended: dict[str, tuple[str, datetime]] = {}
    for event in events:
        if event["type"] in _BEGINS:
            begun[event["id"]] = event
        elif event["type"] in _ENDS:
            ended[event["id"]] = _ENDS[event["type"]], _at(event)
    shown = [*begun.items()][-_MOST_ROWS:]
    if shown:
        start = min(start, _at(shown[0][1])) if len(begun) <= _MOST_ROWS else _at(shown[0][1])
    rows = []
    for id, event in shown:
        state, stop = ended.get(id, ("open", end))
        front = _WORDS.get(event["type"])
        name = event.get("name") or event.get("workflow") or ""
        room = _BEGINS[event["type"]]
        link = f"/ui/{room}/{id}" if room else ""
        rows.append(row(f"{front} {name}".strip() if front else name, state, _at(event), stop, start, end, False, link))
    return Gantt(rows, start, end, max(0, len(begun) - _MOST_ROWS))


def _at(event: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(event["at"])


@dataclass(frozen=True)
class Stretch:
    """A part of the line, in hundredths of it."""

    kind: str
    """`wait`, `between` a failed or lost attempt and the next one, or how an attempt ended."""
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
    between: float = 0.0
    """Seconds between a failed or lost attempt and the next one: a backoff, or until somebody retried it."""

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
    spent = dict.fromkeys(("wait", "between", "ran"), 0.0)
    gap = "wait"
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
            spent[gap] += add(gap, reached, attempt.started_at)
        gap = "between" if attempt.outcome in ("failed", "lost") else "wait"
        spent["ran"] += add(attempt.outcome, attempt.started_at, stop, attempt.attempt)
        reached = max(reached, stop)
    if reached < end and task.ended_at is None and task.status != "running":
        spent[gap] += add(gap, reached, end)
    return Line(stretches, task.created_at, end, spent["wait"], spent["ran"], spent["between"])
