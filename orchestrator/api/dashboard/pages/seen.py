"""Actions that carry what their page showed: refused if the task or run has moved on since, or another was started."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated
from uuid import UUID

import msgspec
from msgspec import Meta

from orchestrator.api.context import LARGEST, Api
from orchestrator.api.dashboard.rendering import Note, page_actions
from orchestrator.api.dashboard.words import instant
from orchestrator.api.key_scope import RUN, TASK, WITHIN, WORKFLOW
from orchestrator.api.problems import Refused, refused
from orchestrator.api.routes import bulk, flows, runs, schedules, workflows
from orchestrator.domain.access import KeyScope, Scope
from orchestrator.domain.plain import whole
from orchestrator.store import audit
from orchestrator.store.insights import TaskView, find_runs, find_tasks

actions = page_actions("/ui")

Marked = Annotated[str, Meta(pattern=whole("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}(@[0-9]{1,18})?"))]
"""A marked row: an id and, after an @, what it showed: `SeenTask.attempt` or `SeenRun.ended`."""


class SeenTask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a page showed of a task."""

    attempt: Annotated[int, Meta(ge=0, le=LARGEST)] | None = None
    """The last attempt that is meant: of a task that waits, the next one."""


class SeenRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a page showed of a run."""

    ended: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    """When it had ended, in microseconds."""


def split(marked: list[str]) -> tuple[list[UUID], dict[str, str]]:
    """Return the ids of marked rows, and what they showed."""
    pairs = [one.partition("@") for one in marked]
    return [UUID(id) for id, _, _ in pairs], {id: seen for id, _, seen in pairs if seen}


def moved_on(api: Api, task: TaskView, last: int | None, *, is_retry: bool) -> str:
    """Say where a task stands that is in another attempt than its page showed, and who retried it; nothing if not."""
    if last is None:
        return ""
    is_requested = is_retry and api.backend.tasks.is_retry_requested(task.id.bytes)
    is_same = task.attempt == last and task.ended_at is not None if is_retry else task.attempt <= last
    if is_same and not is_requested:
        return ""
    stands = "its retry is requested" if is_requested else f"it is {task.status} in attempt {task.attempt:,} by now"
    return f"Task {task.id} has moved on since the page showed it: {stands}; {_retried(api, task.id)}."


def _retried(api: Api, id: UUID) -> str:
    known = api.read(audit.last_act, str(id), "retry")
    return "somebody else may have retried it" if known is None else f"it was retried {known}"


def check_task(api: Api, id: UUID, last: int | None, *, is_retry: bool) -> None:
    """Refuse what is asked for of a task that has moved on."""
    for task in api.read(find_tasks, [id.bytes]):
        if said := moved_on(api, task, last, is_retry=is_retry):
            raise _not_done(said)


def _not_done(said: str) -> Refused:
    return refused(409, "It has changed since the page showed it", said)


@actions.post("/tasks/{id}/retry", about=TASK)
def retry_task(api: Api, id: UUID, body: SeenTask) -> Note:
    """Retry a task, unless it has moved on."""
    check_task(api, id, body.attempt, is_retry=True)
    api.backend.tasks.retry(id.bytes, body.attempt)
    return Note("a retry is requested")


@actions.post("/tasks/{id}/cancel", about=TASK)
def cancel_task(api: Api, id: UUID, body: SeenTask) -> Note:
    """Cancel a task, unless it was opened again since."""
    check_task(api, id, body.attempt, is_retry=False)
    api.backend.tasks.cancel(id.bytes)
    return Note("the task is being cancelled")


@actions.post("/tasks/cancel", about=WITHIN, is_expensive=True)
def cancel_counted(api: Api, body: bulk.Cancel, key_scope: KeyScope) -> Note:
    """Cancel open tasks that were counted."""
    count = bulk.cancel_tasks(api, body, key_scope).tasks
    if not count:
        raise _not_done("None of these tasks is open any more: they have ended, or somebody else cancelled them.")
    return Note(f"being cancelled: {count:,}")


@actions.post("/tasks/retry", about=WITHIN, is_expensive=True)
def retry_counted(api: Api, body: bulk.Redrive, key_scope: KeyScope) -> Note:
    """Retry failed tasks that were counted: those that have failed again since are others."""
    count = bulk.retry_failed(api, body, key_scope).tasks
    if not count:
        raise _not_done("None of these tasks is failed any more: somebody else may have retried them. Count again.")
    return Note(f"retried: {count:,}")


@actions.post("/runs/{id}/retry", about=RUN)
def retry_run(api: Api, id: UUID, body: SeenRun) -> Note:
    """Retry a run, unless it has moved on."""
    for run in api.read(find_runs, [id.bytes]) if body.ended is not None else ():
        if run.ended_at is None or instant(run.ended_at) != body.ended:
            stands = f"it is {run.shown_status} by now; {_retried(api, id)}"
            raise _not_done(f"Run {id} has moved on since the page showed it: {stands}.")
    api.backend.runs.retry(id.bytes)
    return Note("what failed in the run is retried")


RERUN = "rerun"
"""In the audit log, of the run that is started over, with the same parameters or with others."""
_START = "start"
"""The same of a workflow or a flow."""


class Seen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the page was made."""

    since: datetime | None = None


class RunAgain(Seen, frozen=True, forbid_unknown_fields=True):
    """A run that is started over."""

    from_step: str | None = None


class NewRun(workflows.NewRunOf, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run of a workflow."""

    since: datetime | None = None


class NewFlowRun(flows.NewFlowRun, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run of a flow."""

    since: datetime | None = None


def started_since(api: Api, target: str, act: str, since: datetime | None) -> str:
    """Say who has started such a run since a page was made; nothing if nobody has."""
    known = None if since is None else api.read(audit.last_act, target, act, since)
    return "" if known is None else f"A run like it was started {known}, after this page was made. Start one more?"


def record(api: Api, act: str, kind: str, target: str, run: UUID) -> Note:
    """Write that a run was started, and lead to it."""
    connections = api.backend.connections
    with connections.changing("the line of the audit log was written") as connection:
        connections.record(connection, act, kind, target, new=str(run))
    return Note("the run is started: this is it", to=f"/ui/runs/{run}")


def _check(api: Api, target: str, act: str, since: datetime | None) -> None:
    if said := started_since(api, target, act, since):
        raise refused(409, "The run is not started yet", said)


@actions.post("/runs/{id}/rerun", about=RUN, is_expensive=True)
def rerun(api: Api, id: UUID, body: RunAgain) -> Note:
    """Start a run over."""
    _check(api, str(id), RERUN, body.since)
    new = runs.rerun(api, id, runs.Rerun(body.from_step)).id
    return Note("the run is started over: this is the new one", to=f"/ui/runs/{new}")


@actions.post("/schedules/{workflow}/{name}/trigger", about=WORKFLOW)
def trigger(api: Api, workflow: str, name: str, body: Seen) -> Note:
    """Start a run of a schedule now."""
    _check(api, f"{workflow}/{name}", "trigger", body.since)
    new = schedules.trigger_schedule(api, workflow, name).id
    return Note("a run is started: this is it", to=f"/ui/runs/{new}")


@actions.post("/workflows/{name}/runs", about=WORKFLOW, scope=Scope.ENQUEUE)
def start_run(api: Api, name: str, body: NewRun, key_scope: KeyScope) -> Note:
    """Start a run of a workflow. One with a key starts once."""
    _check(api, name, _START, None if body.key else body.since)
    return record(api, _START, "workflow", name, workflows.start(api, name, body, None, key_scope))


@actions.post("/flows/{name}/runs", about=WORKFLOW, scope=Scope.ENQUEUE)
def start_flow(api: Api, name: str, body: NewFlowRun) -> Note:
    """Start a run of a flow."""
    _check(api, name, _START, body.since)
    return record(api, _START, "flow", name, flows.start_flow(api, name, body, None).id)
