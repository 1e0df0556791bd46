"""Statements about runs use index scans, however many runs and ended tasks exist."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest
from sqlalchemy import Connection, text

from orchestrator.domain.runs import RunChanges
from orchestrator.domain.states import RunState
from orchestrator.embedded import EmbeddedServices
from orchestrator.store.dag import plans as dags
from orchestrator.store.runs import ancestry, cancels, pending_changes, stuck
from orchestrator.store.runs import transitions as runs
from tests.integration.planning import BATCH, STATES, Call, Leader, leaders_of, rows_read, scans

NOW = datetime.now(UTC)
RUNS = 30_000
STEPS = 3
"""Ended tasks of each run."""
TABLES = ("tasks", "ended_tasks", "runs", "untold")

_RUNS = f"""
INSERT INTO orchestrator.runs (id, name, status, total, open, workflow, version, ended_at, cancelling, expanding,
                               deadline, parent_run, parent_step, lane, lane_limit, parked)
SELECT gen_random_uuid(), 'flow', CASE WHEN n <= 300 THEN 'pending' WHEN n <= 10000 THEN 'running' ELSE 'failed' END,
       0, 0, 'flow' || n % 10, 1, CASE WHEN n > 10000 THEN now() END, n BETWEEN 1001 AND 1010, n BETWEEN 1011 AND 1020,
       CASE WHEN n % 100 = 1 THEN now() + (n - 500) * interval '1 second' END,
       CASE WHEN n % 10 = 3 THEN gen_random_uuid() END, CASE WHEN n % 10 = 3 THEN 'child' END,
       CASE WHEN n % 50 = 7 THEN 'lane' || n % 1000 END, CASE WHEN n % 50 = 7 THEN 5 END, n % 100 = 7 AND n <= 300
  FROM generate_series(1, {RUNS}) AS n
"""
_CROWD = """
INSERT INTO orchestrator.runs (id, name, status, total, open, workflow, version, lane, lane_limit, parked)
SELECT gen_random_uuid(), 'flow', CASE WHEN n <= 3 THEN 'running' ELSE 'pending' END, 0, 0, 'flow1', 1, 'crowd', 5,
       n > 100
  FROM generate_series(1, 3000) AS n
"""
"""Runs that wait for the same concurrency limit."""
_FAMILIES = """
INSERT INTO orchestrator.runs (id, name, status, total, open, workflow, version, lane, lane_limit, parked, parent_run)
SELECT gen_random_uuid(), 'flow', 'pending', 0, 0, 'flow1', 1, 'crowd', 5, true, r.id
  FROM (SELECT id FROM orchestrator.runs WHERE status = 'running' AND lane = 'crowd') AS r
"""
"""Children of the running ones, which wait for the same limit."""
_UNTOLD = """
WITH stuck AS (
    UPDATE orchestrator.runs SET stuck = '{"release": "0"}' WHERE id IN (
           SELECT id FROM orchestrator.runs WHERE status = 'running' AND lane IS NULL ORDER BY id DESC LIMIT 3000)
    RETURNING id
)
INSERT INTO orchestrator.untold (run_id, held, body)
SELECT id, true, '\\x9b80c280c2c280c290c0c0c2' FROM stuck CROSS JOIN generate_series(1, 2)
"""
"""Stuck runs, each with two pending changes."""
_ENDED = f"""
INSERT INTO orchestrator.ended_tasks (id, seq, name, queue, priority, status, attempt, failures, losses, payload,
                                      created_at, ended_at, run_id, step, position)
SELECT gen_random_uuid(), 1, 'job', 'q', 0, CASE n WHEN 1 THEN 'failed' ELSE 'success' END, 1, 1, 0, '', now(), now(),
       r.id, 'step' || n, 0
  FROM orchestrator.runs r CROSS JOIN generate_series(1, {STEPS}) AS n
"""


def begin(connection: Connection) -> list[tuple[bytes, int]]:
    """Return running runs, some of them in the state that a statement looks for."""
    found = connection.execute(text(f"SELECT id FROM orchestrator.runs WHERE status = 'running' LIMIT {BATCH}"))
    return [(row[0].bytes, 1) for row in found]


def children(connection: Connection) -> list[bytes]:
    """Return the child runs that wait for the crowded limit."""
    found = connection.execute(text("SELECT id FROM orchestrator.runs WHERE lane = 'crowd' AND parent_run IS NOT NULL"))
    return [row[0].bytes for row in found]


def in_a_crowd(ids: list[bytes]) -> Callable[[Connection], object]:
    return lambda connection: ancestry.deadlocked(connection, ids, BATCH)


@pytest.fixture(scope="module")
def leaders(services: EmbeddedServices) -> Iterator[Callable[[str], Leader]]:
    with leaders_of(services, [_RUNS, _ENDED, _CROWD, _FAMILIES, _UNTOLD], begin, STATEMENTS) as found:
        yield found


@pytest.fixture(scope="module", params=STATES)
def leader(request: pytest.FixtureRequest, leaders: Callable[[str], Leader]) -> Leader:
    return leaders(request.param)


def steps(leader: Leader, name: str) -> list[tuple[bytes, str]]:
    return [(run, name) for run in leader.ids]


STATEMENTS: dict[str, Call] = {
    "begin": lambda _: lambda c: runs.begin(c, NOW, BATCH),
    "unpark": lambda _: lambda c: runs.unpark(c, {f"lane{number}": 3 for number in range(7, 1000, 50)}),
    "count": lambda leader: lambda c: runs.count(c, {run: {"total": 1, "opened": 1} for run in leader.ids}),
    "settle": lambda leader: lambda c: runs.settle(c, {run: {"total": 1, "opened": 1} for run in leader.ids}, {}),
    "end": lambda leader: lambda c: runs.end(c, [(run, RunState.SUCCESS, None) for run in leader.ids], NOW),
    "reopen": lambda leader: lambda c: runs.reopen(c, leader.ids, NOW),
    "mark_cancelling": lambda leader: lambda c: cancels.mark_cancelling(c, leader.ids),
    "time_out": lambda _: lambda c: cancels.time_out(c, NOW, BATCH, 60.0),
    "cancel_descendants": lambda leader: lambda c: cancels.cancel_descendants(c, leader.ids, NOW, BATCH),
    "count_descendants": lambda leader: lambda c: ancestry.count_descendants(c, dict.fromkeys(leader.ids, 1), BATCH),
    "deadlocked": lambda leader: lambda c: ancestry.deadlocked(c, leader.ids, BATCH),
    "deadlocked_in_a_crowd": lambda leader: in_a_crowd(children(leader.connection)),
    "requeue": lambda leader: lambda c: cancels.requeue(c, leader.ids),
    "requeue_children": lambda leader: lambda c: cancels.requeue_children(c, leader.ids[0], "child", NOW, BATCH),
    "with_children": lambda leader: lambda c: cancels.with_children(c, leader.ids[0], ["child"]),
    "unfinished_tasks": lambda leader: lambda c: cancels.unfinished_tasks(c, leader.ids[0], "step1", NOW, BATCH),
    "created": lambda leader: lambda c: cancels.created(c, leader.ids[0], ["step1", "child"]),
    "delete_to_replan": lambda leader: lambda c: cancels.delete_to_replan(c, leader.ids[0], ["step1"], BATCH),
    "following": lambda _: lambda c: cancels.following(c, bytes(16), BATCH),
    "cancelled_without_open_work": lambda leader: lambda c: cancels.without_open_work(c, leader.ids),
    "begin_or_park": lambda leader: lambda c: runs.begin_or_park(c, NOW, leader.ids),
    "retryable_tasks": lambda leader: lambda c: runs.retryable_tasks(c, leader.ids[0], NOW, BATCH),
    "load": lambda leader: lambda c: dags.load(c, leader.ids),
    "expanding": lambda _: lambda c: dags.expanding()(c, BATCH),
    "outputs": lambda leader: lambda c: dags.outputs(c, steps(leader, "step1")),
    "child_outputs": lambda leader: lambda c: dags.child_outputs(c, steps(leader, "child")),
    "output_sizes": lambda leader: lambda c: dags.output_sizes(c, steps(leader, "step1"), steps(leader, "child")),
    "save_outputs": lambda leader: lambda c: dags.save_outputs(c, dict.fromkeys(leader.ids, b"")),
    "versions": lambda leader: lambda c: dags.versions(c, leader.ids),
    "set_aside": lambda leader: lambda c: stuck.set_aside(c, [(run, "{}") for run in leader.ids]),
    "free": lambda leader: lambda c: stuck.free(c, leader.ids),
    "free_older": lambda _: lambda c: stuck.free_older(c, "1", BATCH),
    "without_open_work": lambda leader: lambda c: stuck.without_open_work(c, leader.ids),
    "waiting": lambda _: lambda c: pending_changes.waiting(c, BATCH),
    "waiting_among": lambda leader: lambda c: pending_changes.waiting_among(c, leader.ids),
    "add": lambda leader: lambda c: pending_changes.add(c, [(run, RunChanges()) for run in leader.ids]),
    "line": lambda _: lambda c: pending_changes.PendingChangesQueue()(c, 200),
    "read": lambda _: lambda c: pending_changes.read(c, list(range(500))),
    "remove": lambda _: lambda c: pending_changes.remove(c, list(range(500))),
    "release": lambda leader: lambda c: pending_changes.release(c, leader.ids),
    "take_of": lambda leader: lambda c: pending_changes.take_of(c, leader.ids),
}


@pytest.mark.parametrize("name", STATEMENTS)
def test_no_statement_reads_a_whole_table(leader: Leader, name: str) -> None:
    plan = leader.plan(STATEMENTS[name](leader))
    found = scans(plan, *TABLES)
    assert found, plan
    for scan in found:
        assert scan["Node Type"] != "Seq Scan", scan
        assert rows_read(scan) <= 2 * BATCH, scan
