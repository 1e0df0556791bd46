"""All routes of the dashboard: pages, and actions.

Most actions are routes of the API, with their scopes and checks, that forms call.
"""

from __future__ import annotations

import dataclasses

from orchestrator.api.dashboard.pages import (
    approvals,
    checked_actions,
    compare,
    entry,
    failures,
    fleet,
    flows,
    logs,
    overview,
    records,
    repeats,
    runs,
    schedules,
    search,
    tasks,
    workflows,
)
from orchestrator.api.dashboard.rendering import Action
from orchestrator.api.endpoints import Endpoint, endpoint_named
from orchestrator.api.routes import ROUTES, live


def _action(name: str, message: str, needs: str = "") -> Action:
    """Return a route of the API as an action for forms."""
    route = endpoint_named(name, ROUTES)
    path = route.path.replace("/api/v1", "/ui", 1)
    fields = {field.name: getattr(route, field.name) for field in dataclasses.fields(Endpoint)}
    return Action(**fields | {"method": "POST", "path": path, "tag": "dashboard", "notice": message, "needs": needs})


ACTIONS: tuple[Action, ...] = (
    _action("pause_queue", "The queue is paused. Tasks that workers already have continue."),
    _action("resume_queue", "The queue is resumed."),
    _action("limit_queue", "The limits are set."),
    _action("purge_queue", "The waiting tasks of the queue are being cancelled."),
    _action(
        "drain_worker", "Worker {answer.worker} is draining: it takes no more tasks, finishes those it runs, and exits."
    ),
    _action("cancel_run", "The run is being cancelled."),
    _action("signal", "The signal is sent."),
    _action("query_run", ""),
    _action("update_run", ""),
    _action("terminate", "The run is being terminated, without running its code."),
    _action("reset", "The run was reset: this is the new run."),
    _action("signal_flow", "The signal is sent.", needs="value"),
    _action("pause_schedule", "The schedule is paused."),
    _action("resume_schedule", "The schedule is resumed."),
    _action("backfill", "Backfill {answer.id} was requested: {answer.total:,} fires."),
    _action("cancel_backfill", "The backfill was cancelled."),
)
_LIVE = [
    dataclasses.replace(one, path=one.path.replace("/api/v1", "/ui/live", 1), tag="dashboard") for one in live.routes
]
"""The event streams of the API, for open pages."""
_PAGES = (
    overview,
    failures,
    tasks,
    repeats,
    logs,
    runs,
    compare,
    workflows,
    flows,
    approvals,
    schedules,
    fleet,
    search,
    records,
)
PAGES: tuple[Endpoint, ...] = (
    *(route for subject in _PAGES for route in subject.routes),
    *fleet.queue_routes,
    *repeats.run_routes,
    *repeats.run_actions,
    *_LIVE,
    *entry.routes,
    *ACTIONS,
    *(
        action
        for subject in (failures, tasks, checked_actions, repeats, runs, approvals, records)
        for action in subject.actions
    ),
)
NOT_FOUND = "/ui/{anything}"
"""The page for unknown paths."""
