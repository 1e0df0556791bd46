"""Query plans of the leader's statements, for every state that the statistics of a real table may have."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from sqlalchemy import Connection, Engine, event, text

from orchestrator.embedded import EmbeddedServices
from orchestrator.scheduler.leadership import Leadership
from orchestrator.store import database
from orchestrator.store.driver import Channel, StatementResult
from orchestrator.store.sql import Statement
from orchestrator.store.tables.all_tables import metadata
from tests.databases import new_database

BATCH = 500
_OURS = "(SELECT oid FROM pg_class WHERE relnamespace = 'orchestrator'::regnamespace AND relkind IN ('r', 'i'))"
_NOTHING_OF_COLUMNS = f"DELETE FROM pg_statistic WHERE starelid IN {_OURS}"
_NO_HISTOGRAMS = ", ".join(f"stakind{n} = 0, stanumbers{n} = NULL, stavalues{n} = NULL" for n in range(1, 6))


def _size(tuples: float, pages: int) -> str:
    """Return SQL that sets the planner's estimate of rows per page; Postgres reads the real number of pages itself."""
    return f"UPDATE pg_class SET reltuples = {tuples}, relpages = {pages} WHERE oid IN {_OURS}"


def _columns(nulls: int, distinct: int) -> str:
    values = f"stanullfrac = {nulls}, stadistinct = {distinct}, {_NO_HISTOGRAMS}"
    return f"UPDATE pg_statistic SET {values} WHERE starelid IN {_OURS}"


_SPARSE, _HUGE = _size(1, 100_000), _size(1e9, 1)
STATISTICS = {
    "never analysed": [_NOTHING_OF_COLUMNS, _size(-1, 0)],
    "analysed": ["ANALYZE"],
    "analysed when empty": [_NOTHING_OF_COLUMNS, _size(0, 0)],
    "nearly empty": ["ANALYZE", _SPARSE],
    "nearly empty, columns unknown": [_NOTHING_OF_COLUMNS, _SPARSE],
    "nearly empty, columns null": ["ANALYZE", _columns(1, 0), _SPARSE],
    "huge": ["ANALYZE", _HUGE],
    "huge, one value a column": ["ANALYZE", _columns(0, 1), _HUGE],
}
"""Statistics set for full tables, true or false. "Nearly empty" is a table that was large, was analyzed when a few rows
were left, and has filled again."""
STATES = [
    *("never analysed", "nearly empty", "planned when empty"),
    *(pytest.param(state_name, marks=pytest.mark.long) for state_name in ("analysed", "analysed when empty", "huge")),
    pytest.param("planned when vacuumed", marks=pytest.mark.long),
]
"""States in which tests run the statements and count the rows read. `test_plans_of_the_leader.py` checks the plans of
all statements in all states of statistics, in each build."""


@dataclass
class Leader:
    """A leader's connection to full tables."""

    connection: Connection
    in_flight: list[tuple[bytes, int]]
    is_misled: bool = False
    """Whether Postgres before 18 made the plans after it had vacuumed empty tables: all indexes of an empty table cost
    the same, until the first ANALYZE."""

    def plan(self, call: Callable[[Connection], object]) -> dict[str, Any]:
        """Run a store function, then EXPLAIN ANALYZE its first statement; roll both back and return the plan."""
        sent: list[tuple[str, Any]] = []

        send = Channel.send

        def record_send(
            channel: Channel, connection: Connection, sql: str, parameters: dict[str, Any] | None = None
        ) -> StatementResult:
            sent.append((sql, parameters))
            return send(channel, connection, sql, parameters)

        def record_execute(*arguments: Any) -> None:
            if not arguments[2].startswith("PREPARE"):
                sent.append((arguments[2], arguments[3]))

        with self.connection.begin_nested() as savepoint, patch.object(Channel, "send", record_send):
            event.listen(self.connection, "before_cursor_execute", record_execute)
            try:
                call(self.connection)
            finally:
                event.remove(self.connection, "before_cursor_execute", record_execute)
            savepoint.rollback()
        statement, parameters = sent[0]
        with self.connection.begin_nested() as savepoint:
            explained = self.connection.exec_driver_sql(
                f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {statement}", parameters
            ).scalar_one()
            savepoint.rollback()
        plan: dict[str, Any] = explained[0]["Plan"]
        return plan

    @property
    def batch(self) -> list[tuple[bytes, int]]:
        return self.in_flight[:BATCH]

    @property
    def ids(self) -> list[bytes]:
        return [task for task, _ in self.batch]


Call = Callable[[Leader], Callable[[Connection], object]]


@contextmanager
def leaders_of(
    services: EmbeddedServices,
    fill: Sequence[str],
    begin: Callable[[Connection], list[tuple[bytes, int]]],
    statements: Mapping[str, Call],
) -> Iterator[Callable[[str], Leader]]:
    """Yield a function that returns a leader for a state of statistics; `begin` puts tasks in flight.

    All states of statistics share one database. States that begin with "planned when" each get their own.
    """
    with ExitStack() as databases:
        make = partial(_leader, services, fill=fill, begin=begin, statements=statements)
        filled: list[tuple[Leader, Engine]] = []

        def leader(state: str) -> Leader:
            if state not in STATISTICS:
                return databases.enter_context(make(state))[0]
            if not filled:
                filled.append(databases.enter_context(make(state)))
            found, by_hand = filled[0]
            with by_hand.connect() as connection:
                for statement in STATISTICS[state]:
                    connection.exec_driver_sql(statement)
            return found

        yield leader


@contextmanager
def _leader(
    services: EmbeddedServices,
    state: str,
    *,
    fill: Sequence[str],
    begin: Callable[[Connection], list[tuple[bytes, int]]],
    statements: Mapping[str, Call],
) -> Iterator[tuple[Leader, Engine]]:
    """Yield a leader of a new, filled database, and an autocommit engine of that database."""
    major = int((services.postgres.data / "PG_VERSION").read_text())
    with new_database(services, "plans", "orchestrator") as url:
        engine = database.engine_for(url)
        yield from _leader_of(engine, state, major, fill, begin, statements)
        engine.dispose()


def _leader_of(
    engine: Engine,
    state: str,
    major: int,
    fill: Sequence[str],
    begin: Callable[[Connection], list[tuple[bytes, int]]],
    statements: Mapping[str, Call],
) -> Iterator[tuple[Leader, Engine]]:
    leadership = Leadership(engine, lease=600.0)  # the transaction stays open
    by_hand = engine.execution_options(isolation_level="AUTOCOMMIT")
    with by_hand.connect() as connection:
        for table in metadata.tables.values():  # autovacuum would change the statistics
            connection.execute(text(f"ALTER TABLE {table.fullname} SET (autovacuum_enabled = off)"))
        if state == "planned when vacuumed":
            connection.execute(text("VACUUM ANALYZE"))
    if state.startswith("planned when"):
        with leadership.reading() as connection, connection.begin_nested() as savepoint:
            planner = Leader(connection, [(os.urandom(16), 1)] * 3)
            for call in statements.values():
                call(planner)(connection)
            savepoint.rollback()
    with engine.begin() as connection:
        for statement in fill:
            connection.execute(text(statement))
    with leadership.reading() as connection:
        in_flight = begin(connection)
    with leadership.reading() as connection:
        connection.exec_driver_sql("SET statement_timeout = '10s'")
        yield Leader(connection, in_flight, is_misled=state == "planned when vacuumed" and major < 18), by_hand
    leadership.disconnect()


def explained(connection: Connection, *calls: Callable[[Any], object]) -> list[str]:
    """Return the EXPLAIN output of the statements that read-only functions send."""
    sent = _sent(connection, *calls)
    plans = [connection.exec_driver_sql(f"EXPLAIN {statement}", parameters) for statement, parameters in sent]
    return ["\n".join(row[0] for row in plan) for plan in plans]


def _sent(connection: Connection, *calls: Callable[[Any], object]) -> list[tuple[str, Any]]:
    """Return the statements of read-only functions, with their parameters."""
    sent: list[tuple[str, Any]] = []

    def record_send(statement: Statement[Any], _: Connection, values: dict[str, Any]) -> StatementResult:
        sent.append((statement.sql, values))
        return StatementResult()

    with patch.object(Statement, "_send", record_send):
        for call in calls:
            call(connection)
    return sent


def measured(connection: Connection, *calls: Callable[[Any], object]) -> list[dict[str, Any]]:
    """Return the EXPLAIN ANALYZE plans of the statements that read-only functions send."""
    return [
        connection.exec_driver_sql(
            f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) {statement}", parameters
        ).scalar_one()[0]["Plan"]
        for statement, parameters in _sent(connection, *calls)
    ]


def nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", ()):
        yield from nodes(child)


def scans(plan: dict[str, Any], *tables: str) -> list[dict[str, Any]]:
    """Return all plan nodes that read rows of these tables."""
    return [node for node in nodes(plan) if "Scan" in node["Node Type"] and node.get("Relation Name") in tables]


def rows_read(scan: dict[str, Any]) -> float:
    """Return how many rows a scan touched, including rows that a filter removed."""
    removed = scan.get("Rows Removed by Filter", 0) + scan.get("Rows Removed by Index Recheck", 0)
    return float((scan["Actual Rows"] + removed) * scan["Actual Loops"])
