"""Everything that the dashboard serves: pages, and what can be done from them.

An action is a route of the API, with its scope and checks, that a form asks for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, get_type_hints

from orchestrator.api.dashboard.pages import (
    approvals,
    entry,
    fleet,
    flows,
    overview,
    queues,
    records,
    runs,
    schedules,
    search,
    tasks,
    workflows,
)
from orchestrator.api.dashboard.serving import Action
from orchestrator.api.endpoints import Endpoint, of_name
from orchestrator.api.key_scope import WHOLE, WITHIN
from orchestrator.api.routes import ROUTES, live
from orchestrator.domain.access import Scope


def _action(name: str, said: str, needs: str = "") -> Action:
    """Return a route of the API as a form asks for it."""
    found = of_name(name, ROUTES)
    path = found.path.replace("/api/v1", "/ui", 1)
    fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(Endpoint)}
    return Action(**fields | {"method": "POST", "path": path, "tag": "dashboard", "said": said, "needs": needs})


def _checked(name: str, checked: Callable[..., Any], said: str) -> Action:
    """Return a route of the API that pages ask for only if things still are as they were shown."""
    return dataclasses.replace(_action(name, said), call=checked, body=get_type_hints(checked)["body"])


def _own(path: str, call: Callable[..., Any]) -> Action:
    """Return something that only pages do: one route of the API for each of several things."""
    return Action(
        method="POST",
        path=path,
        call=call,
        scope=Scope.OPERATE,
        about=WITHIN,
        tag="dashboard",
        body=get_type_hints(call)["body"],
        takes_key_scope=True,
    )


def _of_keys(path: str, call: Callable[..., Any], said: str = "") -> Action:
    """Return something that is done to keys, which only pages and commands do."""
    own = _own(path, call)
    return dataclasses.replace(own, scope=Scope.ADMIN, about=WHOLE, takes_key_scope=False, said=said)


ACTIONS: tuple[Action, ...] = (
    _action("retry_task", "The task is tried again."),
    _action("cancel_task", "The task is being cancelled."),
    _action("retry_failed", "Tried again: {answer.tasks:,}."),
    _action("cancel_tasks", "Being cancelled: {answer.tasks:,}."),
    _own("/ui/tasks/cancel-chosen", tasks.cancel_chosen),
    _own("/ui/tasks/retry-chosen", tasks.retry_chosen),
    _action("pause_queue", "The queue is paused: what is with the workers goes on."),
    _action("resume_queue", "The queue goes on."),
    _action("limit_queue", "The limits are set."),
    _action("purge_queue", "What waits in the queue is being cancelled."),
    _action("drain_worker", "Worker {answer.worker} takes nothing more, finishes what it runs, and ends."),
    _action("cancel_run", "The run is being cancelled."),
    _action("retry_run", "What failed in the run is tried again."),
    _action("rerun", "The run is started over: this is the new one."),
    _action("signal", "The signal is sent."),
    _action("resolve", "", needs="value"),
    _action("reject", ""),
    _action("query_run", ""),
    _action("update_run", ""),
    _action("terminate", "The run is being ended, without asking its code."),
    _action("reset", "The run is repeated up to there: this is the new one."),
    _checked("approve_flow", approvals.approve, "Approved: the run goes on."),
    _checked("reject_flow", approvals.reject, "Rejected: the run goes on, or ends, as its flow says."),
    _action("signal_flow", "The signal is sent.", needs="value"),
    _action("start_flow", "The run is started: this is it."),
    _action("pause_schedule", "The schedule fires no more until it is resumed."),
    _action("resume_schedule", "The schedule fires again."),
    _action("trigger_schedule", "A run is started: this is it."),
    _action("backfill", "Backfill {answer.id} is asked for: {answer.total:,} fires."),
    _action("cancel_backfill", "The backfill is given up."),
    _of_keys("/ui/keys", records.create_key),
    _of_keys("/ui/keys/revoke", records.revoke_key, "The key opens nothing any more."),
    _action("start_run", "The run is started: this is it."),
)
_LIVE = [
    dataclasses.replace(one, path=one.path.replace("/api/v1", "/ui/live", 1), tag="dashboard") for one in live.routes
]
"""Event streams of the API, for pages that are open."""
_PAGES = (overview, queues, tasks, runs, workflows, flows, approvals, schedules, fleet, search, records)
PAGES: tuple[Endpoint, ...] = (
    *(route for subject in _PAGES for route in subject.routes),
    *_LIVE,
    *entry.routes,
    *ACTIONS,
)
NOWHERE = "/ui/{anything}"
"""What says that there is no such page."""
