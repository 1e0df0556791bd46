"""Search for tasks and runs. A search for an id redirects to its page."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.responses import Response

from orchestrator.api.arguments import exact_search
from orchestrator.api.context import Api
from orchestrator.api.dashboard.list_notes import run_notes, task_calls, task_errors
from orchestrator.api.dashboard.rendering import page, pages, redirect
from orchestrator.api.dashboard.words import with_query
from orchestrator.api.key_scope import WITHIN
from orchestrator.api.routes import system
from orchestrator.domain.access import KeyScope
from orchestrator.store.insights.lookup import Kind, find_by_partial_id, is_id
from orchestrator.store.insights.runs import runs_by_key

routes = pages("/ui/search")

_MAX_RESULTS = 20
"""Tasks and runs that are listed of each kind."""


class TextQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The text to search for."""

    text: Annotated[str, Meta(max_length=500)] = ""


@routes.get("", about=WITHIN)
def search(api: Api, query: TextQuery, key_scope: KeyScope) -> Response:
    """Find tasks and runs."""
    text = query.text.strip()
    if not text:
        return page("search.html", text="", found=None)
    found = system.search(api, system.SearchQuery(text=text, limit=_MAX_RESULTS), key_scope)
    by_id = [*(("runs", one.id) for one in found.runs_by_id), *(("tasks", one.id) for one in found.tasks_by_id)]
    if len(by_id) == 1 or (by_id and len({id for _, id in by_id}) == 1):
        kind, id = by_id[0]
        return redirect(f"/ui/{kind}/{id}")
    notes = run_notes(api, [*found.runs, *found.exact_runs, *found.runs_by_argument])
    tasks = [*found.failures, *found.exact_tasks, *found.tasks_by_argument, *found.tasks]
    errors, calls = task_errors(api, tasks), task_calls(api, tasks)
    keys = {task.id: text for task in found.tasks if text.lower() not in f"{task.name}\n{task.step or ''}".lower()}
    notes_by_row: dict[str, Any] = {"notes": notes, "errors": errors, "calls": calls, "keys": keys}
    return page("search.html", text=text, whole=exact_search(text), found=found, **notes_by_row)


def find_match(api: Api, kind: Kind, text: str, key_scope: KeyScope) -> str:
    """Return the id of a task or run from a part of it, or of a run from its key or from an id of the user's own.

    If several match, return the URL of a search; if none does, an empty string.
    """
    if not text.isprintable():
        return ""
    found = [run.id for run in api.read(runs_by_key, text, _MAX_RESULTS, key_scope.workflows)] if kind == "run" else []
    if not found and is_id(digits := text.lower().replace("-", "")):
        within = key_scope.queues if kind == "task" else key_scope.workflows
        found = [one.id for one in api.read(find_by_partial_id, kind, digits, _MAX_RESULTS, within)]
    return str(found[0]) if len(found) == 1 else with_query("/ui/search", {"text": text}) if found else ""
