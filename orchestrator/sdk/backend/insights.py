"""What people see, each on a connection of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from datetime import datetime
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.domain.dag.definition import Definition
from orchestrator.domain.fleet.standby import Standby
from orchestrator.errors import ConfigurationError, NotFound
from orchestrator.settings import Settings
from orchestrator.store import audit, insights
from orchestrator.store.audit import AuditEntry, AuditFilter
from orchestrator.store.code import keys as run_keys
from orchestrator.store.code.keys import KeyedRun
from orchestrator.store.dag import workflows
from orchestrator.store.insights import (
    CodeView,
    CodeWorkflowView,
    Found,
    Lineage,
    LongTransaction,
    OpenRun,
    Overview,
    QueueCounts,
    RunDetail,
    RunFilter,
    StepView,
    TaskDetail,
    TaskFilter,
    WorkerView,
    ids,
    pressure,
)
from orchestrator.store.insights.ids import IdMatch, Kind
from orchestrator.store.insights.runs import RunPage, page_of_runs
from orchestrator.store.insights.tasks import TaskPage, page_of_tasks
from orchestrator.transport.connection import UNAVAILABLE, connect
from orchestrator.transport.health import RedisHealth, check_health
from orchestrator.transport.inspection import RedisView, inspect
from orchestrator.transport.keys import Keys
from orchestrator.transport.standbys import list_standbys

_TIMEOUT = 2.0
"""Seconds that a look at Redis may take."""


class InsightBackend:
    """What can be looked at."""

    def __init__(self, reading: Callable[[], AbstractContextManager[Connection]], settings: Settings) -> None:
        self._reading = reading
        self._settings = settings

    def page_of_tasks(self, wanted: TaskFilter, *, limit: int, before: UUID | None) -> TaskPage:
        """Return a page of tasks, open and ended, newest first; those of a run from the first."""
        with self._reading() as connection:
            return page_of_tasks(connection, wanted, limit=limit, before=before)

    def show_task(self, task: UUID) -> TaskDetail | None:
        """Show all that is known of one task."""
        with self._reading() as connection:
            return insights.show_task(connection, task)

    def lineage(self, task: UUID) -> Lineage:
        """Show what enqueued a task, and what it enqueued."""
        with self._reading() as connection:
            found = insights.show_task(connection, task)
            if found is None:
                raise NotFound.by_id("task", str(task))
            return insights.lineage(connection, task, found.parent_id, [one.attempt for one in found.attempts])

    def page_of_runs(self, wanted: RunFilter, *, limit: int, before: UUID | None) -> RunPage:
        """Return a page of runs, newest first."""
        with self._reading() as connection:
            return page_of_runs(connection, wanted, limit=limit, before=before)

    def show_run(self, run: UUID) -> RunDetail | None:
        """Show all that is known of one run but its steps and tasks."""
        with self._reading() as connection:
            return insights.show_run(connection, run)

    def list_steps(self, run: UUID) -> list[StepView]:
        """Show the steps of a run of a definition."""
        with self._reading() as connection:
            return insights.list_steps(connection, run)

    def definition_of_run(self, run: UUID) -> Definition | None:
        """Return the version that a run of a definition is of."""
        with self._reading() as connection:
            return workflows.of_run(connection, run.bytes)

    def show_code(self, run: UUID) -> CodeView | None:
        """Show what a run of a workflow as code was given, waits for, and came to."""
        with self._reading() as connection:
            return insights.show_code(connection, run)

    def list_queues(self) -> list[QueueCounts]:
        """Show what stands in each queue."""
        with self._reading() as connection:
            return insights.list_queues(connection)

    def list_workers(self) -> list[WorkerView]:
        """Show the fleet."""
        with self._reading() as connection:
            return insights.list_workers(connection)

    def list_code_workflows(self) -> list[CodeWorkflowView]:
        """List workflows that are code of live workers, or have open runs."""
        with self._reading() as connection:
            return insights.list_code_workflows(connection)

    def open_runs(self, workflows: Sequence[str], since: datetime | None) -> list[OpenRun]:
        """Return the open runs of workflows as code."""
        with self._reading() as connection:
            return insights.open_runs(connection, workflows, since)

    def count_open_others(self, workflows: Sequence[str], since: datetime | None) -> dict[str, int]:
        """Count the open runs of all other workflows as code."""
        with self._reading() as connection:
            return insights.count_open_others(connection, workflows, since)

    def search(self, text: str, limit: int, queues: str = "", workflows: str = "") -> Found:
        """Find tasks and runs by id, name, tag, or the text of an error, in queues and of workflows that begin so."""
        with self._reading() as connection:
            return insights.search(connection, text, limit, queues=queues, workflows=workflows)

    def ids_begin_with(self, kind: Kind, digits: str, most: int, within: str = "") -> list[IdMatch]:
        """Return the newest tasks or runs whose ids begin with these hexadecimal digits."""
        with self._reading() as connection:
            return ids.begin_with(connection, kind, digits, most, within)

    def enough_of_ids(self, kind: Kind, shown: Sequence[UUID]) -> int:
        """Return how many characters tell each of these ids from every other one that there is."""
        with self._reading() as connection:
            return ids.enough(connection, kind, shown)

    def runs_under(self, key: str) -> list[KeyedRun]:
        """Return the runs that were started under an id or key of people's own."""
        with self._reading() as connection:
            return run_keys.find(connection, key)

    def overview(self) -> Overview:
        """Show how the system is doing."""
        with self._reading() as connection:
            return insights.overview(connection)

    def audit(self, wanted: AuditFilter, *, limit: int, before: int | None) -> list[AuditEntry]:
        """Return lines of the audit log, newest first."""
        with self._reading() as connection:
            return audit.list_page(connection, wanted, limit=limit, before=before)

    def audit_after(self, wanted: AuditFilter, after: int) -> list[AuditEntry]:
        """Return the lines that came after one."""
        with self._reading() as connection:
            return audit.newer(connection, wanted, after)

    def connections(self) -> insights.Connections:
        """Return how many connections Postgres has open."""
        with self._reading() as connection:
            return insights.connections(connection)

    def long_transactions(self, seconds: float) -> list[LongTransaction]:
        """Return transactions that have been open for longer than this."""
        with self._reading() as connection:
            return insights.long_transactions(connection, seconds)

    def dead_rows(self) -> int:
        """Return how many rows of the table of open tasks wait to be vacuumed."""
        with self._reading() as connection:
            return insights.dead_rows(connection)

    def lock_holders(self) -> list[tuple[int, str, str]]:
        """Return who holds a lock on the tables."""
        with self._reading() as connection:
            return pressure.lock_holders(connection)

    def standbys(self) -> tuple[Standby, ...] | None:
        """Return the schedulers that stand by; None if Redis cannot say."""
        try:
            with closing(connect(self._settings.require_redis(), timeout=_TIMEOUT)) as redis:
                return tuple(list_standbys(redis, Keys.of(self._settings)))
        except (*UNAVAILABLE, ConfigurationError):
            return None

    def redis(self, generation: str | None, queues: Sequence[str]) -> tuple[RedisHealth, RedisView]:
        """Return how Redis is doing and what it holds; that it cannot be used is part of the answer."""
        try:
            with closing(connect(self._settings.require_redis(), timeout=_TIMEOUT)) as redis:
                keys = Keys.of(self._settings)
                health = check_health(redis, keys)
                return health, inspect(redis, keys, generation, queues) if health.reachable else RedisView()
        except (*UNAVAILABLE, ConfigurationError) as error:
            return RedisHealth(reachable=False, error=str(error)), RedisView()
