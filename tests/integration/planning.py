"""How statements of the leader are really planned, in every state of statistics that a real table goes through."""

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
    """Have the planner believe in so many rows a page: it looks at the real number of pages itself."""
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
"""What the planner may believe of full tables, true or not. "Nearly empty" is a table that was large, was analysed when
a few rows were left, and has filled again."""
STATES = [
    *("never analysed", "nearly empty", "planned when empty"),
    *(pytest.param(one, marks=pytest.mark.long) for one in ("analysed", "analysed when empty", "huge")),
    pytest.param("planned when vacuumed", marks=pytest.mark.long),
]
"""In which statements are run, and what they read is counted. `test_plans_of_the_leader.py` looks at the plans of all
statements in all states of statistics, in each build."""


@dataclass
class Leader:
    """A leader's connection to full tables."""

    connection: Connection
    in_flight: list[tuple[bytes, int]]
    is_misled: bool = False
    """Its plans were made by a Postgres before 18 when it had vacuumed empty tables: any index of those costs the same,
    until the first ANALYZE."""

    def plan(self, call: Callable[[Connection], object]) -> dict[str, Any]:
        """Return the plan by which the statement of a store function really ran, and undo what it did."""
        sent: list[tuple[str, Any]] = []

        send = Channel.send

        def noting(
            channel: Channel, connection: Connection, sql: str, parameters: dict[str, Any] | None = None
        ) -> StatementResult:
            sent.append((sql, parameters))
            return send(channel, connection, sql, parameters)

        def note(*arguments: Any) -> None:
            if not arguments[2].startswith("PREPARE"):
                sent.append((arguments[2], arguments[3]))

        with self.connection.begin_nested() as savepoint, patch.object(Channel, "send", noting):
            event.listen(self.connection, "before_cursor_execute", note)
            try:
                call(self.connection)
            finally:
                event.remove(self.connection, "before_cursor_execute", note)
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
    """Yield a function that returns a leader with statistics in a state; `begin` puts tasks in flight.

    All states of statistics are those of one database. One in which plans were made before it was filled is another.
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
    """Yield a leader of a database of its own, filled, and an engine for what people do there."""
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
    leadership = Leadership(engine, lease=600.0)  # it waits in its transaction
    by_hand = engine.execution_options(isolation_level="AUTOCOMMIT")
    with by_hand.connect() as connection:
        for table in metadata.tables.values():  # autovacuum would change the state that is being tested
            connection.execute(text(f"ALTER TABLE {table.fullname} SET (autovacuum_enabled = off)"))
        if state == "planned when vacuumed":
            connection.execute(text("VACUUM ANALYZE"))
    if state.startswith("planned when"):
        with leadership.reading() as connection, connection.begin_nested() as savepoint:
            nobody = Leader(connection, [(os.urandom(16), 1)] * 3)
            for call in statements.values():
                call(nobody)(connection)
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
    """Return how Postgres would run the statements of functions that only read."""
    sent = _sent(connection, *calls)
    plans = [connection.exec_driver_sql(f"EXPLAIN {statement}", parameters) for statement, parameters in sent]
    return ["\n".join(row[0] for row in plan) for plan in plans]


def _sent(connection: Connection, *calls: Callable[[Any], object]) -> list[tuple[str, Any]]:
    """Return the statements of functions that only read, and what they were given."""
    sent: list[tuple[str, Any]] = []

    def noting(statement: Statement[Any], _: Connection, values: dict[str, Any]) -> StatementResult:
        sent.append((statement.sql, values))
        return StatementResult()

    with patch.object(Statement, "_send", noting):
        for call in calls:
            call(connection)
    return sent


def measured(connection: Connection, *calls: Callable[[Any], object]) -> list[dict[str, Any]]:
    """Return how Postgres has run the statements of functions that only read."""
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
    """Return every node that reads rows of these tables."""
    return [node for node in nodes(plan) if "Scan" in node["Node Type"] and node.get("Relation Name") in tables]


def rows_read(scan: dict[str, Any]) -> float:
    """Return how many rows a scan touched, those included that it then threw away."""
    removed = scan.get("Rows Removed by Filter", 0) + scan.get("Rows Removed by Index Recheck", 0)
    return float((scan["Actual Rows"] + removed) * scan["Actual Loops"])
