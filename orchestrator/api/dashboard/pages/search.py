"""Search for tasks and runs; an id leads to its page at once."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.responses import Response

from orchestrator.api.context import Api
from orchestrator.api.dashboard.list_notes import run_notes, task_errors
from orchestrator.api.dashboard.rendering import go, page, pages
from orchestrator.api.key_scope import WITHIN
from orchestrator.api.routes import system
from orchestrator.domain.access import KeyScope

routes = pages("/ui/search")


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
    notes, errors = run_notes(api, found.runs), task_errors(api, found.failures)
    return page("search.html", text=text, found=found, notes=notes, errors=errors)
