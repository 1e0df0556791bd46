"""Everything that the dashboard serves, by path."""

from __future__ import annotations

from orchestrator.api.dashboard.actions import ACTIONS
from orchestrator.api.dashboard.pages import (
    approvals,
    backfills,
    entry,
    failures,
    fleet,
    flows,
    live,
    overview,
    pulse,
    queues,
    records,
    resets,
    runs,
    schedules,
    search,
    tasks,
    workflows,
)
from orchestrator.api.endpoints import Endpoint

PAGES: tuple[Endpoint, ...] = (
    *overview.routes,
    *pulse.routes,
    *queues.routes,
    *tasks.routes,
    *runs.routes,
    *resets.routes,
    *workflows.routes,
    *flows.routes,
    *approvals.routes,
    *schedules.routes,
    *backfills.routes,
    *fleet.routes,
    *failures.routes,
    *search.routes,
    *records.routes,
    *live.routes,
    *entry.routes,
    *ACTIONS,
)
NOWHERE = "/ui/{anything}"
"""What says that there is no such page."""
