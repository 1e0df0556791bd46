"""Read queries for people and monitoring, each on a connection of its own."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.domain.dag.definition import Definition
from orchestrator.domain.fleet.announced import Standby
from orchestrator.errors import ConfigurationError, InvalidTask, NotFound
from orchestrator.sdk.backend.part import Part, reading
from orchestrator.sdk.calls.insights import HandlingAct, InsightCalls
from orchestrator.store import audit as audit_log
from orchestrator.store import insights
from orchestrator.store.code import keys as run_keys
from orchestrator.store.dag import workflows
from orchestrator.store.insights import Lineage, lookup, server
from orchestrator.store.insights.failures import HANDLED, list_failures, target_of
from orchestrator.store.load import queue_demands
from orchestrator.transport.announcements import list_standbys
from orchestrator.transport.connection import UNAVAILABLE
from orchestrator.transport.inspection import RedisHealth, RedisView, connected_shards, distinct, inspect_all

_TIMEOUT = 2.0
"""Seconds for reads from Redis, at most."""


def _lineage(connection: Connection, task: UUID) -> Lineage:
    found = insights.show_task(connection, task)
    if found is None:
        raise NotFound.by_id("task", str(task))
    return insights.lineage(connection, task, found.parent_id, [attempt.attempt for attempt in found.attempts])


def _definition_of_run(connection: Connection, run: UUID) -> Definition | None:
    return workflows.of_run(connection, run.bytes)


class InsightBackend(Part, InsightCalls):
    """Read calls about all subjects."""

    page_of_tasks = reading(insights.page_of_tasks)
    show_task = reading(insights.show_task)
    page_of_runs = reading(insights.page_of_runs)
    show_run = reading(insights.show_run)
    list_steps = reading(insights.list_steps)
    show_code = reading(insights.show_code)
    list_queues = reading(insights.list_queues)
    queue_demands = reading(queue_demands)
    list_workers = reading(insights.list_workers)
    list_code_workflows = reading(insights.list_code_workflows)
    open_runs = reading(insights.open_runs)
    sample_runs = reading(insights.sample_runs)
    count_open_others = reading(insights.count_open_others)
    search = reading(insights.search)
    ids_begin_with = reading(lookup.find_by_partial_id)
    enough_of_ids = reading(lookup.distinguishing_length)
    runs_under = reading(run_keys.find)
    overview = reading(insights.overview)
    audit = reading(audit_log.list_page)
    audit_after = reading(audit_log.newer)
    connections = reading(insights.connections)
    long_transactions = reading(insights.long_transactions)
    dead_rows = reading(insights.dead_rows)
    lock_holders = reading(server.lock_holders)
    lineage = reading(_lineage)
    definition_of_run = reading(_definition_of_run)
    failures = reading(list_failures)

    def handle_failures(
        self, name: str, queue: str, kind: str, act: HandlingAct, until: datetime | None = None
    ) -> None:
        if (act == "snooze") != (until is not None):
            raise InvalidTask("Snoozing failures needs a time `until`; other decisions accept none.")
        detail = {} if until is None else {"until": until.isoformat(timespec="seconds")}
        with self._connections.writing("the decision was stored", transaction=True) as connection:
            self._connections.record(connection, act, HANDLED, target_of((name, queue, kind)), **detail)

    def standbys(self) -> tuple[Standby, ...] | None:
        """Return the standby schedulers; None if Redis is unavailable."""
        try:
            with connected_shards(self._settings, _TIMEOUT) as shards:
                return distinct(list_standbys(redis, keys) for redis, keys in shards)
        except (*UNAVAILABLE, ConfigurationError):
            return None

    def redis(self, generation: str | None, queues: Sequence[str]) -> tuple[RedisHealth, RedisView]:
        try:
            with connected_shards(self._settings, _TIMEOUT) as shards:
                return inspect_all(shards, generation, queues)
        except (*UNAVAILABLE, ConfigurationError) as error:
            return RedisHealth(reachable=False, error=str(error)), RedisView()
