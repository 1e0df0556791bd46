"""What tells tasks and runs of a list apart: errors, parameters, fire times, ids of their own. One query for a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from typing import Any, Literal, TypeVar
from uuid import UUID

import msgspec

from orchestrator.api.arguments import named_call
from orchestrator.api.context import Api
from orchestrator.api.dashboard.rendering import visitor
from orchestrator.api.dashboard.words import call
from orchestrator.domain.access import KeyScope
from orchestrator.domain.dag.composed import is_composed
from orchestrator.domain.fleet.announced import tasks_among, workflows_among
from orchestrator.domain.states import RunState, TaskState
from orchestrator.domain.tasks.parameters import Parameter
from orchestrator.sdk.values.display import as_json, call_of, origin_of
from orchestrator.store.fleet import parameters_of_all
from orchestrator.store.insights import (
    RunningTask,
    RunNote,
    RunView,
    TaskFilter,
    TaskView,
    errors_of_runs,
    errors_of_tasks,
    list_queues,
    notes_of_runs,
    page_of_tasks,
    running_tasks,
)
from orchestrator.store.insights.arguments import calls_of_tasks
from orchestrator.store.insights.lookup import kinds_of_names
from orchestrator.store.insights.runs import workflows_with_runs
from orchestrator.transport.connection import connect
from orchestrator.transport.journal import LOSSES, read_marks

_MOST_NAMES = 8
_LONGEST_CALL = 2_000
"""Bytes of arguments that a list shows."""
_PATIENCE = 0.5
"""Seconds for which a page waits for Redis: it has the rest without."""
SPANS = {"15m": timedelta(minutes=15), "1h": timedelta(hours=1), "24h": timedelta(days=1), "7d": timedelta(days=7)}
Span = Literal["", "15m", "1h", "24h", "7d"]
"""How far back a list goes; nothing: to where `since` and `until` say."""
Q = TypeVar("Q", bound=msgspec.Struct)


def within_span(query: Q) -> Q:
    """Return a query that begins where its span does, if it has one."""
    span: str = getattr(query, "span")  # noqa: B009
    return msgspec.structs.replace(query, since=datetime.now(UTC) - SPANS[span], until=None) if span else query


def check_times(query: msgspec.Struct) -> None:
    """Refuse a list that ends before it begins."""
    span, since, until = (getattr(query, name) for name in ("span", "since", "until"))
    if not span and since and until and since > until:
        raise ValueError(f"From {since:%Y-%m-%d %H:%M} is later than To {until:%Y-%m-%d %H:%M}: give an earlier From.")


def given(query: msgspec.Struct) -> dict[str, Any]:
    """Return what a query of a list asks for, as its address says it: a span, not its times; and of any page."""
    left_out = {"cursor", "limit"} | ({"since", "until"} if getattr(query, "span", "") else set())
    return {
        field.encode_name: "true" if value is True else value
        for field in msgspec.structs.fields(query)
        if field.name not in left_out and (value := getattr(query, field.name)) != field.default
    }


def task_errors(api: Api, tasks: Sequence[TaskView]) -> dict[UUID, str]:
    return api.read_list(errors_of_tasks, [task.id for task in tasks if task.status == "failed"])


def progress_of(api: Api, tasks: Iterable[TaskView]) -> dict[UUID, float]:
    """Return how far running tasks say they have come, as fractions; where Redis is away, of none."""
    return _progress_of(api, [task for task in tasks if task.status == TaskState.RUNNING])


def progress_of_runs(api: Api, runs: Iterable[RunView]) -> dict[UUID, float]:
    """Return how much of the running tasks of runs is done, as a number of tasks."""
    ids = [run.id.bytes for run in runs if run.status == RunState.RUNNING]
    found = api.read(running_tasks, ids) if ids else []
    fractions = _progress_of(api, found)
    done: dict[UUID, float] = {}
    for task in found:
        done[task.run_id] = done.get(task.run_id, 0.0) + fractions.get(task.id, 0.0)
    return done


def _progress_of(api: Api, tasks: Iterable[TaskView | RunningTask]) -> dict[UUID, float]:
    running = {task.id.bytes: task for task in tasks}
    if not running:
        return {}
    try:
        with closing(connect(api.settings.require_redis(), timeout=_PATIENCE)) as redis:
            marks = read_marks(redis, api.backend.connections.keys, [*running])
    except LOSSES:
        return {}
    return {
        running[id].id: min(1.0, mark.fraction)
        for id, mark in marks.items()
        if mark and mark.attempt == running[id].attempt
    }


def run_notes(api: Api, runs: Sequence[RunView]) -> dict[UUID, tuple[RunNote, str]]:
    """Return notes of runs, and their parameters in a line.

    Values are shown only where nothing is declared as secret, neither by the settings nor by a step: to find out what
    is a secret's copy takes a look at all relatives of a run, which only the page of the run does.
    """
    notes = api.read_list(notes_of_runs, [run.id for run in runs])
    for id, error in api.read_list(errors_of_runs, [run.id for run in runs if run.status == "failed"]).items():
        notes[id] = notes[id]._replace(error=error)
    of_code = {run.workflow for run in runs if run.workflow and run.id in notes and notes[run.id].start}
    names = api.read_list(parameters_of_all, of_code)
    return {run.id: (notes[run.id], _line(api, run, notes[run.id], names)) for run in runs if run.id in notes}


def _line(api: Api, run: RunView, note: RunNote, names: Mapping[str, Sequence[Parameter]]) -> str:
    if is_composed(run.workflow):
        return ""
    given = note.params or {}
    if note.start:
        given = as_json(named_call(names, run.workflow, *call_of(note.start)))
    first = dict([*given.items()][:_MOST_NAMES])
    if note.is_plain and not api.redaction:
        return _in_line(first)
    return "parameters " + ", ".join(first) if first else ""


def _in_line(given: Mapping[str, Any]) -> str:
    places = [value for name, value in given.items() if name.startswith("@")]
    return call(places, {name: value for name, value in given.items() if not name.startswith("@")})


def task_calls(api: Api, tasks: Sequence[TaskView]) -> dict[UUID, tuple[str, str]]:
    """Return which step tasks are, and what they were given, in a line; values as in lists of runs."""
    given = api.read_list(calls_of_tasks, [task.id for task in tasks], _LONGEST_CALL)
    names = api.read_list(parameters_of_all, {task.name for task in tasks})
    runs = {task.run_id for task in tasks if task.run_id and task.id in given and given[task.id].is_plain_in_run}
    plain = {id for id, note in api.read_list(notes_of_runs, [*runs]).items() if note.is_plain}
    found: dict[UUID, tuple[str, str]] = {}
    for task in tasks:
        one, origin, line = given.get(task.id), {}, ""
        if one is not None and one.payload is not None:
            origin = origin_of(one.payload)
            if not api.redaction and (one.is_plain or (one.is_plain_in_run and task.run_id in plain)):
                values = as_json(named_call(names, task.name, *call_of(one.payload)))
                line = _in_line(dict([*values.items()][:_MOST_NAMES]))
        step = f"{task.step}[{task.position}]" if task.step and origin.get("count") is not None else task.step or ""
        workflow = origin.get("workflow")
        is_named = step and workflow and not is_composed(workflow) and visitor().key_scope.has_workflow(workflow)
        found[task.id] = f"{step} of {workflow}" if is_named else step, line
    return found


_MOST = 10
_MOST_TASKS = 500
"""Tasks of like names that are looked at."""


class Near(msgspec.Struct, frozen=True):
    """The filter of a list that no name fits, and names that it may mean."""

    field: str
    noun: str
    text: str
    names: list[str]
    is_part: bool
    """The names contain the text; else they are spelled like it."""


def near_task_filters(api: Api, name: str | None, queue: str | None, key_scope: KeyScope) -> list[Near]:
    found = [_near("name", "task", name, _task_names(api, name, key_scope))] if name else []
    if queue:
        known = (one.queue for one in api.read_list(list_queues, key_scope.queues))
        found.append(_near("queue", "queue", queue, known))
    return [one for one in found if one is not None]


def near_run_filters(api: Api, workflow: str | None, key_scope: KeyScope) -> list[Near]:
    """Return which of the filters of an empty list of runs name nothing."""
    known = api.read_list(workflows_with_runs, key_scope.workflows) if workflow else []
    found = _near("workflow", "workflow", workflow, known) if workflow else None
    return [] if found is None else [found]


def _task_names(api: Api, text: str, key_scope: KeyScope) -> set[str]:
    """Return names of recent tasks that contain a text, and of those that workers have: not for a bound key."""
    wanted = TaskFilter(part=text, within=key_scope.queues)
    found = {task.name for task in api.read_list(page_of_tasks, wanted, limit=_MOST_TASKS).tasks}
    if not key_scope.is_bound:
        known = api.read_list(kinds_of_names)
        found |= {*tasks_among(known), *workflows_among(known)}
    return found


def _near(field: str, noun: str, text: str, known: Iterable[str]) -> Near | None:
    names = {*known}
    if text in names:
        return None
    parts = sorted((name for name in names if text.lower() in name.lower()), key=lambda name: (len(name), name))
    return Near(field, noun, text, parts[:_MOST] or get_close_matches(text, names, n=3), bool(parts))
