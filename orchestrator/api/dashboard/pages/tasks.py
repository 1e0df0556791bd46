"""Tasks: a list with filters, previews of what a bulk action would do, and all that is known of one task."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
from msgspec import Meta
from starlette.responses import Response

from orchestrator.api.arguments import Argument, tasks_with
from orchestrator.api.context import Api, Page, filter_fields, made_from
from orchestrator.api.dashboard.gantt import timeline
from orchestrator.api.dashboard.list_notes import (
    Span,
    check_times,
    given,
    near_task_filters,
    progress_of,
    task_calls,
    task_errors,
    within_span,
)
from orchestrator.api.dashboard.pages import logs, seen
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
from orchestrator.sdk.values.display import as_shown
from orchestrator.store.fleet import parameters_of
from orchestrator.store.inbox import RequestKind, is_asked
from orchestrator.store.insights import TaskFilter, TaskView
from orchestrator.store.insights.attempts import unbegun
from orchestrator.store.insights.tasks import TaskSort
from orchestrator.store.tasks import redrive
from orchestrator.store.tasks.cancels import MOST_AT_ONCE, OpenFilter
from orchestrator.store.tasks.redrive import FailedFilter

routes, actions = pages("/ui/tasks"), page_actions("/ui/tasks")

_MOST_AT_ONCE = 200
"""Tasks that are cancelled or tried again by one form."""
_Back = Annotated[str, Meta(max_length=4_000)]
"""The list from which somebody came to a preview, and to which the action leads back."""
_ANY_TIME = datetime.fromtimestamp(0, UTC)
_MOST_CHILDREN = 50
"""Tasks and runs that are listed of those that a task enqueued."""


class TasksQuery(task_routes.TaskQuery):
    """Which tasks to list, and of when."""

    span: Span = ""
    sort: Literal[TaskSort, ""] = ""
    """By when they were enqueued, or have ended; if empty, the first ones of a run first, or else the last ones."""
    argument: Argument = ""
    """With this value among the arguments, or with this one under a name: `customer=42`."""

    def __post_init__(self) -> None:
        """Refuse times that do not fit each other."""
        check_times(self)


@routes.get("", about=WITHIN)
def list_tasks(api: Api, query: TasksQuery, key_scope: KeyScope) -> Response:
    """List tasks."""
    asked, query = given(query), within_span(query)
    sort: TaskSort = query.sort or ("when" if query.run else "-when")
    wanted = query = msgspec.structs.replace(query, sort=sort)
    if sort.endswith("ended") and query.since is None and not query.run:
        wanted = msgspec.structs.replace(query, since=_ANY_TIME)  # which makes it a list of ends
    order: Any = {"oldest": not sort.startswith("-"), "run_sort": sort}
    if query.argument:
        fitting = task_routes.filter_within(api, wanted, key_scope)
        found = Page(*tasks_with(api, fitting, query.argument, limit=query.limit, before=query.cursor, **order))
    else:
        found = task_routes.list_page(api, wanted, key_scope, **order)
    filters = {"argument"} if query.argument else set()
    filters |= {field.name for field in dataclasses.fields(TaskFilter) if getattr(query, field.name, None)}
    return page(
        "tasks.html",
        query=query,
        asked=asked,
        found=found,
        near=[] if found.items or query.cursor else near_task_filters(api, query.name, query.queue, key_scope),
        errors=task_errors(api, found.items),
        calls=task_calls(api, found.items),
        done=progress_of(api, found.items),
        states=list(TaskState),
        may_cancel_all={*query.statuses} <= {*OPEN_TASK_STATES} and filters <= {"statuses", "queue", "name", "run"},
        may_retry_all=TaskState.FAILED in (query.statuses or (TaskState.FAILED,))
        and filters <= {"statuses", "queue", "name", "error", "kind", "since", "until", "release", "run"},
    )


class FailedQuery(filter_fields(FailedFilter)):  # type: ignore[misc]
    """Which failed tasks are meant."""

    back: _Back = ""


@routes.get("/retry", about=WITHIN, scope=Scope.OPERATE)
def preview_retry(api: Api, query: FailedQuery, key_scope: KeyScope) -> Response:
    """Say how many failed tasks would be tried again, before they are."""
    until = query.until or datetime.now(UTC)
    groups: list[redrive.Group] = []
    is_part = False
    if made_from(FailedFilter, query) != FailedFilter():
        wanted = made_from(FailedFilter, query, until=until)
        groups, is_part = api.read(redrive.preview_latest, wanted, key_scope.queues)
    total = sum(group.tasks for group in groups)
    looked_at = redrive.MOST_LOOKED_AT if is_part else None
    back = own_page(query.back or "/ui/failures")
    return page("retry.html", query=query, until=until, back=back, groups=groups, total=total, looked_at=looked_at)


class OpenQuery(filter_fields(OpenFilter, "until")):  # type: ignore[misc]
    """Which open tasks are meant."""

    back: _Back = ""


@routes.get("/cancel", about=WITHIN, scope=Scope.OPERATE)
def preview_cancel(api: Api, query: OpenQuery, key_scope: KeyScope) -> Response:
    """Say how many open tasks would be cancelled, before they are."""
    until = datetime.now(UTC)
    groups = []
    if query != OpenQuery(back=query.back):
        groups = bulk.open_tasks(api, made_from(OpenFilter, query, until=until), key_scope)
    total = sum(group.tasks for group in groups)
    return page(
        "cancel.html",
        query=query,
        back=own_page(query.back or "/ui/tasks"),
        groups=groups,
        total=total,
        until=until,
        is_part=total == MOST_AT_ONCE,
        states=[state for state in TaskState if state in OPEN_TASK_STATES],
    )


class Chosen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Selected tasks of a list."""

    id: Annotated[list[seen.Marked], Meta(max_length=_MOST_AT_ONCE)] = []


def check_marked(ids: list[str], noun: str) -> None:
    """Refuse a form that names nothing."""
    if not ids:
        raise refused(422, "There is nothing marked", f"Mark the {noun} that are meant.")


IN_ANOTHER_STATE = "they are in another state by now"


def outcome_of_marked(count: int, asked: int, noun: str, done: str, why: str = IN_ANOTHER_STATE) -> Note:
    """Say of how many something was done, of how many not, and why."""
    left = f"; {asked - count} could not be: {why}" if count < asked else ""
    return Note(f"{count} of {asked} {noun} are {done}{left}")


def _ask(api: Api, marked: list[str], key_scope: KeyScope, kind: RequestKind) -> set[UUID]:
    """Ask for the same about marked tasks, of which none is outside the key scope; return those in a state for it."""
    check_marked(marked, "tasks")
    ids, shown = seen.split(marked)
    if key_scope.is_bound:
        for id in ids:
            TASK.check(api, key_scope, {"id": id})
    return api.backend.ask_all(kind, [id.bytes for id in ids], shown)


@actions.post("/cancel-chosen", about=WITHIN)
def cancel_chosen(api: Api, body: Chosen, key_scope: KeyScope) -> Note:
    """Cancel the tasks that are marked."""
    asked = _ask(api, body.id, key_scope, RequestKind.CANCEL_TASK)
    return outcome_of_marked(len(asked), len(body.id), "tasks", "cancelled")


@actions.post("/retry-chosen", about=WITHIN)
def retry_chosen(api: Api, body: Chosen, key_scope: KeyScope) -> Note:
    """Try the tasks again that are marked; those with a unique key take turns for it, one by one."""
    asked = _ask(api, body.id, key_scope, RequestKind.RETRY_TASK)
    ids, shown = seen.split(body.id)
    for id in {*ids} - asked:
        last = int(shown[str(id)]) if str(id) in shown else None
        with suppress(OrchestratorError, Refused):
            seen.check_task(api, id, last, is_retry=True)
            api.backend.tasks.retry(id.bytes, last)
            asked.add(id)
    return outcome_of_marked(len(asked), len(body.id), "tasks", "retried")


@routes.get("/{id}", about=TASK)
def show_task(api: Api, id: UUID, query: logs.LogQuery) -> Response:
    """Show all that is known of one task."""
    found = task_routes.shown_task(api, id, as_shown)
    known = api.read(parameters_of, found.task.name) if found.args else None
    is_retried = found.task.status in _RETRIED and api.backend.tasks.is_retry_requested(id.bytes)
    is_cancelled = not found.task.ended_at and api.read(is_asked, RequestKind.CANCEL_TASK, id.bytes)
    missing = unbegun(found.attempts, found.task.attempt)
    return page(
        "task.html",
        requested="retry" if is_retried else "cancel" if is_cancelled else "",
        found=found,
        arguments=None if known is None else by_name(known, found.args, found.kwargs),
        task=found.task,
        log=logs.last_lines(api, id, query),
        obstacles=_obstacles(api, found.task, is_retried or is_cancelled),
        timeline=timeline(found.task, found.attempts),
        attempts=sorted([*((one.attempt, one) for one in found.attempts), *missing.items()], key=lambda one: one[0]),
        handed_back=sum(why.startswith("was") for why in missing.values()),
        lineage=lineage_within(visitor().key_scope, api.backend.insights.lineage(id)),
        most_shown=_MOST_CHILDREN,
    )


_RETRIED = (TaskState.FAILED, TaskState.SKIPPED)
"""States in which a task may be for which a retry is requested."""


def _obstacles(api: Api, task: TaskView, is_requested: bool) -> list[str]:
    """Return what keeps a task that waits, or a request for one, from going on, but for what the page says anyway."""
    if task.status not in (TaskState.PENDING, TaskState.DISPATCHED) and not is_requested:
        return []
    return [one for one in api.backend.tasks.obstacles(task.id.bytes) if one != visitor().told_outage]
