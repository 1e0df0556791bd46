"""Read-only queries for people: tasks, runs, queues, workers and the system as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Literal, Protocol
from uuid import UUID

from msgspec import Meta

from orchestrator.domain.access import Scope
from orchestrator.domain.dag.definition import Definition
from orchestrator.domain.plain import anchored
from orchestrator.sdk.calls.checked import QueueName
from orchestrator.sdk.calls.declaring import SYSTEM, Kind, Rest, Wrapped, call
from orchestrator.store.audit import AuditEntry, AuditFilter
from orchestrator.store.code.keys import KeyedRun
from orchestrator.store.insights import (
    CodeRun,
    CodeView,
    CodeWorkflowView,
    Connections,
    Found,
    Lineage,
    LongTransaction,
    Overview,
    QueueCounts,
    RunDetail,
    RunFilter,
    StepView,
    TaskDetail,
    TaskFilter,
    WorkerView,
)
from orchestrator.store.insights.failures import Failures
from orchestrator.store.insights.lookup import IdMatch
from orchestrator.store.insights.lookup import Kind as IdKind
from orchestrator.store.insights.run_lists import RunPage
from orchestrator.store.insights.tasks import TaskPage
from orchestrator.store.load import QueueDemand
from orchestrator.transport.inspection import RedisHealth, RedisView

Limit = Annotated[int, Meta(ge=1, le=10_000)]
Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Text = Annotated[str, Meta(min_length=1, max_length=500)]
HandlingAct = Literal["acknowledge", "snooze", "reopen"]
Digits = Annotated[str, Meta(pattern=anchored("[0-9a-f]{1,32}"))]


class InsightCalls(Protocol):
    """Read calls about all subjects."""

    @call(within={"wanted.within": Kind.TASK})
    def page_of_tasks(self, wanted: TaskFilter, *, limit: Limit, before: UUID | None) -> TaskPage:
        """Return a page of open and ended tasks, newest first; for a run, in the order of the run."""

    @call(about={Kind.TASK: "task"})
    def show_task(self, task: UUID) -> TaskDetail | None:
        """Show the details of a task."""

    @call(
        about={Kind.TASK: "task"},
        keeps={Kind.LINEAGE: ""},
        rest=Rest(
            "GET /tasks/{id}/lineage",
            name="task_lineage",
            tag="tasks",
            summary="Show what enqueued a task, and what it enqueued: the first of it, by each of its last attempts",
        ),
    )
    def lineage(self, task: UUID) -> Lineage:
        """Show the origin of a task, and the tasks and runs that it started."""

    @call(within={"wanted.within": Kind.WORKFLOW})
    def page_of_runs(self, wanted: RunFilter, *, limit: Limit, before: UUID | None) -> RunPage:
        """Return a page of runs, newest first."""

    @call(about={Kind.RUN: "run"})
    def show_run(self, run: UUID) -> RunDetail | None:
        """Show the details of a run, except its steps and tasks."""

    @call(about={Kind.RUN: "run"})
    def list_steps(self, run: UUID) -> list[StepView]:
        """Show the steps of a run of a DAG workflow."""

    @call(about={Kind.RUN: "run"})
    def definition_of_run(self, run: UUID) -> Definition | None:
        """Return the workflow definition of a run, in the version of the run."""

    @call(about={Kind.RUN: "run"})
    def show_code(self, run: UUID) -> CodeView | None:
        """Show the arguments, waits and result of a run of a workflow as code."""

    @call(
        within={"within": Kind.QUEUE},
        rest=Rest(
            "GET /queues",
            name="list_queues",
            tag="queues",
            answer=Wrapped("Queues", "queues", "Every queue that has open tasks, workers or settings."),
        ),
    )
    def list_queues(self) -> list[QueueCounts]:
        """Show the number of tasks in each queue, by state."""

    @call(
        within={"within": Kind.QUEUE},
        rest=Rest(
            "GET /queues/wanted",
            name="wanted_slots",
            tag="queues",
            answer=Wrapped("Demands", "queues", "Every queue that has open tasks or workers."),
        ),
    )
    def queue_demands(self) -> list[QueueDemand]:
        """Estimate how many slots each queue needs, from the arrival rate, run times and waiting times of its tasks."""

    @call(
        about=SYSTEM,
        rest=Rest(
            "GET /workers",
            name="workers",
            tag="workers",
            answer=Wrapped("Workers", "workers", "The fleet, as the leader last saw it."),
        ),
    )
    def list_workers(self) -> list[WorkerView]:
        """Show the workers."""

    @call(keeps={Kind.WORKFLOW: "name"})
    def list_code_workflows(self) -> list[CodeWorkflowView]:
        """List workflows as code that live workers have, or that have open runs."""

    @call(keeps={Kind.WORKFLOW: "workflow"}, expensive=True)
    def open_runs(self, workflows: Sequence[str], since: datetime | None) -> list[CodeRun]:
        """Return the open runs of workflows as code."""

    @call(keeps={Kind.WORKFLOW: "workflow"}, expensive=True)
    def sample_runs(self, workflows: Sequence[str], since: datetime | None, limit: Limit) -> list[CodeRun]:
        """Return the newest and the longest runs of each version of workflows as code."""

    @call(keeps={Kind.WORKFLOW: ""})
    def count_open_others(self, workflows: Sequence[str], since: datetime | None) -> dict[str, int]:
        """Count the open runs of all other workflows as code."""

    @call(within={"queues": Kind.QUEUE, "workflows": Kind.WORKFLOW}, expensive=True)
    def search(self, text: Text, limit: Limit) -> Found:
        """Find tasks and runs by id, name, tag, or the text of an error."""

    @call(within={"within": Kind.TASK_OR_RUN})
    def ids_begin_with(self, kind: IdKind, digits: Digits, most: Limit) -> list[IdMatch]:
        """Return the newest tasks or runs whose ids begin with these hexadecimal digits, or else end with them."""

    @call(bound_result=36, expensive=True)
    def enough_of_ids(self, kind: IdKind, shown: Sequence[UUID]) -> int:
        """Return the length of the shortest prefix that distinguishes these ids from all others."""

    @call(keeps={Kind.WORKFLOW: "workflow"})
    def runs_under(self, key: str) -> list[KeyedRun]:
        """Return the runs that were started with a key."""

    @call(within={"within": Kind.QUEUE}, expensive=True)
    def failures(self, since: datetime, until: datetime | None = None) -> Failures:
        """Return failures in a period, grouped by task, queue and error, and whether each group was acknowledged."""

    @call(Scope.OPERATE, about={Kind.QUEUE: "queue"}, repeatable=True)
    def handle_failures(
        self, name: Text, queue: QueueName, kind: str, act: HandlingAct, until: datetime | None = None
    ) -> None:
        """Acknowledge failures of a task with one type of error, snooze them until a time, or reopen them."""

    @call(about=SYSTEM)
    def overview(self) -> Overview:
        """Show the state of the system."""

    @call(about=SYSTEM)
    def redis(self, generation: str | None, queues: Sequence[str]) -> tuple[RedisHealth, RedisView]:
        """Return the health and content of Redis. An outage of Redis is part of the answer, not an error."""

    @call(Scope.ADMIN, about=SYSTEM, repeatable=True)
    def audit(self, wanted: AuditFilter, *, limit: Limit, before: Number | None) -> list[AuditEntry]:
        """Return entries of the audit log, newest first."""

    @call(Scope.ADMIN, about=SYSTEM, repeatable=True)
    def audit_after(self, wanted: AuditFilter, after: Number) -> list[AuditEntry]:
        """Return the entries of the audit log after an entry."""

    @call(about=SYSTEM)
    def connections(self) -> Connections:
        """Return the number of open connections of Postgres."""

    @call(about=SYSTEM)
    def long_transactions(self, seconds: float) -> list[LongTransaction]:
        """Return transactions that have been open for longer than `seconds`."""

    @call(about=SYSTEM)
    def dead_rows(self) -> int:
        """Return the number of dead rows in the table of open tasks."""

    @call(about=SYSTEM)
    def lock_holders(self) -> list[tuple[int, str, str]]:
        """Return the database sessions that hold locks on the tables."""


def list_tasks(insights: InsightCalls, wanted: TaskFilter, *, limit: int, before: UUID | None = None) -> TaskPage:
    """Return up to `limit` tasks that match. Read as many pages as necessary."""
    return TaskPage(*_gather(partial(insights.page_of_tasks, wanted), limit, before))


def list_runs(insights: InsightCalls, wanted: RunFilter, *, limit: int, before: UUID | None = None) -> RunPage:
    """Return up to `limit` runs that match. Read as many pages as necessary."""
    return RunPage(*_gather(partial(insights.page_of_runs, wanted), limit, before))


def _gather(read: Callable[..., Any], limit: int, before: UUID | None) -> tuple[list[Any], UUID | None]:
    found: list[Any] = []
    while True:
        items, before = read(limit=limit - len(found), before=before)
        found += items
        if before is None or len(found) == limit:
            return found, before
