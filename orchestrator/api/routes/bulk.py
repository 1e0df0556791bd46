"""Cancel open tasks and retry failed tasks in bulk, with a preview."""

from __future__ import annotations

import msgspec

from orchestrator.api.context import Api, build_from, filter_fields, view_fields
from orchestrator.api.endpoints import Routes
from orchestrator.api.key_scope import WITHIN
from orchestrator.api.problems import invalid
from orchestrator.domain.access import KeyScope
from orchestrator.domain.states import ENDED_TASK_STATES
from orchestrator.store.tasks import cancels
from orchestrator.store.tasks.cancels import MAX_CANCELLED_AT_ONCE, OpenFilter, OpenGroup
from orchestrator.store.tasks.redrive import FailedFilter, Group

routes = Routes("tasks", "/api/v1/tasks")


class Cancel(filter_fields(OpenFilter)):  # type: ignore[misc]
    """Which open tasks to cancel. Fields that are not given match everything."""

    dry_run: bool = False
    """Only show which tasks match."""


class TaskGroup(view_fields(OpenGroup)):  # type: ignore[misc]
    """Open tasks with one name, in one queue and state."""


class Cancelled(msgspec.Struct, frozen=True):
    """The matching open tasks."""

    tasks: int
    """At most ten thousand; repeat the request for the rest."""
    groups: list[TaskGroup]
    asked: bool
    """Whether the tasks are being cancelled; false for a preview."""
    more: bool
    """There may be more matching tasks."""


def open_tasks(api: Api, task_filter: OpenFilter, key_scope: KeyScope) -> list[OpenGroup]:
    if any(state in ENDED_TASK_STATES for state in task_filter.statuses):
        raise invalid("Expected states of open tasks: pending, dispatched, running.")
    return api.read(cancels.preview, task_filter, key_scope.queues)


@routes.post(
    "/cancel",
    about=WITHIN,
    status=202,
    examples=[{"queue": "mail", "status": ["pending"], "dry_run": True}],
    is_expensive=True,
)
def cancel_tasks(api: Api, body: Cancel, key_scope: KeyScope) -> Cancelled:
    """Cancel up to ten thousand open tasks: of a queue, a name, a run or a state."""
    task_filter = build_from(OpenFilter, body)
    if (body.statuses, body.queue, body.name, body.run) == ((), None, None, None):
        raise invalid("Specify at least one filter: status, queue, name or run.")
    groups = open_tasks(api, task_filter, key_scope)
    count, is_requested = sum(group.tasks for group in groups), not body.dry_run and bool(groups)
    if is_requested:
        criteria = {"name": body.name, "status": ", ".join(body.statuses), "run": body.run and str(body.run)}
        detail = {name: value for name, value in criteria.items() if value}
        count = 0
        for connections in api.backend.each:
            with connections.changing("the request to cancel tasks was stored") as connection:
                requested = cancels.request_cancel(connection, task_filter, key_scope.queues)
                connections.record(connection, "cancel", "open tasks", body.queue or "", tasks=requested, **detail)
                count += requested
    return Cancelled(
        count, [build_from(TaskGroup, group) for group in groups], is_requested, count >= MAX_CANCELLED_AT_ONCE
    )


class Redrive(filter_fields(FailedFilter)):  # type: ignore[misc]
    """Which failed tasks to retry. Fields that are not given match everything."""

    dry_run: bool = False
    """Only show which tasks match."""


class FailureGroup(view_fields(Group)):  # type: ignore[misc]
    """Failed tasks with one name and one kind of error."""


class Redriven(msgspec.Struct, frozen=True):
    """The matching failed tasks."""

    tasks: int
    groups: list[FailureGroup]
    asked: bool
    """Whether the tasks are being retried; false for a preview."""


@routes.post(
    "/retry",
    about=WITHIN,
    status=202,
    examples=[{"queue": "mail", "error": "ConnectionError", "dry_run": True}],
    is_expensive=True,
)
def retry_failed(api: Api, body: Redrive, key_scope: KeyScope) -> Redriven:
    """Retry failed tasks in bulk: of a queue, a name, an error, a release, a run or a time."""
    task_filter = build_from(FailedFilter, body)
    if task_filter == FailedFilter():
        raise invalid("Specify at least one filter: queue, name, error, kind, release, run, since or until.")
    groups = api.backend.tasks.preview_retry(task_filter, key_scope.queues)
    is_requested = not body.dry_run and bool(groups)
    if is_requested:
        api.backend.tasks.retry_failed(task_filter, key_scope.queues)
    return Redriven(
        sum(group.tasks for group in groups), [build_from(FailureGroup, group) for group in groups], is_requested
    )
