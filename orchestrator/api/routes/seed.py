"""The eleven routes at the root: workflows, their runs, and the tasks of these with their logs."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

import msgspec
from msgspec import Meta

from orchestrator.api.context import LARGEST, LARGEST_PAGE, Api, Asked, Done, Page
from orchestrator.api.endpoints import Routes
from orchestrator.api.reach import RUN, WITHIN, WORKFLOW
from orchestrator.api.routes import runs, tasks, workflows
from orchestrator.api.routes.runs import RunAnswer, RunQuery
from orchestrator.api.routes.tasks import Log, LogQuery
from orchestrator.api.routes.workflows import Applied, Document, NewRunOf, Started, WorkflowAnswer, Workflows, hash_of
from orchestrator.domain.access import Reach, Scope
from orchestrator.domain.dag.conditions import Condition
from orchestrator.domain.patterns import whole
from orchestrator.errors import NotFound, did_you_mean
from orchestrator.store import insights
from orchestrator.store.insights import RunView, TaskFilter, TaskView

routes = Routes("root")

_EXAMPLE = {"name": "nightly", "tasks": {"fetch": {"task": "etl.fetch"}}}


class RunTasksQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which of a run's tasks to list."""

    limit: Annotated[int, Meta(ge=1, le=LARGEST_PAGE)] = LARGEST_PAGE
    cursor: UUID | None = None


class LogsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whose log: one task of a fan-out, one attempt of a task that was retried."""

    index: Annotated[int, Meta(ge=0, le=LARGEST)] = 0
    attempt: Annotated[int, Meta(ge=1, le=LARGEST)] | None = None
    """All of them, if none is given."""
    cursor: Annotated[str, Meta(pattern=whole("[0-9]{1,19}-[0-9]{1,9}"))] = ""


@routes.get("/workflows", about=WITHIN)
def list_workflows(api: Api, reach: Reach) -> Workflows:
    """List workflows."""
    return workflows.list_workflows(api, reach)


@routes.post("/workflows", about=WITHIN, etag=hash_of, examples=[_EXAMPLE])
def put_workflow(api: Api, body: dict[str, Any], reach: Reach, match: Condition) -> Applied:
    """Create or update a workflow: a definition as data."""
    return workflows.apply_workflow(api, Document(definition=body), reach, match)


@routes.get("/workflows/{name}", about=WORKFLOW, etag=hash_of)
def show_workflow(api: Api, name: str) -> WorkflowAnswer:
    """Get a workflow."""
    return workflows.answer(workflows.find(api, name))


@routes.delete("/workflows/{name}", about=WORKFLOW)
def delete_workflow(api: Api, name: str) -> Done:
    """Delete a workflow."""
    return workflows.delete_workflow(api, name)


@routes.post("/workflows/{name}/runs", about=WORKFLOW, scope=Scope.ENQUEUE, status=201)
def trigger_run(api: Api, name: str, body: NewRunOf, key: str | None, reach: Reach) -> Started:
    """Trigger a run."""
    return Started(workflows.start(api, name, body, key, reach))


@routes.get("/runs", about=WITHIN)
def list_runs(api: Api, query: RunQuery, reach: Reach) -> Page[RunView]:
    """List runs."""
    return runs.list_page(api, query, reach)


@routes.get("/runs/{id}", about=RUN)
def show_run(api: Api, id: UUID) -> RunAnswer:
    """Get the details of a run."""
    return runs.find(api, id)


@routes.post("/runs/{id}/cancel", about=RUN, status=202)
def cancel_run(api: Api, id: UUID) -> Asked:
    """Cancel a run."""
    return runs.cancel_run(api, id)


@routes.post("/runs/{id}/retry", about=RUN, status=202)
def retry_run(api: Api, id: UUID) -> Asked:
    """Retry the failed tasks of a run."""
    return runs.retry_run(api, id)


@routes.get("/runs/{id}/tasks", about=RUN)
def list_tasks(api: Api, id: UUID, query: RunTasksQuery) -> Page[TaskView]:
    """List the tasks of a run, in the order in which they were created."""
    api.backend.runs.progress(id.bytes)  # there is such a run
    wanted = TaskFilter(run=id)
    with api.reading() as connection:
        return Page(*insights.page_of_tasks(connection, wanted, limit=query.limit, before=query.cursor))


@routes.get("/runs/{id}/tasks/{name}/logs", about=RUN)
def task_logs(api: Api, id: UUID, name: str, query: LogsQuery) -> Log:
    """Get the log of a task of a run: of a fan-out, the one at `index`; of one `attempt`, or of all."""
    with api.reading() as connection:
        task = insights.find_step_task(connection, id, name, query.index)
        if task is None:
            steps = insights.list_steps(connection, id)
    if task is None:
        api.backend.runs.progress(id.bytes)  # there is such a run
        names = [step.name for step in steps]
        known = f"It has {name!r}, but no task {query.index} of it yet" if name in names else f"It has no task {name!r}"
        raise NotFound(f"Run {id}: {known}.{did_you_mean(name, names) if name not in names else ''}")
    return tasks.log_of(api, task.bytes, LogQuery(query.attempt, query.cursor))
