"""A range of the past to be filled in: which fires there are, before any of their runs is started."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.responses import Response

from orchestrator.api.context import LARGEST, Api
from orchestrator.api.dashboard.rendering import HTML, page
from orchestrator.api.endpoints import Routes
from orchestrator.api.key_scope import WORKFLOW
from orchestrator.domain.access import Scope
from orchestrator.errors import InvalidWorkflow

routes = Routes("dashboard", "/ui/schedules")

_MOST_SHOWN = 10
"""Fires from each end of the range."""


class BackfillQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The range, and how it would be filled in."""

    start: str | None = None
    end: str | None = None
    concurrency: Annotated[int, Meta(ge=1, le=LARGEST)] | None = None
    again: bool = False


@dataclass(frozen=True, kw_only=True)
class Preview:
    """What a backfill would do."""

    first: list[tuple[datetime, bool]]
    """Fires, in the zone of their schedule, and of each whether it would get a run."""
    left_out: int
    last: list[tuple[datetime, bool]]
    total: int
    missing: int
    """Fires that would get a run."""
    concurrency: int


@routes.get("/{workflow}/{name}/backfills", about=WORKFLOW, media_type=HTML, scope=Scope.OPERATE)
def preview_backfill(api: Api, workflow: str, name: str, query: BackfillQuery) -> Response:
    """Say which runs would be started, before they are."""
    stored = api.backend.schedules.find(f"{workflow}/{name}")
    found, wrong = None, ""
    if query.start is not None:
        try:
            found = _preview(api, stored.key, query)
        except InvalidWorkflow as error:
            wrong = str(error)
    return page("backfill.html", 422 if wrong else 200, stored=stored, query=query, found=found, wrong=wrong)


def _preview(api: Api, key: str, query: BackfillQuery) -> Preview:
    asked = query.start or "", query.end, query.concurrency, query.again
    new, fires = api.backend.schedules.preview_backfill(key, *asked)
    shown = [*fires[:_MOST_SHOWN], *fires[_MOST_SHOWN:][-_MOST_SHOWN:]]
    local = [(fire.astimezone(new.schedule.zone), is_missing) for fire, is_missing in shown]
    return Preview(
        first=local[:_MOST_SHOWN],
        left_out=len(fires) - len(shown),
        last=local[_MOST_SHOWN:],
        total=len(fires),
        missing=sum(is_missing for _, is_missing in fires),
        concurrency=new.concurrency,
    )
