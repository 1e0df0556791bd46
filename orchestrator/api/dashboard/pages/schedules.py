"""Schedules: when they fire next, how their last runs went, and backfills."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

from starlette.responses import Response

from orchestrator.api.context import Api
from orchestrator.api.dashboard.pages.workflows import last_runs
from orchestrator.api.dashboard.rendering import HTML, page
from orchestrator.api.endpoints import Routes
from orchestrator.api.reach import WITHIN
from orchestrator.domain.access import Reach
from orchestrator.domain.schedules.schedule import fires
from orchestrator.store.schedules.definitions import StoredSchedule

routes = Routes("dashboard", "/ui/schedules")

_AHEAD = timedelta(hours=24)
_MOST_FIRES = 150
"""Marks on one strip; what fires more often is drawn as a line."""
_MOST_SHOWN = 200
_LAST = 14


@dataclass(frozen=True)
class Shown:
    """A schedule with what is drawn beside it."""

    stored: StoredSchedule
    marks: list[float]
    """Where on the strip it fires, in hundredths of the next day."""
    is_steady: bool
    """It fires more often than could be drawn."""
    runs: list[Any]


@routes.get("", about=WITHIN, media_type=HTML)
def list_schedules(api: Api, reach: Reach) -> Response:
    """Show all schedules."""
    now = datetime.now(UTC)
    found = api.backend.schedules.list_all(reach.workflows)
    backfills = [one for one in api.backend.schedules.list_backfills(20) if reach.has_workflow(one.workflow)]
    hours = [now + timedelta(hours=6 * place) for place in range(5)]
    return page(
        "schedules.html",
        schedules=[_shown(api, stored, now, reach) for stored in found[:_MOST_SHOWN]],
        more=max(0, len(found) - _MOST_SHOWN),
        backfills=backfills,
        hours=hours,
    )


def _shown(api: Api, stored: StoredSchedule, now: datetime, reach: Reach) -> Shown:
    ahead = [] if stored.paused else list(islice(fires(stored.schedule, now, now + _AHEAD), _MOST_FIRES + 1))
    marks = [round(100 * (fire - now) / _AHEAD, 2) for fire in ahead[:_MOST_FIRES]]
    return Shown(stored, marks, len(ahead) > _MOST_FIRES, last_runs(api, stored.workflow, reach, _LAST))
