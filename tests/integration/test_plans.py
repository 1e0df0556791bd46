"""The leader's statements probe indexes, whatever the planner believes about the table.

A bad plan costs eight times as much as a good one (docs/hot-tables.md), and which one is made depends on when
statistics were last taken. So each statement is planned here in every state that a real table goes through.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import patch

import pytest
from sqlalchemy import Connection, Engine, create_engine, text

from orchestrator.domain.ids import time_ordered_id
from orchestrator.domain.states import TaskState
from orchestrator.domain.task import NewTask, Noted
from orchestrator.embedded import EmbeddedServices
from orchestrator.scheduler.leadership import Leadership
from orchestrator.store import completions, database, details, enqueue, runs, transitions, waiting
from orchestrator.store.inbox import Item, Wish
from orchestrator.store.statement import Rows, send
from orchestrator.store.transitions import Again, Beginning, Ending, Mark, Success

PENDING = 50_000
DELAYED = 2_000
IN_FLIGHT = 1_000
BATCH = 500
NOW = datetime.now(UTC)
RUN = uuid.UUID(int=1)

_FILL = f"""
INSERT INTO orchestrator.tasks (id, name, queue, payload, run_id, position, wake_at, hold)
SELECT gen_random_uuid(), 'job', 'q' || n % 3, 'payload', CASE WHEN n % 50 = 0 THEN '{RUN}'::uuid END, n,
       CASE WHEN n % 25 = 1 THEN now() + (n - {PENDING // 2}) * interval '1 second' END,
       CASE WHEN n % 1000 = 26 THEN 'unknown' END
  FROM generate_series(1, {PENDING}) AS n
"""
_ENDED = """
INSERT INTO orchestrator.ended_tasks (id, seq, name, queue, priority, status, attempt, failures, losses, payload,
                                      created_at, ended_at)
SELECT gen_random_uuid(), n, 'job', 'q', 0, CASE WHEN n % 10 = 0 THEN 'failed' ELSE 'success' END, 1, 0, 0, '',
       now(), now()
  FROM generate_series(1, 20000) AS n
"""


@dataclass
class Leader:
    """A leader's connection to a full table."""

    connection: Connection
    in_flight: list[tuple[bytes, int]]

    def plan(self, call: Callable[[Connection], object]) -> dict[str, Any]:
        """Return the plan by which the statement of a store function really ran, and undo what it did."""
        sent: list[tuple[str, Any]] = []

        def noting(connection: Connection, sql: str, parameters: dict[str, Any] | None = None) -> Rows:
            sent.append((sql, parameters))
            return send(connection, sql, parameters)

        with self.connection.begin_nested() as savepoint, patch("orchestrator.store.statement.send", noting):
            call(self.connection)
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


def fill(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text(_FILL))
        connection.execute(text(_ENDED))


def run_all(connection: Connection) -> None:
    """Have every statement planned, on whatever there is in the table."""
    leader = Leader(connection, [(os.urandom(16), 1)] * 3)
    for call in STATEMENTS.values():
        call(leader)(connection)


@pytest.fixture(
    scope="module",
    params=["never analysed", "analysed", "analysed when empty", "planned when empty", "planned when vacuumed"],
)
def leader(request: pytest.FixtureRequest, services: EmbeddedServices) -> Iterator[Leader]:
    name = f"plans_{uuid.uuid4().hex}"
    admin = create_engine(
        services.postgres.url.replace("postgresql:", "postgresql+psycopg2:"), isolation_level="AUTOCOMMIT"
    )
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} TEMPLATE orchestrator"))
    admin.dispose()
    engine = database.engine_for(services.postgres.database_url(name))
    leadership = Leadership(engine, lease=60.0)
    by_hand = engine.execution_options(isolation_level="AUTOCOMMIT")
    with by_hand.connect() as connection:
        for table in ("tasks", "ended_tasks"):  # autovacuum would change the state that is being tested
            connection.execute(text(f"ALTER TABLE orchestrator.{table} SET (autovacuum_enabled = off)"))
        if request.param in ("analysed when empty", "planned when vacuumed"):
            connection.execute(text("VACUUM ANALYZE"))
    if request.param.startswith("planned when"):
        with leadership.reading() as connection, connection.begin_nested() as savepoint:
            run_all(connection)
            savepoint.rollback()
    fill(engine)
    if request.param == "analysed":
        with by_hand.connect() as connection:
            connection.execute(text("ANALYZE"))
    with leadership.reading() as connection:
        claimed = transitions.claim(connection, {"q0": IN_FLIGHT // 2, "q1": IN_FLIGHT // 2}, NOW)
        started = [Beginning(task.id, task.attempt, 0.1, "w") for task in claimed[::2]]
        transitions.start(connection, started, NOW)
    with leadership.reading() as connection:
        yield Leader(connection, [(task.id, task.attempt) for task in claimed])
    leadership.disconnect()
    engine.dispose()


def new_tasks() -> list[NewTask]:
    return [NewTask(time_ordered_id(1_700_000_000_000, os.urandom(10)), "job", "q0", b"") for _ in range(BATCH)]


Call = Callable[[Leader], Callable[[Connection], object]]

BY_ID: dict[str, Call] = {
    "start": lambda leader: lambda c: transitions.start(c, [Beginning(*a, 0.1, "w") for a in leader.batch], NOW),
    "again": lambda leader: lambda c: transitions.again(c, [Again(*a, 1.0, 1) for a in leader.batch], NOW),
    "succeed": lambda leader: lambda c: transitions.succeed(c, [Success(*a, b"", 0.1, "w") for a in leader.batch], NOW),
    "fail": lambda leader: (
        lambda c: transitions.end(c, TaskState.FAILED, [Ending(*a, "why") for a in leader.batch], NOW)
    ),
    "cancel": lambda leader: (
        lambda c: transitions.end(c, TaskState.CANCELLED, [Ending(a[0], None, "why") for a in leader.batch], NOW)
    ),
    "policies": lambda leader: lambda c: waiting.policies(c, [task for task, _ in leader.batch]),
    "current": lambda leader: lambda c: waiting.current(c, leader.batch),
    "save details": lambda leader: lambda c: details.save(c, [Noted(*a, b"details") for a in leader.batch]),
    "find completions": lambda leader: (
        lambda c: completions.find(c, [Item(1, Wish.COMPLETE_TASK, task, 0.1, 0.5) for task, _ in leader.batch])
    ),
}
"""Statements that find their tasks one by one, by id."""

MARKS = {"q0": Mark(0, PENDING // 2, emptied=False), "q2": Mark(0, PENDING // 2, emptied=True)}

OTHERS: dict[str, Call] = {
    "claim": lambda _: lambda c: transitions.claim(c, {"q0": BATCH // 2, "q2": BATCH // 2, "none": 9}, NOW),
    "claim_behind": lambda _: lambda c: transitions.claim_behind(c, dict.fromkeys(MARKS, BATCH // 2), MARKS, NOW),
    "promote_due": lambda _: lambda c: waiting.promote_due(c, NOW + timedelta(days=30), BATCH),
    "agenda": lambda _: waiting.agenda,
    "in_flight": lambda _: waiting.in_flight,
    "overdue_unknown": lambda _: lambda c: waiting.overdue_unknown(c, NOW, BATCH),
    "release_known": lambda _: lambda c: waiting.release_known(c, [("q0", "another"), ("q1", "job")], BATCH),
    "adopt": lambda _: lambda c: enqueue.adopt_tasks(c, new_tasks(), NOW),
    "open_tasks": lambda _: lambda c: runs.open_tasks(c, [RUN.bytes], BATCH),
}
STATEMENTS = BY_ID | OTHERS


def nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", ()):
        yield from nodes(child)


def scans(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every node that reads rows of tasks or ended tasks."""
    tables = ("tasks", "ended_tasks")
    return [node for node in nodes(plan) if "Scan" in node["Node Type"] and node.get("Relation Name") in tables]


def rows_read(scan: dict[str, Any]) -> float:
    """Return how many rows a scan touched, those included that it then threw away."""
    removed = scan.get("Rows Removed by Filter", 0) + scan.get("Rows Removed by Index Recheck", 0)
    return float((scan["Actual Rows"] + removed) * scan["Actual Loops"])


@pytest.mark.parametrize("name", STATEMENTS)
def test_no_statement_reads_the_whole_table(leader: Leader, name: str) -> None:
    plan = leader.plan(STATEMENTS[name](leader))
    found = scans(plan)
    assert found, plan
    for scan in found:
        assert scan["Node Type"] != "Seq Scan", scan
        assert rows_read(scan) <= max(2 * BATCH, IN_FLIGHT, DELAYED), scan


@pytest.mark.parametrize("name", BY_ID)
def test_tasks_are_probed_by_id(leader: Leader, name: str) -> None:
    """One probe of an index for each id, not one pass over an index for the whole batch."""
    plan = leader.plan(STATEMENTS[name](leader))
    probes = [scan for scan in scans(plan) if "Index" in scan["Node Type"] and "(id = " in scan.get("Index Cond", "")]
    assert len(probes) == 1, plan
    assert probes[0]["Index Name"] in ("tasks_pkey", "tasks_in_flight")
    assert probes[0]["Actual Loops"] >= BATCH


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("claim", "tasks_ready"),
        ("claim_behind", "tasks_ready"),
        ("promote_due", "tasks_due"),
        ("release_known", "tasks_held"),
        ("in_flight", "tasks_in_flight"),
        ("open_tasks", "tasks_of_run"),
        ("adopt", "ended_tasks_pkey"),
    ],
)
def test_each_search_has_its_index(leader: Leader, name: str, index: str) -> None:
    used = {node.get("Index Name") for node in nodes(leader.plan(STATEMENTS[name](leader)))}
    assert index in used


def test_the_agenda_is_one_probe_each(leader: Leader) -> None:
    found = scans(leader.plan(STATEMENTS["agenda"](leader)))
    assert {scan["Index Name"] for scan in found} == {"tasks_due", "tasks_held", "tasks_expiring"}
    assert all(rows_read(scan) <= 1 for scan in found)
