"""Cancel open tasks and retry failed ones by the thousand, with a preview."""

from __future__ import annotations

import msgspec

from orchestrator.api.context import Api, filter_fields, made_from, view_fields
from orchestrator.api.endpoints import Routes
from orchestrator.api.key_scope import WITHIN
from orchestrator.api.problems import unfit
from orchestrator.domain.access import KeyScope
from orchestrator.domain.states import ENDED_TASK_STATES
from orchestrator.store.tasks import cancels
from orchestrator.store.tasks.cancels import MOST_AT_ONCE, OpenFilter, OpenGroup
from orchestrator.store.tasks.redrive import FailedFilter, Group

routes = Routes("tasks", "/api/v1/tasks")


class Cancel(filter_fields(OpenFilter)):  # type: ignore[misc]
    """Which open tasks are cancelled; what is not given does not matter."""

    dry_run: bool = False
    """Only say which."""


class TaskGroup(view_fields(OpenGroup)):  # type: ignore[misc]
    """Open tasks of one name in one queue and state."""


class Cancelled(msgspec.Struct, frozen=True):
    """Open tasks that match."""

    tasks: int
    """At most ten thousand: ask again for the rest."""
    groups: list[TaskGroup]
    asked: bool
    """Whether they are being cancelled, or this was only a look."""
    more: bool
    """There may be more of them."""


def open_tasks(api: Api, wanted: OpenFilter, key_scope: KeyScope) -> list[OpenGroup]:
    if any(state in ENDED_TASK_STATES for state in wanted.statuses):
        raise unfit("Expected states of open tasks: pending, dispatched, running.")
    return api.read(cancels.preview, wanted, key_scope.queues)


@routes.post(
    "/cancel",
    about=WITHIN,
    status=202,
    examples=[{"queue": "mail", "status": ["pending"], "dry_run": True}],
    is_expensive=True,
)
def cancel_tasks(api: Api, body: Cancel, key_scope: KeyScope) -> Cancelled:
    """Cancel open tasks by the thousand: those of a queue, a name, a run or a state."""
    wanted = made_from(OpenFilter, body)
    if (body.statuses, body.queue, body.name, body.run) == ((), None, None, None):
        raise unfit("Say which: status, queue, name or run.")
    groups = open_tasks(api, wanted, key_scope)
    count, asked = sum(group.tasks for group in groups), not body.dry_run and bool(groups)
    if asked:
        said = {"name": body.name, "status": ", ".join(body.statuses), "run": body.run and str(body.run)}
        detail = {name: value for name, value in said.items() if value}
        count = 0
        for connections in api.backend.each:
            with connections.changing("the request to cancel tasks was stored") as connection:
                asked_here = cancels.ask(connection, wanted, key_scope.queues)
                connections.record(connection, "cancel", "open tasks", body.queue or "", tasks=asked_here, **detail)
                count += asked_here
    return Cancelled(count, [made_from(TaskGroup, one) for one in groups], asked, count >= MOST_AT_ONCE)


class Redrive(filter_fields(FailedFilter)):  # type: ignore[misc]
    """Which failed tasks are opened again; what is not given does not matter."""

    dry_run: bool = False
    """Only say which."""


class FailureGroup(view_fields(Group)):  # type: ignore[misc]
    """Failed tasks of one name with one kind of error."""


class Redriven(msgspec.Struct, frozen=True):
    """Failed tasks that match."""

    tasks: int
    groups: list[FailureGroup]
    asked: bool
    """Whether they are opened again, or this was only a look."""


@routes.post(
    "/retry",
    about=WITHIN,
    status=202,
    examples=[{"queue": "mail", "error": "ConnectionError", "dry_run": True}],
    is_expensive=True,
)
def retry_failed(api: Api, body: Redrive, key_scope: KeyScope) -> Redriven:
    """Open failed tasks again by the thousand: those of a queue, a name, an error, a release, a run or a time."""
    wanted = made_from(FailedFilter, body)
    if wanted == FailedFilter():
        raise unfit("Say which: queue, name, error, kind, release, run, since or until.")
    groups = api.backend.tasks.preview_retry(wanted, key_scope.queues)
    asked = not body.dry_run and bool(groups)
    if asked:
        api.backend.tasks.retry_failed(wanted, key_scope.queues)
    return Redriven(sum(group.tasks for group in groups), [made_from(FailureGroup, one) for one in groups], asked)
