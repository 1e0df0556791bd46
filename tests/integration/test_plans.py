"""The leader's statements use index scans, whatever statistics the planner has.

A bad plan costs eight times as much as a good one (docs/hot-tables.md), and the choice depends on when statistics were
last taken. So each statement is planned in every state that a real table goes through.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Connection

from orchestrator.domain.ids import time_ordered_id
from orchestrator.domain.states import TaskState
from orchestrator.domain.tasks.task import NewTask, Noted
from orchestrator.embedded import EmbeddedServices
from orchestrator.store import leases
from orchestrator.store.inbox import Request, RequestKind
from orchestrator.store.leases import Cursor
from orchestrator.store.runs import cancels
from orchestrator.store.tasks import claims, completions, details, enqueue, transitions, waiting
from orchestrator.store.tasks.claims import ClaimPosition
from orchestrator.store.tasks.transitions import AttemptEnd, AttemptStart, Requeue, Success
from tests.integration.planning import BATCH, STATES, Call, Leader, leaders_of, nodes, rows_read, scans

PENDING = 50_000
DELAYED = 2_000
IN_FLIGHT = 1_000
NOW = datetime.now(UTC)
RUN = uuid.UUID(int=1)
TABLES = ("tasks", "ended_tasks")

_FILL = f"""
INSERT INTO orchestrator.tasks (id, name, queue, payload, run_id, position, wake_at, hold)
SELECT gen_random_uuid(), 'job', 'q' || n % 3, 'payload', CASE WHEN n % 50 = 0 THEN '{RUN}'::uuid END, n,
       CASE WHEN n % 25 = 1 THEN now() + (n - {PENDING // 2}) * interval '1 second' END,
       CASE WHEN n % 1000 = 26 THEN 'unknown' WHEN n % 1000 = 51 THEN 'crowded' END
  FROM generate_series(1, {PENDING}) AS n
"""
_ENDED = """
INSERT INTO orchestrator.ended_tasks (id, seq, name, queue, priority, status, attempt, failures, losses, payload,
                                      created_at, ended_at)
SELECT gen_random_uuid(), n, 'job', 'q', 0, CASE WHEN n % 10 = 0 THEN 'failed' ELSE 'success' END, 1, 0, 0, '',
       now(), now()
  FROM generate_series(1, 20000) AS n
"""


@pytest.fixture(scope="module")
def leaders(services: EmbeddedServices) -> Iterator[Callable[[str], Leader]]:
    with leaders_of(services, [_FILL, _ENDED], begin, STATEMENTS) as found:
        yield found


@pytest.fixture(scope="module", params=STATES)
def leader(request: pytest.FixtureRequest, leaders: Callable[[str], Leader]) -> Leader:
    return leaders(request.param)


def begin(connection: Connection) -> list[tuple[bytes, int]]:
    """Put tasks in flight, and start every second of them."""
    claimed = claims.claim(connection, {"q0": IN_FLIGHT // 2, "q1": IN_FLIGHT // 2}, NOW)
    transitions.start(connection, [AttemptStart(task.id, task.attempt, 0.1, "w") for task in claimed[::2]], NOW)
    return [(task.id, task.attempt) for task in claimed]


def new_tasks() -> list[NewTask]:
    return [NewTask(time_ordered_id(1_700_000_000_000, os.urandom(10)), "job", "q0", b"") for _ in range(BATCH)]


def create_claimed(connection: Connection) -> None:
    creation = enqueue.create_tasks(connection, new_tasks(), NOW, is_gathered=True)
    assert creation is not None
    claimed, _ = claims.create_claimed(connection, creation, ["q0", "q2", "none"], NOW)
    assert len(claimed) == BATCH


BY_ID: dict[str, Call] = {
    "start": lambda leader: lambda c: transitions.start(c, [AttemptStart(*a, 0.1, "w") for a in leader.batch], NOW),
    "requeue": lambda leader: lambda c: transitions.requeue(c, [Requeue(*a, 1.0, 1) for a in leader.batch], NOW),
    "succeed": lambda leader: lambda c: transitions.succeed(c, [Success(*a, b"", 0.1, "w") for a in leader.batch], NOW),
    "fail": lambda leader: (
        lambda c: transitions.end(c, TaskState.FAILED, [AttemptEnd(*a, "why") for a in leader.batch], NOW)
    ),
    "cancel": lambda leader: (
        lambda c: transitions.end(c, TaskState.CANCELLED, [AttemptEnd(a[0], None, "why") for a in leader.batch], NOW)
    ),
    "policies": lambda leader: lambda c: waiting.policies(c, [task for task, _ in leader.batch]),
    "current": lambda leader: lambda c: waiting.current(c, leader.batch),
    "save details": lambda leader: lambda c: details.save(c, [Noted(*a, b"details") for a in leader.batch]),
    "find completions": lambda leader: (
        lambda c: completions.find(
            c, [Request(1, RequestKind.COMPLETE_TASK, task, 0.1, 0.5) for task, _ in leader.batch]
        )
    ),
}
"""Statements that find their tasks by id, one at a time."""

POSITIONS = {"q0": ClaimPosition(0, PENDING // 2, emptied=False), "q2": ClaimPosition(0, PENDING // 2, emptied=True)}

HOLDS = [("q0", "job", "crowded"), ("q0", "another", "crowded"), ("q1", "job", "crowded: @executor:http")]

OTHERS: dict[str, Call] = {
    "claim": lambda _: lambda c: claims.claim(c, {"q0": BATCH // 2, "q2": BATCH // 2, "none": 9}, NOW),
    "claim_behind": lambda _: lambda c: claims.claim_behind(c, dict.fromkeys(POSITIONS, BATCH // 2), POSITIONS, NOW),
    "promote_due": lambda _: lambda c: waiting.promote_due(c, NOW + timedelta(days=30), BATCH),
    "succeed_and_commit": lambda leader: (
        lambda c: leases.succeed_and_commit(
            c, [Success(*a, b"", 0.1, "w") for a in leader.batch], NOW, 0, Cursor("1-1", "1-0", "server")
        )
    ),
    "agenda": lambda _: waiting.probe_pending_work,
    "in_flight": lambda _: waiting.in_flight,
    "succeeded": lambda leader: lambda c: waiting.succeeded(c, leader.batch),
    "overdue_unknown": lambda _: lambda c: waiting.overdue_unknown(c, NOW, BATCH),
    "release_known": lambda _: lambda c: waiting.release_known(c, [("q0", "another"), ("q1", "job")], BATCH),
    "hold_at_front": lambda _: lambda c: waiting.hold_at_front(c, HOLDS, NOW, BATCH),
    "release_crowded": lambda _: (
        lambda c: waiting.release_crowded(c, [("q0", "job", "crowded", BATCH), ("q1", "another", "crowded: a@1", 9)])
    ),
    "create_tasks": lambda _: lambda c: enqueue.create_tasks(c, new_tasks(), NOW),
    "create_claimed": lambda _: create_claimed,
    "open_tasks": lambda _: lambda c: cancels.open_tasks(c, [RUN.bytes], BATCH),
}
STATEMENTS = BY_ID | OTHERS


INDEXES = {
    "claim": "tasks_ready",
    "claim_behind": "tasks_ready",
    "promote_due": "tasks_due",
    "release_known": "tasks_held",
    "release_crowded": "tasks_held",
    "hold_at_front": "tasks_ready",
    "in_flight": "tasks_in_flight",
    "open_tasks": "tasks_of_run",
    "create_tasks": "ended_tasks_pkey",
}
"""The index that a statement has to use."""


@pytest.mark.parametrize("name", STATEMENTS)
def test_no_statement_reads_the_whole_table(leader: Leader, name: str) -> None:
    plan = leader.plan(STATEMENTS[name](leader))
    found = scans(plan, *TABLES)
    assert found, plan
    for scan in found:
        assert scan["Node Type"] != "Seq Scan", scan
        assert rows_read(scan) <= max(2 * BATCH, IN_FLIGHT, DELAYED), scan
    if name in INDEXES:
        assert INDEXES[name] in {node.get("Index Name") for node in nodes(plan)}, plan
    if name in BY_ID:  # one index lookup for each id, not one pass over an index for the whole batch
        probes = [scan for scan in found if "Index" in scan["Node Type"] and "(id = " in scan.get("Index Cond", "")]
        assert len(probes) == 1, plan
        assert probes[0]["Index Name"] in ("tasks_pkey", "tasks_in_flight")
        assert probes[0]["Actual Loops"] >= BATCH


def test_the_agenda_reads_one_entry_of_each_index(leader: Leader) -> None:
    found = scans(leader.plan(STATEMENTS["agenda"](leader)), *TABLES)
    assert {scan["Index Name"] for scan in found} == {"tasks_due", "tasks_held", "tasks_expiring"}
    assert all(rows_read(scan) <= 1 for scan in found)
