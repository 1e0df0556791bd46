"""Open tasks cancelled by the thousand, after a look at how many that is."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from orchestrator.api.context import Api
from orchestrator.api.endpoints import Routes
from orchestrator.api.key_scope import WITHIN
from orchestrator.api.problems import refused
from orchestrator.domain.access import KeyScope
from orchestrator.domain.states import ENDED_TASK_STATES, TaskState
from orchestrator.store.tasks import cancels
from orchestrator.store.tasks.cancels import MOST_AT_ONCE, OpenFilter, OpenGroup

routes = Routes("tasks", "/api/v1/tasks")


class Cancel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which open tasks are cancelled; what is not given does not matter."""

    status: tuple[TaskState, ...] = ()
    """Any of these states: pending, dispatched, running."""
    queue: str | None = None
    name: str | None = None
    run: UUID | None = None
    until: datetime | None = None
    """Enqueued up to this moment."""
    dry_run: bool = False
    """Only say which."""


class TaskGroup(msgspec.Struct, frozen=True):
    """Open tasks of one name in one queue and state."""

    name: str
    queue: str
    status: str
    tasks: int


class Cancelled(msgspec.Struct, frozen=True):
    """Open tasks that match."""

    tasks: int
    """At most ten thousand: ask again for the rest."""
    groups: list[TaskGroup]
    asked: bool
    """Whether they are being cancelled, or this was only a look."""
    more: bool
    """There may be more of them."""


def find(api: Api, wanted: OpenFilter, key_scope: KeyScope) -> list[OpenGroup]:
    """Return which tasks would be cancelled."""
    if any(state in ENDED_TASK_STATES for state in wanted.statuses):
        raise refused(422, "The request does not fit", "Expected states of open tasks: pending, dispatched, running.")
    with api.reading() as connection:
        return cancels.preview(connection, wanted, key_scope.queues)


@routes.post(
    "/cancel",
    about=WITHIN,
    status=202,
    examples=[{"queue": "mail", "status": ["pending"], "dry_run": True}],
    is_expensive=True,
)
def cancel_tasks(api: Api, body: Cancel, key_scope: KeyScope) -> Cancelled:
    """Cancel open tasks by the thousand: those of a queue, a name, a run or a state."""
    wanted = OpenFilter(statuses=body.status, queue=body.queue, name=body.name, run=body.run, until=body.until)
    if (body.status, body.queue, body.name, body.run) == ((), None, None, None):
        raise refused(422, "The request does not fit", "Say which: status, queue, name or run.")
    groups = find(api, wanted, key_scope)
    found = [TaskGroup(*group) for group in groups]
    count = sum(group.tasks for group in groups)
    if body.dry_run or not groups:
        return Cancelled(count, found, False, count == MOST_AT_ONCE)
    connections = api.backend.connections
    with connections.writing("the request to cancel tasks was stored", transaction=True) as connection:
        count = cancels.ask(connection, wanted, key_scope.queues)
        connections.record(connection, "cancel", "open tasks", body.queue or "", tasks=count, **_said(body))
    connections.nudge()
    return Cancelled(count, found, True, count == MOST_AT_ONCE)


def _said(body: Cancel) -> dict[str, Any]:
    said = {"name": body.name, "status": ", ".join(body.status), "run": str(body.run) if body.run else None}
    return {key: value for key, value in said.items() if value}
