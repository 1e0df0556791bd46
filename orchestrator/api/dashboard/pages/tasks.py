"""Tasks: a list with filters, previews of bulk actions, and the page of a task."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
from msgspec import Meta
from starlette.responses import Response

from orchestrator.api.arguments import Argument, find_tasks_by_argument
from orchestrator.api.context import Api, Page, build_from, filter_fields
from orchestrator.api.dashboard.gantt import timeline
from orchestrator.api.dashboard.list_notes import (
    Span,
    active_filters,
    check_times,
    progress_of,
    suggest_task_filters,
    task_calls,
    task_errors,
    within_span,
)
from orchestrator.api.dashboard.pages import checked_actions, logs
from orchestrator.api.dashboard.rendering import Note, page, page_actions, pages, visitor
from orchestrator.api.dashboard.session import own_page
from orchestrator.api.key_scope import TASK, WITHIN, lineage_within
from orchestrator.api.problems import Refused, refused
from orchestrator.api.routes import bulk
from orchestrator.api.routes import tasks as task_routes
from orchestrator.domain.access import KeyScope, Scope
from orchestrator.domain.states import OPEN_TASK_STATES, TaskState
from orchestrator.domain.tasks.parameters import by_name
from orchestrator.errors import OrchestratorError
from orchestrator.sdk.values.display import as_display_json
from orchestrator.store.fleet import parameters_of
from orchestrator.store.inbox import RequestKind, is_pending
from orchestrator.store.insights import TaskFilter, TaskView
from orchestrator.store.insights.attempts import unbegun
from orchestrator.store.insights.tasks import TaskSort
from orchestrator.store.tasks import redrive
from orchestrator.store.tasks.cancels import MAX_CANCELLED_AT_ONCE, OpenFilter
from orchestrator.store.tasks.redrive import FailedFilter

routes, actions = pages("/ui/tasks"), page_actions("/ui/tasks")

_MAX_AT_ONCE = 200
"""Tasks that one form cancels or retries."""
_Back = Annotated[str, Meta(max_length=4_000)]
"""The list to return to after a preview and its action."""
_ANY_TIME = datetime.fromtimestamp(0, UTC)
_MAX_CHILDREN = 50
"""Tasks and runs that are listed of those that a task started."""


class TasksQuery(task_routes.TaskQuery):
    """Which tasks to list, and from which period."""

    span: Span = ""
    sort: Literal[TaskSort, ""] = ""
    """By enqueue time or end; if empty, tasks of a run oldest first, others newest first."""
    argument: Argument = ""
    """An argument with this value, or a named one: `customer=42`."""

    def __post_init__(self) -> None:
        """Reject inconsistent times."""
        check_times(self)


@routes.get("", about=WITHIN)
def list_tasks(api: Api, query: TasksQuery, key_scope: KeyScope) -> Response:
    """List tasks."""
    filters_in_url, query = active_filters(query), within_span(query)
    sort: TaskSort = query.sort or ("when" if query.run else "-when")
    task_query = query = msgspec.structs.replace(query, sort=sort)
    if sort.endswith("ended") and query.since is None and not query.run:
        task_query = msgspec.structs.replace(query, since=_ANY_TIME)  # a filter by end makes the list sort by end
    order: Any = {"oldest": not sort.startswith("-"), "run_sort": sort}
    if query.argument:
        task_filter = task_routes.filter_within(api, task_query, key_scope)
        found = Page(
            *find_tasks_by_argument(api, task_filter, query.argument, limit=query.limit, before=query.cursor, **order)
        )
    else:
        found = task_routes.list_page(api, task_query, key_scope, **order)
    filters = {"argument"} if query.argument else set()
    filters |= {name for name in TaskFilter.__struct_fields__ if getattr(query, name, None)}
    return page(
        "tasks.html",
        query=query,
        asked=filters_in_url,
        found=found,
        near=[] if found.items or query.cursor else suggest_task_filters(api, query.name, query.queue, key_scope),
        errors=task_errors(api, found.items),
        calls=task_calls(api, found.items),
        done=progress_of(api, found.items),
        states=list(TaskState),
        may_cancel_all={*query.statuses} <= {*OPEN_TASK_STATES} and filters <= {"statuses", "queue", "name", "run"},
        may_retry_all=TaskState.FAILED in (query.statuses or (TaskState.FAILED,))
        and filters <= {"statuses", "queue", "name", "error", "kind", "since", "until", "release", "run"},
    )


class FailedQuery(filter_fields(FailedFilter)):  # type: ignore[misc]
    """Which failed tasks to retry."""

    back: _Back = ""


@routes.get("/retry", about=WITHIN, scope=Scope.OPERATE)
def preview_retry(api: Api, query: FailedQuery, key_scope: KeyScope) -> Response:
    """Preview how many failed tasks would be retried."""
    until = query.until or datetime.now(UTC)
    groups: list[redrive.Group] = []
    is_part = False
    if build_from(FailedFilter, query) != FailedFilter():
        task_filter = build_from(FailedFilter, query, until=until)
        groups, is_part = api.read(redrive.preview_latest, task_filter, key_scope.queues)
    total = sum(group.tasks for group in groups)
    looked_at = redrive.MAX_SCANNED if is_part else None
    back = own_page(query.back or "/ui/failures")
    return page("retry.html", query=query, until=until, back=back, groups=groups, total=total, looked_at=looked_at)


class OpenQuery(filter_fields(OpenFilter, "until")):  # type: ignore[misc]
    """Which open tasks to cancel."""

    back: _Back = ""


@routes.get("/cancel", about=WITHIN, scope=Scope.OPERATE)
def preview_cancel(api: Api, query: OpenQuery, key_scope: KeyScope) -> Response:
    """Preview how many open tasks would be cancelled."""
    until = datetime.now(UTC)
    groups = []
    if query != OpenQuery(back=query.back):
        groups = bulk.open_tasks(api, build_from(OpenFilter, query, until=until), key_scope)
    total = sum(group.tasks for group in groups)
    return page(
        "cancel.html",
        query=query,
        back=own_page(query.back or "/ui/tasks"),
        groups=groups,
        total=total,
        until=until,
        is_part=total == MAX_CANCELLED_AT_ONCE,
        states=[state for state in TaskState if state in OPEN_TASK_STATES],
    )


class Chosen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Selected tasks."""

    id: Annotated[list[checked_actions.Marked], Meta(max_length=_MAX_AT_ONCE)] = []


def check_marked(ids: list[str], noun: str) -> None:
    """Reject a form without selected rows."""
    if not ids:
        raise refused(422, "The selection is empty", f"Select the {noun} to act on.")


IN_ANOTHER_STATE = "they have changed state"


def outcome_of_marked(count: int, total: int, noun: str, done: str, why: str = IN_ANOTHER_STATE) -> Note:
    """Return a note with the numbers of tasks or runs that were changed and not changed, and why."""
    rest = f"; {total - count} skipped: {why}" if count < total else ""
    return Note(f"{count} of {total} {noun} are {done}{rest}")


def _request_for_all(api: Api, marked: list[str], key_scope: KeyScope, kind: RequestKind) -> set[UUID]:
    """Store a request for each selected task within the key scope; return the tasks that are in a state for it."""
    check_marked(marked, "tasks")
    ids, versions = checked_actions.split(marked)
    if key_scope.is_bound:
        for id in ids:
            TASK.check(api, key_scope, {"id": id})
    return api.backend.ask_all(kind, [id.bytes for id in ids], versions)


@actions.post("/cancel-chosen", about=WITHIN)
def cancel_chosen(api: Api, body: Chosen, key_scope: KeyScope) -> Note:
    """Cancel the selected tasks."""
    requested = _request_for_all(api, body.id, key_scope, RequestKind.CANCEL_TASK)
    return outcome_of_marked(len(requested), len(body.id), "tasks", "cancelled")


@actions.post("/retry-chosen", about=WITHIN)
def retry_chosen(api: Api, body: Chosen, key_scope: KeyScope) -> Note:
    """Retry the selected tasks. Those with a unique key are retried one by one."""
    requested = _request_for_all(api, body.id, key_scope, RequestKind.RETRY_TASK)
    ids, versions = checked_actions.split(body.id)
    for id in {*ids} - requested:
        shown_attempt = int(versions[str(id)]) if str(id) in versions else None
        with suppress(OrchestratorError, Refused):
            checked_actions.check_task(api, id, shown_attempt, is_retry=True)
            api.backend.tasks.retry(id.bytes, shown_attempt)
            requested.add(id)
    return outcome_of_marked(len(requested), len(body.id), "tasks", "retried")


@routes.get("/{id}", about=TASK)
def show_task(api: Api, id: UUID, query: logs.LogQuery) -> Response:
    """Show a task with its details."""
    found = task_routes.task_answer(api, id, as_display_json)
    parameters = api.read(parameters_of, found.task.name) if found.args else None
    is_retried = found.task.status in _RETRYABLE and api.backend.tasks.is_retry_requested(id.bytes)
    is_cancelled = not found.task.ended_at and api.read(is_pending, RequestKind.CANCEL_TASK, id.bytes)
    missing = unbegun(found.attempts, found.task.attempt)
    return page(
        "task.html",
        requested="retry" if is_retried else "cancel" if is_cancelled else "",
        found=found,
        arguments=None if parameters is None else by_name(parameters, found.args, found.kwargs),
        task=found.task,
        log=logs.last_lines(api, id, query),
        obstacles=_obstacles(api, found.task, is_retried or is_cancelled),
        timeline=timeline(found.task, found.attempts),
        attempts=sorted([*((one.attempt, one) for one in found.attempts), *missing.items()], key=lambda one: one[0]),
        handed_back=sum(why.startswith("was") for why in missing.values()),
        lineage=lineage_within(visitor().key_scope, api.backend.insights.lineage(id)),
        most_shown=_MAX_CHILDREN,
    )


_RETRYABLE = (TaskState.FAILED, TaskState.SKIPPED, TaskState.CANCELLED)
"""States in which the page looks for a pending retry request."""


def _obstacles(api: Api, task: TaskView, is_requested: bool) -> list[str]:
    """Return what keeps a waiting task, or a request for it, from progress, except what the page shows anyway."""
    if task.status not in (TaskState.PENDING, TaskState.DISPATCHED) and not is_requested:
        return []
    return [obstacle for obstacle in api.backend.tasks.obstacles(task.id.bytes) if obstacle != visitor().outage_message]
