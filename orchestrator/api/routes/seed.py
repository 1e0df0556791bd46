"""The eleven routes without `/api/v1`: workflows, their runs, and the runs' tasks with logs."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import msgspec
from msgspec import Meta

from orchestrator.api.bodies import MAX_BODY
from orchestrator.api.context import MAX_INT, MAX_PAGE_SIZE, Api, Page
from orchestrator.api.endpoints import Endpoint, Routes, endpoint_named
from orchestrator.api.key_scope import RUN, WITHIN, WORKFLOW
from orchestrator.api.routes import client, runs, tasks, workflows
from orchestrator.api.routes.tasks import Log, LogQuery
from orchestrator.api.routes.workflows import Applied, Document, NewRunOf, Started, WorkflowAnswer, hash_of
from orchestrator.domain.access import KeyScope, Scope
from orchestrator.domain.dag.definition import Condition
from orchestrator.domain.flow.definition import step_of
from orchestrator.domain.plain import anchored
from orchestrator.errors import NotFound, did_you_mean
from orchestrator.store import insights
from orchestrator.store.insights import StepView, TaskFilter, TaskView

routes = Routes("root")

_EXAMPLE = {"name": "nightly", "tasks": {"fetch": {"task": "etl.fetch"}}}


class RunTasksQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which of a run's tasks to list."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE_SIZE)] = MAX_PAGE_SIZE
    cursor: UUID | None = None


class RunTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task of a run, or a step that was skipped or failed before it had a task."""

    id: UUID | None
    """Null for a step without a task."""
    step: str | None
    """The step of the workflow or node of the flow: the name in `/runs/{id}/tasks/{name}/logs`."""
    index: int
    """The index in a fan-out: `?index=` of the log's route."""
    attempt: int
    """The number of attempts; `?attempt=` of the log's route is one of them."""
    status: str
    reason: str | None
    """Why the task or step did not succeed, in a word or two."""
    name: str
    """The name of the called task."""
    queue: str = ""
    priority: int = 0
    hold: str | None = None
    blockers: int = 0
    wake_at: datetime | None = None
    failures: int = 0
    losses: int = 0
    run_id: UUID
    position: int | None = None
    worker: str | None = None
    created_at: datetime | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None

    @classmethod
    def of_task(cls, task: TaskView) -> RunTask:
        return cls(**dataclasses.asdict(task), index=task.position or 0)

    @classmethod
    def of_step(cls, run: UUID, step: StepView) -> RunTask:
        return cls(
            id=None,
            step=step.name,
            index=0,
            attempt=0,
            status=step.state,
            reason=step.reason,
            name=step.calls,
            run_id=run,
        )


class LogsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which log: of one task of a fan-out, of one attempt of a retried task."""

    index: Annotated[int, Meta(ge=0, le=MAX_INT)] = 0
    attempt: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None
    """All attempts by default."""
    cursor: Annotated[str, Meta(pattern=anchored("[0-9]{1,19}-[0-9]{1,9}"))] = ""


def _alias(path: str, original: Endpoint, summary: str) -> None:
    """Serve another route at the root as well."""
    routes.endpoints.append(dataclasses.replace(original, path=path, tag=routes.tag, summary=summary, description=""))


_alias("/workflows", endpoint_named("list_workflows", workflows.routes), "List workflows")


@routes.post("/workflows", about=WITHIN, etag=hash_of, examples=[_EXAMPLE], is_expensive=True, max_body=MAX_BODY)
def put_workflow(api: Api, body: dict[str, Any] | str, key_scope: KeyScope, match: Condition) -> Applied:
    """Create or update a workflow: a definition in JSON or, as the content type says, in YAML."""
    document = Document(text=body) if isinstance(body, str) else Document(definition=body)
    return workflows.apply_workflow(api, document, key_scope, match)


@routes.get("/workflows/{name}", about=WORKFLOW, etag=hash_of)
def show_workflow(api: Api, name: str) -> WorkflowAnswer:
    """Get a workflow."""
    return workflows.answer(workflows.find(api, name))


_alias("/workflows/{name}", endpoint_named("delete_workflow", workflows.routes), "Delete a workflow")


@routes.post("/workflows/{name}/runs", about=WORKFLOW, scope=Scope.ENQUEUE, status=201)
def trigger_run(api: Api, name: str, body: NewRunOf, key: str | None, key_scope: KeyScope) -> Started:
    """Trigger a run."""
    return Started(workflows.start(api, name, body, key, key_scope))


_alias("/runs", endpoint_named("list_runs", runs.routes), "List runs")
_alias("/runs/{id}", endpoint_named("show_run", runs.routes), "Get the details of a run")
_alias("/runs/{id}/cancel", endpoint_named("cancel_run", client.routes), "Cancel a run")
_alias("/runs/{id}/retry", endpoint_named("retry_run", client.routes), "Retry the failed tasks of a run")


@routes.get("/runs/{id}/tasks", about=RUN)
def list_tasks(api: Api, id: UUID, query: RunTasksQuery) -> Page[RunTask]:
    """List the tasks of a run in the order of their creation, and then the steps without tasks.

    A step without a task was skipped, or failed before it had a task; its `reason` says why.
    """
    api.backend.runs.progress(id.bytes)  # raises NotFound if there is no such run
    task_filter = TaskFilter(run=id)
    with api.reading() as connection:
        found, after = insights.page_of_tasks(connection, task_filter, limit=query.limit, before=query.cursor)
        steps = insights.list_steps(connection, id) if after is None else []
    items = [RunTask.of_task(task) for task in found]
    return Page([*items, *(RunTask.of_step(id, step) for step in steps if step.reason is not None)], after)


@routes.get("/runs/{id}/tasks/{name}/logs", about=RUN)
def task_logs(api: Api, id: UUID, name: str, query: LogsQuery) -> Log:
    """Get the log of a task of a run: in a fan-out, of the task at `index`; of one `attempt`, or of all."""
    with api.reading() as connection:
        task = insights.find_step_task(connection, id, name, query.index)
        task = task or insights.find_step_task(connection, id, step_of(name), query.index)
        if task is None:
            steps = {step.name: step for step in insights.list_steps(connection, id)}
    if task is None:
        api.backend.runs.progress(id.bytes)  # raises NotFound if there is no such run
        names, reason = list(steps), steps[name].reason if name in steps else None
        without = f"has no task: it is {steps[name].state} ({reason})" if reason else "has no task {} yet"
        explanation = f"step {name!r} {without.format(query.index)}" if name in steps else f"it has no task {name!r}"
        raise NotFound(f"Run {id}: {explanation}.{did_you_mean(name, names) if name not in names else ''}")
    return tasks.log_of(api, task.bytes, LogQuery(query.attempt, query.cursor))
