"""Empties tables between tests."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection

from orchestrator.domain.states import IN_FLIGHT_STATES
from orchestrator.store.sql import Statement
from orchestrator.store.tables.all_tables import metadata
from orchestrator.store.tasks.transitions import among

TABLES = [table.name for table in metadata.sorted_tables]
"""All tables of a release."""
_KEPT_TABLES = frozenset(("api_keys", "cursors", "leases", "services", "workers"))
"""Tables of the leader, the workers, access and the position in the events."""
_OPEN = ("backfills", "flows", "inbox", "queues", "schedules", "tasks", "timers", "workflows")
"""Tables with rows that a leader may have cached or dispatched."""


def empty(connection: Connection, *only: str) -> None:
    """Delete all rows, in one statement.

    TRUNCATE makes a file for each index, so it is used only for large tables and for tables with statistics: after a
    DELETE, Postgres would keep planning for an empty table.
    """
    names = only or TABLES
    connection.exec_driver_sql(f"""DO $$
DECLARE large text := (SELECT string_agg(oid::regclass::text, ', ') FROM pg_class
    WHERE relnamespace = 'orchestrator'::regnamespace AND relname IN ({", ".join(f"'{name}'" for name in names)})
      AND relkind = 'r' AND (pg_relation_size(oid) > 250000 OR reltuples >= 0));
BEGIN
    IF large IS NOT NULL THEN EXECUTE 'TRUNCATE ' || large; END IF;
    {"".join(f"DELETE FROM orchestrator.{name}; " for name in names)}
END $$""")


_LOCK = Statement[int]("SELECT /* emptying.lock */ term FROM orchestrator.leases FOR UPDATE")
_IS_OPEN = Statement[bool](
    "SELECT /* emptying.is_open */ "
    + " OR ".join(f"EXISTS (SELECT FROM orchestrator.{name})" for name in _OPEN)
    + " OR EXISTS (SELECT FROM orchestrator.runs WHERE ended_at IS NULL)"
)
_IS_IN_FLIGHT = Statement[bool](
    "SELECT /* emptying.is_in_flight */ EXISTS ("
    f"SELECT FROM orchestrator.tasks WHERE status IN {among(IN_FLIGHT_STATES)})"
)
_DEPOSE = Statement[None](
    "UPDATE /* emptying.depose */ orchestrator.leases SET term = term + 1, expires_at = now() - interval '1 second'"
)


def empty_beside_leader(connection: Connection, end_attempts: Callable[[], None]) -> bool:
    """Delete all rows between two ticks of a running leader. Return whether anything was open or defined.

    In that case the leader's term ends, because the leader and workers may have cached or started something; the caller
    must empty Redis too. `end_attempts` is called if attempts are in flight, and must kill them, so that nothing runs
    or enqueues after this returns.
    """
    _LOCK(connection)
    is_open = _IS_OPEN.one(connection)
    if is_open:
        if _IS_IN_FLIGHT.one(connection):
            end_attempts()
        _DEPOSE(connection)
    empty(connection, *(name for name in TABLES if name not in _KEPT_TABLES))
    return is_open
