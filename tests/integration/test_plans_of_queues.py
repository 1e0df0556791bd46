"""Statements about lanes, keys, schedules, purged queues and failed tasks use index scans, whatever else the tables
hold."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Connection

from orchestrator.domain.limits.lanes import Share
from orchestrator.domain.tasks.task import NewTask, UniqueKey
from orchestrator.embedded import EmbeddedServices
from orchestrator.store import retention
from orchestrator.store.limits import lanes, queues
from orchestrator.store.schedules import fires
from orchestrator.store.schedules.fires import Advance
from orchestrator.store.tasks import claims, redrive, revival, unique
from orchestrator.store.tasks.redrive import FailedFilter
from tests.integration.planning import BATCH, STATES, Call, Leader, leaders_of, rows_read, scans

NOW = datetime.now(UTC)
TOMORROW = NOW + timedelta(days=1)
PLACE = ((NOW + timedelta(seconds=10)).isoformat(), "00" * 16)
OTHERS = 30_000
"""Rows of each table that no statement needs."""
LANES = 200
IN_FLIGHT = 600
TABLES = ("tasks", "ended_tasks", "runs", "unique_keys", "buckets", "schedules", "workflows")

_TASKS = f"""
INSERT INTO orchestrator.tasks (id, name, queue, payload, lane)
SELECT gen_random_uuid(), 'job', CASE WHEN n <= {IN_FLIGHT} THEN 'now' ELSE 'q' END, '',
       CASE WHEN n % 2 = 0 THEN 'job|' || n % {LANES} END
  FROM generate_series(1, {OTHERS}) AS n
"""
_BEHIND = """
INSERT INTO orchestrator.tasks (id, name, queue, payload, lane)
SELECT gen_random_uuid(), 'job', 'last', '', CASE WHEN n % 2 = 0 THEN 'job|1' END FROM generate_series(1, 50) AS n
"""
_ENDED = f"""
INSERT INTO orchestrator.ended_tasks (id, seq, name, queue, priority, status, attempt, failures, losses, payload,
                                      created_at, ended_at, run_id, error)
SELECT gen_random_uuid(), n, 'job', CASE WHEN n > {OTHERS} - 50 THEN 'last' ELSE 'q' END, 0,
       CASE WHEN n % 2 = 0 THEN 'failed' ELSE 'success' END, 1, 1, 0, '', now(), now() + n * interval '1 ms',
       CASE WHEN n % 4 = 0 THEN gen_random_uuid() END,
       CASE WHEN n % 2 = 0 THEN '{{"kind": "Bad", "message": "luck"}}'::jsonb END
  FROM generate_series(1, {OTHERS}) AS n
"""
_KEYS = f"""
INSERT INTO orchestrator.unique_keys (key, task_id, scope, until)
SELECT 'job|' || n, gen_random_uuid(), 'period', now() + (n - 100) * interval '1 minute'
  FROM generate_series(1, {OTHERS}) AS n
"""
_WORKFLOWS = """
INSERT INTO orchestrator.workflows (name, version, hash, definition)
SELECT 'flow' || n, version, '', '{}'::jsonb FROM generate_series(1, 2000) AS n, generate_series(1, 3) AS version
"""
_SCHEDULES = """
INSERT INTO orchestrator.schedules (workflow, name, definition, next_fire, due_at)
SELECT 'flow' || n % 2000, 's' || n, '{}'::jsonb, due, due
  FROM (SELECT n, now() + (n - 100) * interval '1 minute' AS due FROM generate_series(1, 30000) AS n) AS s
"""
_RUNS = f"""
INSERT INTO orchestrator.runs (id, name, total, open, status, schedule, ended_at)
SELECT gen_random_uuid(), 'flow', 0, 0, CASE WHEN n % 10 = 0 THEN 'running' ELSE 'success' END,
       'flow' || n % 2000 || '/s' || n % 2000, CASE WHEN n % 10 <> 0 THEN now() END
  FROM generate_series(1, {OTHERS}) AS n
"""
FILL = [_TASKS, _BEHIND, _ENDED, _KEYS, _WORKFLOWS, _SCHEDULES, _RUNS]


def begin(connection: Connection) -> list[tuple[bytes, int]]:
    shares = [Share("now", f"job|{number}", 0, IN_FLIGHT) for number in range(LANES)]
    plain = claims.claim(connection, {"now": IN_FLIGHT}, NOW)
    return [(task.id, task.attempt) for task in (*plain, *lanes.claim(connection, shares, NOW))]


@pytest.fixture(scope="module")
def leaders(services: EmbeddedServices) -> Iterator[Callable[[str], Leader]]:
    with leaders_of(services, FILL, begin, STATEMENTS) as found:
        yield found


@pytest.fixture(scope="module", params=STATES)
def leader(request: pytest.FixtureRequest, leaders: Callable[[str], Leader]) -> Leader:
    return leaders(request.param)


def new_keyed_tasks() -> list[NewTask]:
    return [
        NewTask(os.urandom(16), "job", "q", b"", unique=UniqueKey(f"job|{number}", "running"))
        for number in range(OTHERS - BATCH // 2, OTHERS + BATCH // 2)
    ]


def advances() -> list[Advance]:
    return [
        Advance(f"(0,{n})", f"flow{n % 2000}", f"s{n}", TOMORROW, TOMORROW, NOW, None, 1, 0, None)
        for n in range(1, BATCH + 1)
    ]


SHARES = [Share("q", f"job|{number}", 0, 2) for number in range(LANES)] + [Share("q", None, 0, 10)]
SOME = [("q", f"job|{number}") for number in range(LANES)]

STATEMENTS: dict[str, Call] = {
    "lanes: arrived": lambda leader: lambda c: lanes.arrived(c, [(task, True) for task in leader.ids]),
    "ready queues": lambda _: lambda c: claims.ready_queues(c, BATCH),
    "lanes: after": lambda _: lambda c: lanes.lanes_after(c, "", "", 2_000),
    "lanes: claim": lambda _: lambda c: lanes.claim(c, SHARES, NOW),
    "lanes: read_ready": lambda _: lambda c: lanes.read_ready(c, ["q", "now", "none"], SOME, 500),
    "lanes: of attempts": lambda leader: lambda c: lanes.lanes_of(c, leader.batch),
    "keys: take": lambda _: lambda c: unique.take(c, new_keyed_tasks()),
    "keys: known": lambda leader: lambda c: unique.existing(c, leader.ids),
    "keys: free": lambda leader: (
        lambda c: unique.free(c, [(f"job|{n}", run) for n, run in enumerate(leader.ids)], ended=True)
    ),
    "revive": lambda leader: lambda c: revival.revive(c, leader.ids),
    "keys: prune": lambda _: lambda c: retention.forget_expired(c, "unique_keys", BATCH),
    "schedules: due": lambda _: lambda c: fires.due(c, NOW, BATCH),
    "schedules: open runs": lambda _: lambda c: fires.open_runs(c, [f"flow{n}/s{n}" for n in range(0, 500, 10)]),
    "schedules: advance": lambda _: lambda c: fires.advance(c, advances()),
    "purge": lambda _: lambda c: queues.waiting_tasks(c, "last", TOMORROW, bytes(16), BATCH),
    "redrive": lambda _: lambda c: redrive.matching(c, FailedFilter(queue="last"), TOMORROW, None, BATCH),
    "redrive by error": lambda _: (
        lambda c: redrive.matching(c, FailedFilter(error="nothing like it"), TOMORROW, PLACE, BATCH)
    ),
}

COUNTING = dict.fromkeys(("lanes: after", "lanes: read_ready"), LANES * (lanes.COUNTED + 1))
"""The maximum of rows read by statements that count the ready tasks of each lane, up to a bound."""


@pytest.mark.parametrize("name", STATEMENTS)
def test_no_statement_reads_a_whole_table(leader: Leader, name: str) -> None:
    is_old = (leader.connection.dialect.server_version_info or ()) < (14,)
    if (leader.is_misled or is_old) and name.startswith("redrive"):
        pytest.skip("by either index on the end, whichever Postgres takes: docs/hot-tables.md")
    plan = leader.plan(STATEMENTS[name](leader))
    found = scans(plan, *TABLES)
    assert found or name == "keys: take", plan
    for scan in found:
        assert scan["Node Type"] != "Seq Scan", scan
        assert rows_read(scan) <= COUNTING.get(name, 2 * BATCH + IN_FLIGHT), scan
