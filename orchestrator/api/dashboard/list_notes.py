"""Notes that distinguish tasks and runs in lists: errors, parameters, fire times. One query serves a page."""

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
from orchestrator.transport.journal import LOSSES, read_all_progress

_MAX_NAMES = 8
_MAX_CALL_LENGTH = 2_000
"""Bytes of arguments that a list shows, at most."""
_REDIS_TIMEOUT = 0.5
"""Seconds for which a page waits for Redis; without an answer it omits the progress."""
SPANS = {"15m": timedelta(minutes=15), "1h": timedelta(hours=1), "24h": timedelta(days=1), "7d": timedelta(days=7)}
Span = Literal["", "15m", "1h", "24h", "7d"]
"""The period of a list; empty: from `since` to `until`."""
Q = TypeVar("Q", bound=msgspec.Struct)


def within_span(query: Q) -> Q:
    """Return a query with `since` set from its span, if it has one."""
    span: str = getattr(query, "span")  # noqa: B009
    return msgspec.structs.replace(query, since=datetime.now(UTC) - SPANS[span], until=None) if span else query


def check_times(query: msgspec.Struct) -> None:
    """Reject a query whose `since` is after its `until`."""
    span, since, until = (getattr(query, name) for name in ("span", "since", "until"))
    if not span and since and until and since > until:
        raise ValueError(
            f"From {since:%Y-%m-%d %H:%M} is later than To {until:%Y-%m-%d %H:%M}: choose an earlier From."
        )


def active_filters(query: msgspec.Struct) -> dict[str, Any]:
    """Return the filters of a list's query as URL parameters: a span instead of its times, and no cursor or limit."""
    omitted = {"cursor", "limit"} | ({"since", "until"} if getattr(query, "span", "") else set())
    return {
        field.encode_name: "true" if value is True else value
        for field in msgspec.structs.fields(query)
        if field.name not in omitted and (value := getattr(query, field.name)) != field.default
    }


def task_errors(api: Api, tasks: Sequence[TaskView]) -> dict[UUID, str]:
    return api.read_list(errors_of_tasks, [task.id for task in tasks if task.status == "failed"])


def progress_of(api: Api, tasks: Iterable[TaskView]) -> dict[UUID, float]:
    """Return the progress of running tasks as fractions; empty if Redis is down."""
    return _progress_of(api, [task for task in tasks if task.status == TaskState.RUNNING])


def progress_of_runs(api: Api, runs: Iterable[RunView]) -> dict[UUID, float]:
    """Return the progress of the running tasks of each run, as a number of tasks."""
    ids = [run.id.bytes for run in runs if run.status == RunState.RUNNING]
    running = api.read(running_tasks, ids) if ids else []
    fractions = _progress_of(api, running)
    done: dict[UUID, float] = {}
    for task in running:
        done[task.run_id] = done.get(task.run_id, 0.0) + fractions.get(task.id, 0.0)
    return done


def _progress_of(api: Api, tasks: Iterable[TaskView | RunningTask]) -> dict[UUID, float]:
    running = {task.id.bytes: task for task in tasks}
    if not running:
        return {}
    try:
        with closing(connect(api.settings.require_redis(), timeout=_REDIS_TIMEOUT)) as redis:
            marks = read_all_progress(redis, api.backend.connections.keys, [*running])
    except LOSSES:
        return {}
    return {
        running[id].id: min(1.0, mark.fraction)
        for id, mark in marks.items()
        if mark and mark.attempt == running[id].attempt
    }


def run_notes(api: Api, runs: Sequence[RunView]) -> dict[UUID, tuple[RunNote, str]]:
    """Return notes of runs, with their parameters in one line.

    Values are shown only if neither the settings nor a step declares secrets. Finding copies of secrets would take a
    read of all related tasks and runs, which only the page of a run does.
    """
    notes = api.read_list(notes_of_runs, [run.id for run in runs])
    for id, error in api.read_list(errors_of_runs, [run.id for run in runs if run.status == "failed"]).items():
        notes[id] = notes[id]._replace(error=error)
    of_code = {run.workflow for run in runs if run.workflow and run.id in notes and notes[run.id].start}
    names = api.read_list(parameters_of_all, of_code)
    return {run.id: (notes[run.id], _params_in_line(api, run, notes[run.id], names)) for run in runs if run.id in notes}


def _params_in_line(api: Api, run: RunView, note: RunNote, names: Mapping[str, Sequence[Parameter]]) -> str:
    if is_composed(run.workflow):
        return ""
    params = note.params or {}
    if note.start:
        params = as_json(named_call(names, run.workflow, *call_of(note.start)))
    first = dict([*params.items()][:_MAX_NAMES])
    if note.is_plain and not api.redaction:
        return _call_in_line(first)
    return "parameters " + ", ".join(first) if first else ""


def _call_in_line(arguments: Mapping[str, Any]) -> str:
    positional = [value for name, value in arguments.items() if name.startswith("@")]
    return call(positional, {name: value for name, value in arguments.items() if not name.startswith("@")})


def task_calls(api: Api, tasks: Sequence[TaskView]) -> dict[UUID, tuple[str, str]]:
    """Return the step of each task, and its arguments in one line; values as in lists of runs."""
    calls = api.read_list(calls_of_tasks, [task.id for task in tasks], _MAX_CALL_LENGTH)
    names = api.read_list(parameters_of_all, {task.name for task in tasks})
    runs = {task.run_id for task in tasks if task.run_id and task.id in calls and calls[task.id].is_plain_in_run}
    plain = {id for id, note in api.read_list(notes_of_runs, [*runs]).items() if note.is_plain}
    notes: dict[UUID, tuple[str, str]] = {}
    for task in tasks:
        stored_call, origin, line = calls.get(task.id), {}, ""
        if stored_call is not None and stored_call.payload is not None:
            origin = origin_of(stored_call.payload)
            if not api.redaction and (stored_call.is_plain or (stored_call.is_plain_in_run and task.run_id in plain)):
                values = as_json(named_call(names, task.name, *call_of(stored_call.payload)))
                line = _call_in_line(dict([*values.items()][:_MAX_NAMES]))
        step = f"{task.step}[{task.position}]" if task.step and origin.get("count") is not None else task.step or ""
        workflow = origin.get("workflow")
        is_named = step and workflow and not is_composed(workflow) and visitor().key_scope.has_workflow(workflow)
        notes[task.id] = f"{step} of {workflow}" if is_named else step, line
    return notes


_MAX_SUGGESTIONS = 10
_MAX_TASKS = 500
"""Tasks with similar names that are read, at most."""


class Suggestion(msgspec.Struct, frozen=True):
    """A filter that matches no name, and similar names."""

    field: str
    noun: str
    text: str
    names: list[str]
    is_part: bool
    """Whether the names contain the text; otherwise their spelling is similar."""


def suggest_task_filters(api: Api, name: str | None, queue: str | None, key_scope: KeyScope) -> list[Suggestion]:
    found = [_suggest("name", "task", name, _task_names(api, name, key_scope))] if name else []
    if queue:
        names = (suggestion.queue for suggestion in api.read_list(list_queues, key_scope.queues))
        found.append(_suggest("queue", "queue", queue, names))
    return [suggestion for suggestion in found if suggestion is not None]


def suggest_run_filters(api: Api, workflow: str | None, key_scope: KeyScope) -> list[Suggestion]:
    """Return the filters of an empty list of runs that match no name."""
    names = api.read_list(workflows_with_runs, key_scope.workflows) if workflow else []
    found = _suggest("workflow", "workflow", workflow, names) if workflow else None
    return [] if found is None else [found]


def _task_names(api: Api, text: str, key_scope: KeyScope) -> set[str]:
    """Return names of recent tasks that contain a text, and, unless the key is bound, registered names."""
    task_filter = TaskFilter(part=text, within=key_scope.queues)
    found = {task.name for task in api.read_list(page_of_tasks, task_filter, limit=_MAX_TASKS).tasks}
    if not key_scope.is_bound:
        kinds = api.read_list(kinds_of_names)
        found |= {*tasks_among(kinds), *workflows_among(kinds)}
    return found


def _suggest(field: str, noun: str, text: str, candidates: Iterable[str]) -> Suggestion | None:
    names = {*candidates}
    if text in names:
        return None
    parts = sorted((name for name in names if text.lower() in name.lower()), key=lambda name: (len(name), name))
    return Suggestion(field, noun, text, parts[:_MAX_SUGGESTIONS] or get_close_matches(text, names, n=3), bool(parts))
