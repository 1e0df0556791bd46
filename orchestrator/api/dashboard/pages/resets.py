"""A run of code reset to an event: what would become of everything, before it is done."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

import msgspec
from msgspec import Meta
from starlette.responses import Response

from orchestrator.api.context import LARGEST, Api
from orchestrator.api.dashboard.rendering import HTML, page
from orchestrator.api.dashboard.story import Sentence, story
from orchestrator.api.endpoints import Routes
from orchestrator.api.key_scope import RUN
from orchestrator.api.routes import code as code_routes
from orchestrator.api.routes import runs as run_routes
from orchestrator.domain.access import Scope
from orchestrator.errors import WrongState
from orchestrator.store.insights import RunDetail

routes = Routes("dashboard", "/ui/runs")


class ResetQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far the run would be repeated."""

    to: Annotated[int, Meta(ge=1, le=LARGEST)] | None = None


@routes.get("/{id}/reset", about=RUN, media_type=HTML, scope=Scope.OPERATE)
def preview_reset(api: Api, id: UUID, query: ResetQuery) -> Response:
    """Say what a reset would do, before it is done."""
    run = run_routes.find(api, id).run
    if query.to is None:
        return _shown(run)
    try:
        lines = code_routes.preview_reset(api, id, code_routes.ResetQuery(query.to)).lines
    except WrongState as error:
        return _shown(run, query.to, wrong=str(error), status=409)
    return _shown(run, query.to, lines, _sentence(api, id, query.to))


def _shown(
    run: RunDetail,
    to: int | None = None,
    lines: list[code_routes.ResetLine] | None = None,
    event: Sentence | None = None,
    wrong: str = "",
    status: int = 200,
) -> Response:
    return page("reset.html", status, run=run, to=to, lines=lines, event=event, wrong=wrong)


def _sentence(api: Api, id: UUID, number: int) -> Sentence | None:
    """Return what the last event says that would be kept; None if it says nothing to people."""
    events = msgspec.json.decode(api.backend.code.history(id.bytes).to_json(api.redaction_of_run(id)))["events"]
    return next((one for one in story(events[:number]) if one.number == number), None)
