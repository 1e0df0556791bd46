"""Search for tasks and runs; an id leads to its page at once."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.responses import Response

from orchestrator.api.context import Api
from orchestrator.api.dashboard.list_notes import run_notes, task_errors
from orchestrator.api.dashboard.rendering import go, page, pages
from orchestrator.api.dashboard.words import with_query
from orchestrator.api.key_scope import WITHIN
from orchestrator.api.routes import runs as run_routes
from orchestrator.api.routes import system
from orchestrator.domain.access import KeyScope
from orchestrator.sdk.values.display import as_json, call_of
from orchestrator.store.insights import RunDetail, TaskDetail
from orchestrator.store.insights.arguments import leaves, runs_by_argument, tasks_by_argument
from orchestrator.store.insights.lookup import Kind, begin_with, is_id
from orchestrator.store.insights.runs import runs_by_key

routes = pages("/ui/search")

_MOST = 20
"""Tasks, and runs, that are looked at for the value of an argument."""
_SHORTEST = 3
"""Characters of a value that is looked for: a shorter one stands everywhere."""


class TextQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The text to look for."""

    text: Annotated[str, Meta(max_length=500)] = ""


@routes.get("", about=WITHIN)
def search(api: Api, query: TextQuery, key_scope: KeyScope) -> Response:
    """Find tasks and runs."""
    text = query.text.strip()
    if not text:
        return page("search.html", text="", found=None)
    found = system.search(api, system.SearchQuery(text=text, limit=20), key_scope)
    by_id = [*(("runs", one.id) for one in found.runs_by_id), *(("tasks", one.id) for one in found.tasks_by_id)]
    if len(by_id) == 1 or (by_id and len({id for _, id in by_id}) == 1):
        kind, id = by_id[0]
        return go(f"/ui/{kind}/{id}")
    tasks, runs, gave_up = _by_argument(api, text, key_scope)
    notes, errors = run_notes(api, [*found.runs, *runs]), task_errors(api, [*found.failures, *tasks])
    return page(
        "search.html",
        text=text,
        found=found,
        notes=notes,
        errors=errors,
        by_argument=tasks,
        runs_by_argument=runs,
        gave_up=gave_up,
    )


def find_elsewhere(api: Api, kind: Kind, text: str, key_scope: KeyScope) -> str:
    """Return what leads to a task or run by a part of its id, or to a run by its key or an id of its own.

    That is its whole id, or a search if several fit; nothing if none does.
    """
    if not text.isprintable():
        return ""
    found = [run.id for run in api.read(runs_by_key, text, _MOST, key_scope.workflows)] if kind == "run" else []
    if not found and is_id(digits := text.lower().replace("-", "")):
        within = key_scope.queues if kind == "task" else key_scope.workflows
        found = [one.id for one in api.read(begin_with, kind, digits, _MOST, within)]
    return str(found[0]) if len(found) == 1 else with_query("/ui/search", {"text": text}) if found else ""


def _by_argument(api: Api, text: str, key_scope: KeyScope) -> tuple[list[TaskDetail], list[RunDetail], int]:
    """Return tasks and runs with a value that has the text in it, or is the number; and among how many, if not all.

    A value that is hidden is none: else one could find it out by searching for it.
    """
    if len(text) < _SHORTEST:
        return [], [], 0
    walked = api.read(tasks_by_argument, text, _MOST, key_scope.queues)
    walked_runs = api.read(runs_by_argument, text, _MOST, key_scope.workflows)
    tasks = [task for id in walked.ids if (task := api.backend.insights.show_task(id)) and _task_has(api, task, text)]
    runs = [run for id in walked_runs.ids if _has((run := run_routes.find(api, id).run).params, text)]
    return tasks, runs, max((one.looked_at for one in (walked, walked_runs) if one.is_part), default=0)


def _task_has(api: Api, task: TaskDetail, text: str) -> bool:
    return _has(api.redaction_of_task(task).call_shown(*call_of(task.payload)), text)


def _has(value: Any, text: str) -> bool:
    return any(text in leaf if isinstance(leaf, str) else text == str(leaf) for leaf in leaves(as_json(value)))
