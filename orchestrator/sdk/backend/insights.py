"""What people see, each on a connection of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.domain.dag.definition import Definition
from orchestrator.domain.fleet.standby import Standby
from orchestrator.errors import ConfigurationError, NotFound
from orchestrator.sdk.calls.insights import InsightCalls
from orchestrator.settings import Settings
from orchestrator.store import audit as audit_log
from orchestrator.store import insights
from orchestrator.store.code import keys as run_keys
from orchestrator.store.dag import workflows
from orchestrator.store.insights import Lineage, ids, pressure
from orchestrator.transport.connection import UNAVAILABLE, connect
from orchestrator.transport.health import RedisHealth, check_health
from orchestrator.transport.inspection import RedisView, inspect
from orchestrator.transport.keys import Keys
from orchestrator.transport.standbys import list_standbys

P = ParamSpec("P")
T = TypeVar("T")
_TIMEOUT = 2.0
"""Seconds that a look at Redis may take."""


def _read(find: Callable[Concatenate[Connection, P], T]) -> Callable[Concatenate[InsightBackend, P], T]:
    """Return a method that finds something, on a connection of its own."""

    @wraps(find)
    def method(self: InsightBackend, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._reading() as connection:
            return find(connection, *args, **kwargs)

    return method


class InsightBackend(InsightCalls):
    """What can be looked at."""

    def __init__(self, reading: Callable[[], AbstractContextManager[Connection]], settings: Settings) -> None:
        self._reading = reading
        self._settings = settings

    page_of_tasks = _read(insights.page_of_tasks)
    show_task = _read(insights.show_task)
    page_of_runs = _read(insights.page_of_runs)
    show_run = _read(insights.show_run)
    list_steps = _read(insights.list_steps)
    show_code = _read(insights.show_code)
    list_queues = _read(insights.list_queues)
    list_workers = _read(insights.list_workers)
    list_code_workflows = _read(insights.list_code_workflows)
    open_runs = _read(insights.open_runs)
    count_open_others = _read(insights.count_open_others)
    search = _read(insights.search)
    ids_begin_with = _read(ids.begin_with)
    enough_of_ids = _read(ids.enough)
    runs_under = _read(run_keys.find)
    overview = _read(insights.overview)
    audit = _read(audit_log.list_page)
    audit_after = _read(audit_log.newer)
    connections = _read(insights.connections)
    long_transactions = _read(insights.long_transactions)
    dead_rows = _read(insights.dead_rows)
    lock_holders = _read(pressure.lock_holders)

    def lineage(self, task: UUID) -> Lineage:
        with self._reading() as connection:
            found = insights.show_task(connection, task)
            if found is None:
                raise NotFound.by_id("task", str(task))
            return insights.lineage(connection, task, found.parent_id, [one.attempt for one in found.attempts])

    def definition_of_run(self, run: UUID) -> Definition | None:
        with self._reading() as connection:
            return workflows.of_run(connection, run.bytes)

    def standbys(self) -> tuple[Standby, ...] | None:
        """Return the schedulers that stand by; None if Redis cannot say."""
        try:
            with closing(connect(self._settings.require_redis(), timeout=_TIMEOUT)) as redis:
                return tuple(list_standbys(redis, Keys.of(self._settings)))
        except (*UNAVAILABLE, ConfigurationError):
            return None

    def redis(self, generation: str | None, queues: Sequence[str]) -> tuple[RedisHealth, RedisView]:
        try:
            with closing(connect(self._settings.require_redis(), timeout=_TIMEOUT)) as redis:
                keys = Keys.of(self._settings)
                health = check_health(redis, keys)
                return health, inspect(redis, keys, generation, queues) if health.reachable else RedisView()
        except (*UNAVAILABLE, ConfigurationError) as error:
            return RedisHealth(reachable=False, error=str(error)), RedisView()
