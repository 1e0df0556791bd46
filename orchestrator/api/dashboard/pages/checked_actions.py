"""Actions that include the state that their page showed. They are rejected if the task or run has changed since."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated
from uuid import UUID

import msgspec
from msgspec import Meta

from orchestrator.api.context import MAX_INT, Api
from orchestrator.api.dashboard.rendering import Note, page_actions
from orchestrator.api.dashboard.words import instant
from orchestrator.api.key_scope import RUN, TASK, WITHIN, WORKFLOW
from orchestrator.api.problems import Refused, refused
from orchestrator.api.routes import bulk, flows, runs, schedules, workflows
from orchestrator.domain.access import KeyScope, Scope
from orchestrator.domain.plain import anchored
from orchestrator.store import audit
from orchestrator.store.insights import TaskView, find_runs, find_tasks

actions = page_actions("/ui")

Marked = Annotated[str, Meta(pattern=anchored("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}(@[0-9]{1,18})?"))]
"""A selected row: an id and, after an @, the state that was shown: `SeenTask.attempt` or `SeenRun.ended`."""


class SeenTask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state of a task that the page showed."""

    attempt: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    """The last attempt that the action is for; of a waiting task, the next one."""


class SeenRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state of a run that the page showed."""

    ended: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    """The end of the run in microseconds since 1970."""


def split(marked: list[str]) -> tuple[list[UUID], dict[str, str]]:
    """Return the ids of selected rows, and the states that they showed."""
    pairs = [row.partition("@") for row in marked]
    return [UUID(id) for id, _, _ in pairs], {id: shown for id, _, shown in pairs if shown}


def change_of_task(api: Api, task: TaskView, shown_attempt: int | None, *, is_retry: bool) -> str:
    """Return a message if a task is in another attempt than its page showed, with who retried it; otherwise nothing."""
    if shown_attempt is None:
        return ""
    is_requested = is_retry and api.backend.tasks.is_retry_requested(task.id.bytes)
    is_same = task.attempt == shown_attempt and task.ended_at is not None if is_retry else task.attempt <= shown_attempt
    if is_same and not is_requested:
        return ""
    state = "its retry is requested" if is_requested else f"it is now {task.status} in attempt {task.attempt:,}"
    return f"Task {task.id} has changed since the page was loaded: {state}; {_who_retried(api, task.id)}."


def _who_retried(api: Api, id: UUID) -> str:
    last_act = api.read(audit.last_act, str(id), "retry")
    return "another user may have retried it" if last_act is None else f"it was retried {last_act}"


def check_task(api: Api, id: UUID, shown_attempt: int | None, *, is_retry: bool) -> None:
    """Reject an action for a task that has changed since its page showed it."""
    for task in api.read(find_tasks, [id.bytes]):
        if message := change_of_task(api, task, shown_attempt, is_retry=is_retry):
            raise _changed(message)


def _changed(message: str) -> Refused:
    return refused(409, "It has changed since the page was loaded", message)


@actions.post("/tasks/{id}/retry", about=TASK)
def retry_task(api: Api, id: UUID, body: SeenTask) -> Note:
    """Retry a task, unless it has changed since the page showed it."""
    check_task(api, id, body.attempt, is_retry=True)
    api.backend.tasks.retry(id.bytes, body.attempt)
    return Note("a retry is requested")


@actions.post("/tasks/{id}/cancel", about=TASK)
def cancel_task(api: Api, id: UUID, body: SeenTask) -> Note:
    """Cancel a task, unless it was retried since."""
    check_task(api, id, body.attempt, is_retry=False)
    api.backend.tasks.cancel(id.bytes)
    return Note("the task is being cancelled")


@actions.post("/tasks/cancel", about=WITHIN, is_expensive=True)
def cancel_counted(api: Api, body: bulk.Cancel, key_scope: KeyScope) -> Note:
    """Cancel the open tasks that a preview counted."""
    count = bulk.cancel_tasks(api, body, key_scope).tasks
    if not count:
        raise _changed("These tasks are no longer open: they have ended, or another user cancelled them.")
    return Note(f"tasks being cancelled: {count:,}")


@actions.post("/tasks/retry", about=WITHIN, is_expensive=True)
def retry_counted(api: Api, body: bulk.Redrive, key_scope: KeyScope) -> Note:
    """Retry the failed tasks that a preview counted, except those that have failed again since."""
    count = bulk.retry_failed(api, body, key_scope).tasks
    if not count:
        raise _changed("These tasks are no longer failed: another user may have retried them. Open the preview again.")
    return Note(f"tasks being retried: {count:,}")


@actions.post("/runs/{id}/retry", about=RUN)
def retry_run(api: Api, id: UUID, body: SeenRun) -> Note:
    """Retry a run, unless it has changed since the page showed it."""
    for run in api.read(find_runs, [id.bytes]) if body.ended is not None else ():
        if run.ended_at is None or instant(run.ended_at) != body.ended:
            state = f"it is now {run.shown_status}; {_who_retried(api, id)}"
            raise _changed(f"Run {id} has changed since the page was loaded: {state}.")
    api.backend.runs.retry(id.bytes)
    return Note("retrying the failed tasks of the run")


RERUN = "rerun"
"""The action in the audit log of a run that is started again, with the same parameters or others."""
_START = "start"
"""The action in the audit log of a workflow or flow."""


class Seen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the page was rendered."""

    since: datetime | None = None


class RunAgain(Seen, frozen=True, forbid_unknown_fields=True):
    """A run to start again."""

    from_step: str | None = None


class NewRun(workflows.NewRunOf, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run of a workflow to start."""

    since: datetime | None = None


class NewFlowRun(flows.NewFlowRun, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run of a flow to start."""

    since: datetime | None = None


def started_message(api: Api, target: str, act: str, since: datetime | None) -> str:
    """Return a message if such a run was started since the page was rendered; otherwise an empty string."""
    last_act = None if since is None else api.read(audit.last_act, target, act, since)
    return (
        ""
        if last_act is None
        else f"The same run was started {last_act}, after this page was loaded. Start another one?"
    )


def record(api: Api, act: str, kind: str, target: str, run: UUID) -> Note:
    """Log the start of a run to the audit log, and redirect to the run."""
    connections = api.backend.connections
    with connections.changing("the audit entry was written") as connection:
        connections.record(connection, act, kind, target, new=str(run))
    return Note("the run was started: this is the new run", to=f"/ui/runs/{run}")


def _check_not_started(api: Api, target: str, act: str, since: datetime | None) -> None:
    if message := started_message(api, target, act, since):
        raise refused(409, "The run was not started", message)


@actions.post("/runs/{id}/rerun", about=RUN, is_expensive=True)
def rerun(api: Api, id: UUID, body: RunAgain) -> Note:
    """Rerun a run."""
    _check_not_started(api, str(id), RERUN, body.since)
    new = runs.rerun(api, id, runs.Rerun(body.from_step)).id
    return Note("the run was started again: this is the new run", to=f"/ui/runs/{new}")


@actions.post("/schedules/{workflow}/{name}/trigger", about=WORKFLOW)
def trigger(api: Api, workflow: str, name: str, body: Seen) -> Note:
    """Start a run of a schedule now."""
    _check_not_started(api, f"{workflow}/{name}", "trigger", body.since)
    new = schedules.trigger_schedule(api, workflow, name).id
    return Note("a run was started: this is the new run", to=f"/ui/runs/{new}")


@actions.post("/workflows/{name}/runs", about=WORKFLOW, scope=Scope.ENQUEUE)
def start_run(api: Api, name: str, body: NewRun, key_scope: KeyScope) -> Note:
    """Start a run of a workflow. A key starts one run only."""
    _check_not_started(api, name, _START, None if body.key else body.since)
    return record(api, _START, "workflow", name, workflows.start(api, name, body, None, key_scope))


@actions.post("/flows/{name}/runs", about=WORKFLOW, scope=Scope.ENQUEUE)
def start_flow(api: Api, name: str, body: NewFlowRun) -> Note:
    """Start a run of a flow."""
    _check_not_started(api, name, _START, body.since)
    return record(api, _START, "flow", name, flows.start_flow(api, name, body, None).id)
