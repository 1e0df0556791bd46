"""Statements about runs of workflow code use index scans, however many runs, events and timers exist."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import Connection

from orchestrator.domain.code import history
from orchestrator.domain.code.other_runs import Target
from orchestrator.domain.code.promises import Resolution
from orchestrator.embedded import EmbeddedServices
from orchestrator.store.code import expectations, histories, reads
from orchestrator.store.code import keys as run_keys
from orchestrator.store.code import runs as code_runs
from orchestrator.store.code.expectations import NewPromise, PromiseAnswer, StoredResolution
from orchestrator.store.code.taken_turns import NextTurn, Turn, step, suspend, take_next
from orchestrator.store.code.turns import LastTurn, append_last, once_refused, unseen_messages, unshown
from orchestrator.store.runs import cancels, creation, stuck
from orchestrator.store.runs import transitions as runs
from orchestrator.store.runs.creation import NewRun
from orchestrator.store.tasks import claims
from orchestrator.store.tasks.transitions import Success
from tests.integration.planning import BATCH, STATES, Call, Leader, leaders_of, rows_read, scans

NOW = datetime.now(UTC)
OPEN = 20_000
"""The number of open runs; as many have ended."""
EVENTS = 5
"""Events of each open run."""
IN_FLIGHT = 600
TABLES = ("tasks", "ended_tasks", "runs", "histories", "timers", "promises", "resolutions", "answers", "run_keys")

_RUNS = f"""
INSERT INTO orchestrator.runs (id, name, status, total, open, workflow, version, code, last_event, shown, ended_at,
                               stuck, closing, deadline, parent_run)
SELECT gen_random_uuid(), 'flow', CASE WHEN n <= {OPEN} THEN 'running' ELSE 'success' END, 0, 0, 'flow' || n % 10, 1,
       true, {EVENTS}, 1, CASE WHEN n > {OPEN} THEN now() END,
       CASE WHEN n BETWEEN 11 AND 20 THEN '{{"kind": "x"}}'::jsonb END, n > 2 * {OPEN} - 5,
       CASE WHEN n % 100 = 1 THEN now() + (n - 500) * interval '1 second' END,
       CASE WHEN n % 10 = 3 THEN gen_random_uuid() END
  FROM generate_series(1, 2 * {OPEN}) AS n
"""
_TASKS = f"""
INSERT INTO orchestrator.tasks (id, name, queue, run_id, payload, blockers)
SELECT id, workflow, CASE WHEN number <= {IN_FLIGHT} THEN 'now' ELSE 'q' END, id, '',
       CASE WHEN number <= {IN_FLIGHT} THEN 0 ELSE 1 END
  FROM (SELECT id, workflow, row_number() OVER () AS number FROM orchestrator.runs
         WHERE ended_at IS NULL AND stuck IS NULL) AS r
"""
_HISTORIES = f"""
INSERT INTO orchestrator.histories (run_id, number, at, kind, data)
SELECT id, n, now(), CASE WHEN n = 2 THEN 'signal_received' ELSE 'timer_fired' END,
       '\\x93af7369676e616c5f7265636569766564a178c401c0'::bytea
  FROM orchestrator.runs CROSS JOIN generate_series(1, {EVENTS}) AS n WHERE ended_at IS NULL
"""
_TIMERS = """
INSERT INTO orchestrator.timers (run_id, id, due)
SELECT id, gen_random_uuid(), now() + (row_number() OVER () - 100) * interval '1 second'
  FROM orchestrator.runs WHERE ended_at IS NULL
"""
_PROMISES = """
INSERT INTO orchestrator.promises (run_id, id, name, ordinal)
SELECT id, gen_random_uuid(), 'approval', 1 FROM orchestrator.runs WHERE ended_at IS NULL
"""
_RESOLUTIONS = """
INSERT INTO orchestrator.resolutions (run_id, name, number)
SELECT id, 'approval', 1 FROM orchestrator.runs WHERE ended_at IS NULL
"""
_KEYS = "INSERT INTO orchestrator.run_keys (key, run_id) SELECT id::text, id FROM orchestrator.runs"
_ANSWERS = "INSERT INTO orchestrator.answers (id, at) SELECT gen_random_uuid(), now() FROM generate_series(1, 20000)"
FILL = [_RUNS, _TASKS, _HISTORIES, _TIMERS, _PROMISES, _RESOLUTIONS, _KEYS, _ANSWERS]


def begin(connection: Connection) -> list[tuple[bytes, int]]:
    return [(task.id, task.attempt) for task in claims.claim(connection, {"now": IN_FLIGHT}, NOW)]


@pytest.fixture(scope="module")
def leaders(services: EmbeddedServices) -> Iterator[Callable[[str], Leader]]:
    with leaders_of(services, FILL, begin, STATEMENTS) as found:
        yield found


@pytest.fixture(scope="module", params=STATES)
def leader(request: pytest.FixtureRequest, leaders: Callable[[str], Leader]) -> Leader:
    return leaders(request.param)


def run_pairs(leader: Leader) -> list[tuple[bytes, bytes]]:
    """Return runs with random ids, as of their timers and promises."""
    return [(run, os.urandom(16)) for run in leader.ids]


def turns(leader: Leader) -> list[Turn]:
    mark = history.TimerFired(os.urandom(16))
    return [Turn(run, attempt, 1, True, attempt, "w", [mark], 0) for run, attempt in leader.batch]


def next_turns(leader: Leader) -> list[NextTurn]:
    return [NextTurn(run, attempt, 1, 0.0, b"", "w") for run, attempt in leader.batch]


def last_turns(leader: Leader) -> list[LastTurn]:
    mark = history.ActivationApplied(1)
    return [LastTurn(run, attempt, 1, [mark]) for run, attempt in leader.batch]


def new_runs() -> list[NewRun]:
    return [code_runs.new_run(os.urandom(16), [history.RunStarted("flow", 1, b"")]) for _ in range(BATCH)]


def facts(leader: Leader) -> dict[bytes, Any]:
    return {run: [history.TimerFired(os.urandom(16))] for run in leader.ids}


STATEMENTS: dict[str, Call] = {
    "append": lambda leader: lambda c: histories.append(c, facts(leader), NOW),
    "append_last": lambda leader: lambda c: append_last(c, last_turns(leader), NOW),
    "once_refused": lambda leader: lambda c: once_refused(c, leader.ids),
    "unseen_messages": lambda leader: lambda c: unseen_messages(c, ((run, 1) for run in leader.ids)),
    "suspend": lambda leader: lambda c: suspend(c, turns(leader), NOW),
    "step": lambda leader: lambda c: step(c, [Success(*a, b"", 0.1, "w") for a in leader.batch], turns(leader), NOW),
    "take_next": lambda leader: lambda c: take_next(c, next_turns(leader), NOW),
    "unshown": lambda leader: lambda c: unshown(c, dict.fromkeys(leader.ids, False)),
    "unshown, whole": lambda leader: lambda c: unshown(c, dict.fromkeys(leader.ids, True)),
    "said": lambda leader: lambda c: histories.read_since(c, [(run, 1) for run in leader.ids]),
    "start": lambda _: lambda c: creation.create(c, new_runs(), NOW),
    "forget": lambda leader: lambda c: code_runs.forget(c, leader.ids),
    "children": lambda leader: lambda c: code_runs.children(c, leader.ids),
    "closing": lambda _: lambda c: code_runs.closing(c, BATCH),
    "closed": lambda leader: lambda c: code_runs.closed(c, leader.ids),
    "predecessors": lambda leader: lambda c: code_runs.predecessors(c, leader.ids, NOW),
    "pass_keys": lambda leader: lambda c: run_keys.pass_to_successors(c, run_pairs(leader)),
    "of_code": lambda leader: lambda c: code_runs.of_code(c, leader.ids),
    "latest": lambda leader: lambda c: code_runs.latest(c, leader.ids),
    "count": lambda leader: lambda c: runs.count(c, {run: {"total": 1, "opened": 1} for run in leader.ids}),
    "time_out": lambda _: lambda c: cancels.time_out(c, NOW, BATCH, 60.0),
    "start_timers": lambda leader: lambda c: expectations.start_timers(c, [(*pair, 0.0) for pair in run_pairs(leader)]),
    "forget_timers": lambda leader: lambda c: expectations.forget_timers(c, run_pairs(leader)),
    "fire_timers": lambda _: lambda c: expectations.fire_timers(c, NOW, BATCH),
    "create_promises": lambda leader: (
        lambda c: expectations.create_promises(c, [NewPromise(*pair, "x", 1) for pair in run_pairs(leader)])
    ),
    "forget_promises": lambda leader: lambda c: expectations.forget_promises(c, run_pairs(leader)),
    "resolutions": lambda leader: lambda c: expectations.of_runs(c, leader.ids),
    "keep": lambda leader: (
        lambda c: expectations.store_resolutions(
            c, [StoredResolution(run, 1, Resolution("x", b"")) for run in leader.ids]
        )
    ),
    "met": lambda leader: (
        lambda c: expectations.remove(c, [StoredResolution(run, 1, Resolution("approval")) for run in leader.ids])
    ),
    "made": lambda leader: lambda c: histories.promises(c, leader.ids),
    "open_promises": lambda leader: lambda c: expectations.open_promises(c, leader.ids),
    "waits": lambda leader: lambda c: expectations.waits(c, [Target(run).wait for run in leader.ids]),
    "rename_waits": lambda leader: (
        lambda c: expectations.rename_waits(c, [NewPromise(*pair, "x", 1) for pair in run_pairs(leader)])
    ),
    "outcomes": lambda leader: lambda c: reads.outcomes(c, leader.ids),
    "answer": lambda leader: lambda c: expectations.answer(c, [PromiseAnswer(run) for run in leader.ids], NOW),
    "mark_stuck": lambda leader: lambda c: stuck.mark_stuck(c, [(*attempt, "{}") for attempt in leader.batch], NOW),
    "mark_unknown": lambda leader: lambda c: stuck.mark_unknown(c, [(run, "{}") for run in leader.ids]),
    "free": lambda leader: lambda c: stuck.free(c, leader.ids),
    "free by workflow": lambda _: lambda c: stuck.free_code(c, ["flow1", "flow2"], bytes(16), BATCH),
    "free unfit": lambda _: lambda c: stuck.free_unfit(c, ["flow1", "flow2"], 1e12, BATCH),
    "free lost": lambda _: lambda c: stuck.free_lost(c, ["flow1", "flow2"], 1e12, BATCH),
    "wake": lambda leader: lambda c: stuck.wake(c, leader.ids),
}
ONLY_INSERT = {"start", "start_timers", "create_promises", "answer"}


INDEXES = {
    "name": "index",
    "append": "runs_pkey",
    "suspend": "runs_pkey",
    "unshown": "histories_pkey",
    "said": "histories_pkey",
    "children": "runs_of_parent",
    "closing": "runs_closing",
    "pass_keys": "run_keys_of_run",
    "time_out": "runs_due",
    "fire_timers": "timers_due",
    "forget_timers": "timers_pkey",
    "open_promises": "promises_pkey",
    "waits": "promises_of_runs",
    "resolutions": "resolutions_pkey",
    "met": "resolutions_pkey",
    "made": "histories_pkey",
    "free by workflow": "runs_stuck",
}
"""The index that a statement has to use."""


@pytest.mark.parametrize("name", STATEMENTS)
def test_no_statement_reads_a_whole_table(leader: Leader, name: str) -> None:
    plan = leader.plan(STATEMENTS[name](leader))
    found = scans(plan, *TABLES)
    assert found or name in ONLY_INSERT, plan
    for scan in found:
        assert scan["Node Type"] != "Seq Scan", scan
        assert rows_read(scan) <= EVENTS * BATCH + IN_FLIGHT, scan
    if name in INDEXES:
        assert INDEXES[name] in {node.get("Index Name") for scan in found for node in (scan, *scan.get("Plans", ()))}
