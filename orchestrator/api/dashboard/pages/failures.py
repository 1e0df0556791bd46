"""Failures, grouped by task and error: what fails, how often, and all of a group tried again."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Literal

import msgspec
from starlette.responses import Response

from orchestrator.api.context import Api
from orchestrator.api.dashboard.pages.overview import read_failures, read_hour
from orchestrator.api.dashboard.rendering import HTML, page
from orchestrator.api.endpoints import Routes
from orchestrator.api.key_scope import WITHIN
from orchestrator.domain.access import KeyScope
from orchestrator.store import insights

routes = Routes("dashboard", "/ui/failures")

_PARTS = 24
"""Bars of each group, over the time that is shown."""
RANGES = {"1h": timedelta(hours=1), "24h": timedelta(days=1), "7d": timedelta(days=7)}


class FailuresQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of when."""

    within: Literal["1h", "24h", "7d"] = "24h"


@routes.get("", about=WITHIN, media_type=HTML)
def list_failures(api: Api, query: FailuresQuery, key_scope: KeyScope) -> Response:
    """Show failed tasks by task and error."""
    now = datetime.now(UTC)
    since = now - RANGES[query.within]
    failures = read_failures(api, key_scope, RANGES[query.within])

    def read_spread() -> dict[insights.GroupKey, list[int]]:
        with api.reading() as connection:
            return insights.spread_of_failures(connection, since, now, _PARTS, key_scope.queues)

    return page(
        "failures.html",
        groups=failures.groups,
        looked_at=failures.looked_at,
        within=query.within,
        ranges=list(RANGES),
        since=since.isoformat(timespec="seconds"),
        hour=read_hour(api, key_scope),
        spread=api.recent.get(("spread", key_scope, query.within), 5.0, read_spread),
    )
