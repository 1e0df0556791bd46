"""Postgres makes every transition of the state tables of tasks and runs, and no others."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from sqlalchemy import Connection, text

from orchestrator.domain.ids import time_ordered_id
from orchestrator.domain.runs import RunCounters, verdict
from orchestrator.domain.states import (
    ENDED_RUN_STATES,
    ENDED_TASK_STATES,
    IN_FLIGHT_STATES,
    OPEN_TASK_STATES,
    RUN_TRANSITIONS,
    TASK_TRANSITIONS,
    RunState,
    TaskState,
)
from orchestrator.domain.tasks.task import Failed, Lost, NewTask, Returned, Started, Succeeded, TaskError
from orchestrator.store import database, inbox
from orchestrator.store.inbox import RequestKind
from orchestrator.store.runs import cancels, creation
from orchestrator.store.runs import transitions as runs
from orchestrator.store.runs.creation import NewRun
from orchestrator.store.tasks import claims, enqueue, results, revival, transitions, waiting
from orchestrator.store.tasks.claims import Claimed
from orchestrator.store.tasks.transitions import AttemptEnd, AttemptStart, Moved, Requeue, Success
from tests.fuzzing import examples
from tests.integration.parts import Parts

NOW = datetime(2026, 11, 15, 12, tzinfo=UTC)
ERROR = '{"kind": "ValueError", "message": "no", "traceback": ""}'
T = TaskState
TASK_PAIRS = {(transition.source, transition.target) for transition in TASK_TRANSITIONS}
RUN_PAIRS = {(transition.source, transition.target) for transition in RUN_TRANSITIONS}


@pytest.fixture(scope="module")
def shared_connection(database_url: str) -> Iterator[Connection]:
    engine = database.engine_for(database_url)
    with engine.connect() as connection:
        yield connection
    engine.dispose()


@pytest.fixture
def connection(shared_connection: Connection) -> Iterator[Connection]:
    """A transaction that is rolled back after the test."""
    with shared_connection.begin() as transaction:
        yield shared_connection
        transaction.rollback()


def new_tick(connection: Connection) -> Parts:
    return Parts(connection, NOW)


def new_id() -> bytes:
    return time_ordered_id(1_700_000_000_000, os.urandom(10))


class Row(NamedTuple):
    """A task's row, in `tasks` or in `ended_tasks`."""

    table: str
    columns: dict[str, Any]

    @property
    def state(self) -> str:
        return str(self.columns["status"])

    @property
    def attempt(self) -> int:
        return int(self.columns["attempt"])


def row(connection: Connection, task: bytes) -> Row:
    """Return the task's row, which is in exactly one of the two tables."""
    found = [
        Row(table, dict(mapping))
        for table in ("tasks", "ended_tasks")
        for mapping in connection.execute(
            text(f"SELECT * FROM orchestrator.{table} WHERE id = CAST(:id AS uuid)"), {"id": task.hex()}
        ).mappings()
    ]
    assert len(found) == 1, found
    open_states = found[0].state in OPEN_TASK_STATES
    assert found[0].table == ("tasks" if open_states else "ended_tasks")
    return found[0]


def put(connection: Connection, state: TaskState = T.PENDING, *, run: bytes | None = None, position: int = 0) -> bytes:
    """Create a task in a state; it has its own queue, so that a claim takes no other task."""
    task = new_id()
    new = NewTask(task, "job", task.hex(), b"payload", 7, 0.0, '{"timeout":1.5}', run, position if run else None)
    if run is None:
        enqueue.insert_task(connection, new)
    else:
        enqueue.copy_tasks(connection, [new])
    if state is T.PENDING:
        return task
    if state not in (T.CANCELLED, T.SKIPPED):
        claim(connection, task)
    if state is T.RUNNING:
        transitions.start(connection, [AttemptStart(task, 1, 0.5, "worker")], NOW)
    elif state is T.SUCCESS:
        transitions.succeed(connection, [Success(task, 1, b"\x01", 0.25, "worker")], NOW)
    elif state in ENDED_TASK_STATES:
        transitions.end(connection, state, [AttemptEnd(task, None, "reason", ERROR)], NOW)
    assert row(connection, task).state == state
    return task


def claim(connection: Connection, task: bytes) -> list[Claimed]:
    return claims.claim(connection, {task.hex(): 10}, NOW)


# -- every function from every state


class Move(NamedTuple):
    """A store function with its target state, and the states from which it is allowed."""

    call: Callable[[Connection, bytes, int], Any]
    target: TaskState
    sources: tuple[TaskState, ...]


def _end(state: TaskState, *, by_attempt: bool) -> Callable[[Connection, bytes, int], Any]:
    def call(connection: Connection, task: bytes, attempt: int) -> Any:
        return transitions.end(
            connection, state, [AttemptEnd(task, attempt if by_attempt else None, "why", ERROR)], NOW
        )

    return call


def _start(connection: Connection, task: bytes, attempt: int) -> None:
    transitions.start(connection, [AttemptStart(task, attempt, 0.5, "worker")], NOW)


def _requeue(connection: Connection, task: bytes, attempt: int) -> list[Moved]:
    return transitions.requeue(connection, [Requeue(task, attempt, 3.0, 1, 0, False, "failed", ERROR, "w", 0.1)], NOW)


def _succeed(connection: Connection, task: bytes, attempt: int) -> list[Moved]:
    return transitions.succeed(connection, [Success(task, attempt, b"\x01", 0.25, "worker")], NOW)


MOVES = {
    "claim": Move(lambda connection, task, _: claim(connection, task), T.DISPATCHED, (T.PENDING,)),
    "start": Move(_start, T.RUNNING, (T.DISPATCHED,)),
    "requeue": Move(_requeue, T.PENDING, IN_FLIGHT_STATES),
    "succeed": Move(_succeed, T.SUCCESS, IN_FLIGHT_STATES),
    "fail the attempt": Move(_end(T.FAILED, by_attempt=True), T.FAILED, IN_FLIGHT_STATES),
    "fail": Move(_end(T.FAILED, by_attempt=False), T.FAILED, OPEN_TASK_STATES),
    "cancel": Move(_end(T.CANCELLED, by_attempt=False), T.CANCELLED, OPEN_TASK_STATES),
    "cancel the attempt": Move(_end(T.CANCELLED, by_attempt=True), T.CANCELLED, IN_FLIGHT_STATES),
    "skip": Move(_end(T.SKIPPED, by_attempt=False), T.SKIPPED, (T.PENDING,)),
    "revive": Move(
        lambda connection, task, _: revival.revive(connection, [task]).moved,
        T.PENDING,
        (T.FAILED, T.SKIPPED, T.CANCELLED),
    ),
    "revive with its run": Move(
        lambda connection, task, _: revival.revive(connection, [task], cancelled=True).moved,
        T.PENDING,
        (T.FAILED, T.SKIPPED, T.CANCELLED),
    ),
}
BY_ATTEMPT = ("start", "requeue", "succeed", "fail the attempt", "cancel the attempt")


def test_task_functions_cover_exactly_the_allowed_transitions() -> None:
    assert {(source, move.target) for move in MOVES.values() for source in move.sources} == TASK_PAIRS


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("state", TaskState)
def test_task_functions_move_tasks_only_from_allowed_states(
    connection: Connection, state: TaskState, name: str
) -> None:
    task = put(connection, state)
    move = MOVES[name]
    before = row(connection, task)
    moved = move.call(connection, task, before.attempt)
    after = row(connection, task)
    if state in move.sources:
        assert (state, move.target) in TASK_PAIRS
        assert after.state == move.target
    else:
        assert after == before
        assert not moved


@pytest.mark.parametrize("name", ["requeue", "succeed", "fail the attempt", "fail", "cancel", "skip", "revive"])
def test_a_function_returns_the_tasks_that_it_moved(connection: Connection, name: str) -> None:
    """Counters and announcements are derived only from these rows."""
    move = MOVES[name]
    for source in move.sources:
        task = put(connection, source)
        attempt = row(connection, task).attempt
        (moved,) = move.call(connection, task, attempt)
        assert moved._replace(before="") == Moved(task, move.target, task.hex(), None, attempt, "", "job")
        assert (moved.before in IN_FLIGHT_STATES) == (source in IN_FLIGHT_STATES)
        assert (moved.before in ENDED_TASK_STATES) == (source in ENDED_TASK_STATES)


@pytest.mark.parametrize("wrong", [-1, 1, 1000])
@pytest.mark.parametrize("name", BY_ATTEMPT)
@pytest.mark.parametrize("state", IN_FLIGHT_STATES)
def test_a_report_of_another_attempt_changes_nothing(
    connection: Connection, state: TaskState, name: str, wrong: int
) -> None:
    task = put(connection, state)
    before = row(connection, task)
    assert not MOVES[name].call(connection, task, before.attempt + wrong)
    assert row(connection, task) == before


@pytest.mark.parametrize("name", BY_ATTEMPT)
def test_a_late_report_changes_nothing(connection: Connection, name: str) -> None:
    """The attempt was given up: its report comes while the task waits, during the next attempt, and after the end."""
    task = put(connection, T.RUNNING)
    transitions.requeue(connection, [Requeue(task, 1)], NOW)

    def report_late() -> None:
        before = row(connection, task)
        assert not MOVES[name].call(connection, task, 1)
        assert row(connection, task) == before

    report_late()
    claim(connection, task)
    report_late()
    _start(connection, task, 2)
    report_late()
    _succeed(connection, task, 2)
    report_late()
    before = row(connection, task)
    assert not MOVES[name].call(connection, task, 2)  # the same report again
    assert row(connection, task) == before


def test_a_statement_moves_only_tasks_in_an_allowed_state(connection: Connection) -> None:
    good, wrong, waiting_one, gone = (
        put(connection, T.RUNNING),
        put(connection, T.DISPATCHED),
        put(connection),
        new_id(),
    )
    rows = [
        Success(task, attempt, b"r", 0.1, "w") for task, attempt in ((good, 1), (wrong, 2), (waiting_one, 0), (gone, 1))
    ]
    assert [moved.id for moved in transitions.succeed(connection, rows, NOW)] == [good]
    assert [row(connection, task).state for task in (good, wrong, waiting_one)] == ["success", "dispatched", "pending"]


# -- claims


def test_a_claim_takes_the_highest_priorities_within_its_limits(connection: Connection) -> None:
    tasks = [NewTask(new_id(), "job", "line", b"", priority) for priority in (0, 5, 0, -5, 5)]
    enqueue.copy_tasks(connection, tasks)
    order = [tasks[place].id for place in (1, 4, 0, 2, 3)]
    assert [task.id for task in claims.claim(connection, {"line": 2, "elsewhere": 9}, NOW)] == order[:2]
    assert [task.id for task in claims.claim(connection, {"line": 9}, NOW)] == order[2:]
    assert claims.claim(connection, {"line": 9}, NOW) == []


def test_a_claim_returns_the_task_with_the_next_attempt_number(connection: Connection) -> None:
    run = new_id()
    task = put(connection, run=run, position=4)
    expected = Claimed(task, 1, "job", b"payload", task.hex(), '{"timeout": 1.5}', run, 4, False, priority=7)
    (first,) = claim(connection, task)
    assert first == expected._replace(seq=first.seq)
    transitions.requeue(connection, [Requeue(task, 1, alone=True)], NOW)
    assert claim(connection, task) == [first._replace(attempt=2, alone=True)]


def test_delayed_held_and_blocked_tasks_are_not_claimed(connection: Connection) -> None:
    late, held, blocked = put(connection), put(connection, T.DISPATCHED), put(connection)
    update = text("UPDATE orchestrator.tasks SET wake_at = :at, blockers = :blockers WHERE id = CAST(:id AS uuid)")
    connection.execute(update, {"id": late.hex(), "at": NOW + timedelta(seconds=5), "blockers": 0})
    connection.execute(update, {"id": blocked.hex(), "at": None, "blockers": 1})
    transitions.requeue(connection, [Requeue(held, 1, 60.0, hold="unknown")], NOW)
    for task in (late, held, blocked):
        assert claim(connection, task) == []
    assert waiting.promote_due(connection, NOW + timedelta(seconds=4), 10) == 0
    assert waiting.promote_due(connection, NOW + timedelta(seconds=90), 10) == 1  # time does not release a held task
    assert len(claim(connection, late)) == 1
    assert waiting.release_known(connection, [(held.hex(), "another"), ("another", "job")], 10) == 0
    assert waiting.release_known(connection, [(held.hex(), "job")], 10) == 1
    assert claim(connection, held)[0].attempt == 2


# -- stored columns

KEPT = ("id", "seq", "name", "queue", "priority", "run_id", "position", "payload", "options", "created_at", "attempt")


@pytest.mark.parametrize("name", ["succeed", "fail", "cancel"])
def test_an_ended_task_keeps_its_columns_in_ended_tasks(connection: Connection, name: str) -> None:
    task = put(connection, T.RUNNING, run=new_id(), position=3)
    before = row(connection, task)
    MOVES[name].call(connection, task, 1)
    after = row(connection, task)
    assert {column: after.columns[column] for column in KEPT} == {column: before.columns[column] for column in KEPT}
    assert after.columns["ended_at"] == NOW
    assert after.columns["worker"] == "worker"


def test_the_columns_of_a_successful_task(connection: Connection) -> None:
    columns = row(connection, put(connection, T.SUCCESS)).columns
    assert (bytes(columns["result"]), columns["error"], columns["reason"]) == (b"\x01", None, None)
    assert columns["started_at"] == NOW - timedelta(seconds=0.25)  # the start was never reported


def test_the_columns_of_a_failed_task(connection: Connection) -> None:
    task = put(connection, T.RUNNING)
    transitions.end(connection, T.FAILED, [AttemptEnd(task, 1, "ValueError", ERROR, 1, 2, "other", 0.75)], NOW)
    columns = row(connection, task).columns
    assert (columns["reason"], columns["error"]["kind"], columns["result"]) == ("ValueError", "ValueError", None)
    assert (columns["failures"], columns["losses"], columns["worker"]) == (1, 2, "other")
    assert columns["started_at"] == NOW - timedelta(seconds=0.75)


def test_the_columns_of_a_task_that_waits_for_a_retry(connection: Connection) -> None:
    task = put(connection, T.RUNNING)
    transitions.requeue(connection, [Requeue(task, 1, 30.0, 1, 1, True, "lost", ERROR, "w", 0.5)], NOW)
    columns = row(connection, task).columns
    assert (columns["failures"], columns["losses"], columns["alone"]) == (1, 1, True)
    assert columns["wake_at"] == NOW + timedelta(seconds=30)
    assert (columns["worker"], columns["dispatched_at"], columns["started_at"]) == (None, None, None)


def test_a_revived_task_restarts_its_counts_but_not_its_attempts(connection: Connection) -> None:
    task = put(connection, T.RUNNING)
    transitions.end(connection, T.FAILED, [AttemptEnd(task, 1, "ValueError", ERROR, 1, 1)], NOW)
    before = row(connection, task)
    revival.revive(connection, [task])
    after = row(connection, task)
    assert {column: after.columns[column] for column in KEPT} == {column: before.columns[column] for column in KEPT}
    losses_and_alone = after.columns["losses"], after.columns["alone"]
    assert (after.columns["failures"], losses_and_alone) == (0, (0, True)), "its own process had died: it shares none"
    assert claim(connection, task)[0].attempt == 2


def history(connection: Connection, task: bytes) -> list[tuple[int, str, str]]:
    statement = """
        SELECT attempt, outcome, error->>'kind' FROM orchestrator.attempts
         WHERE task_id = CAST(:id AS uuid) ORDER BY attempt"""
    return [(r[0], r[1], r[2]) for r in connection.execute(text(statement), {"id": task.hex()})]


def test_failed_and_lost_attempts_are_recorded(connection: Connection) -> None:
    """Failed, lost, returned, failed for good, revived, failed for good, revived, succeeded."""
    task = put(connection, T.RUNNING)
    transitions.requeue(connection, [Requeue(task, 1, 0.0, 1, 0, False, "failed", ERROR, "a", 0.5)], NOW)
    claim(connection, task)
    transitions.requeue(connection, [Requeue(task, 2, 0.0, 0, 1, True, "lost", ERROR, "b")], NOW)
    claim(connection, task)
    transitions.requeue(connection, [Requeue(task, 3)], NOW)  # returned attempts are not recorded
    for attempt in (4, 5):
        claim(connection, task)
        transitions.end(connection, T.FAILED, [AttemptEnd(task, attempt, "ValueError", ERROR, 1)], NOW)
        revival.revive(connection, [task])
    claim(connection, task)
    transitions.succeed(connection, [Success(task, 6, b"", 0.1, "c")], NOW)
    failed, lost = "ValueError", "ValueError"
    assert history(connection, task) == [
        (1, "failed", failed),
        (2, "lost", lost),
        (4, "failed", failed),
        (5, "failed", failed),
    ]
    assert row(connection, task).attempt == 6


def test_a_task_that_never_ran_has_no_attempts(connection: Connection) -> None:
    task = put(connection, T.SKIPPED)
    revival.revive(connection, [task])
    assert history(connection, task) == []


def test_worker_names_may_contain_any_characters(connection: Connection) -> None:
    """One statement carries the reports of several workers, and no name may shift the others."""
    names = ["a,b", 'quo"te', "back\\slash", "{}", "NULL", "", "ü w"]
    tasks = [put(connection, T.DISPATCHED) for _ in names]
    rows = [Success(task, 1, b"", 0.1, name) for task, name in zip(tasks, names, strict=True)]
    assert len(transitions.succeed(connection, rows, NOW)) == len(names)
    assert [row(connection, task).columns["worker"] for task in tasks] == names


def test_any_text_and_any_bytes_survive_the_copy(connection: Connection) -> None:
    name = "tab\t back\\slash \\N new\nline return\r ü \U0001f600 \\."
    options = '{"text": "quote \\" backslash \\\\ tab \\t"}'
    new = NewTask(new_id(), name, "q\\t", bytes(range(256)), -3, 0.0, options, new_id(), 2)
    assert enqueue.copy_tasks(connection, [new]) == 1
    columns = row(connection, new.id).columns
    assert (columns["name"], columns["queue"], bytes(columns["payload"])) == (name, "q\\t", bytes(range(256)))
    assert columns["options"] == {"text": 'quote " backslash \\ tab \t'}
    assert (columns["priority"], columns["position"], columns["run_id"].bytes) == (-3, 2, new.run_id)


# -- tasks enqueued by tasks


def test_a_repeatedly_reported_child_is_created_once(connection: Connection) -> None:
    child = NewTask(new_id(), "job", "line", b"p", 3, 5.0, '{"timeout":1.0}')
    enqueue.create_tasks(connection, [child, child], NOW)
    enqueue.create_tasks(connection, [child], NOW + timedelta(seconds=60))
    columns = row(connection, child.id).columns
    assert (columns["priority"], columns["wake_at"]) == (3, NOW + timedelta(seconds=5))
    waiting.promote_due(connection, NOW + timedelta(seconds=5), 10)
    claims.claim(connection, {"line": 1}, NOW)
    transitions.succeed(connection, [Success(child.id, 1, b"", 0.1, "w")], NOW)
    enqueue.create_tasks(connection, [child], NOW)
    assert row(connection, child.id).state == "success"


# -- runs


def put_run(connection: Connection, state: RunState = RunState.PENDING, total: int = 1) -> bytes:
    run = new_id()
    creation.create(connection, [NewRun(run, "run", total)])
    if state in (RunState.RUNNING, RunState.SUCCESS, RunState.FAILED):
        runs.begin(connection, NOW, 100)
    if state in ENDED_RUN_STATES:
        assert [row.id for row in runs.end(connection, [(run, state, None)], NOW)] == [run]
    assert run_state(connection, run) == state
    return run


def run_state(connection: Connection, run: bytes) -> str:
    found = results.progress(connection, run)
    assert found is not None
    return found[0]


def _requeue_run(connection: Connection, run: bytes) -> set[bytes]:
    connection.execute(
        text("UPDATE orchestrator.runs SET workflow = 'w' WHERE id = CAST(:id AS uuid)"), {"id": run.hex()}
    )
    return cancels.requeue(connection, [run])


def _requeue_child(connection: Connection, run: bytes) -> int:
    update = "UPDATE orchestrator.runs SET parent_run = id, parent_step = 's' WHERE id = CAST(:id AS uuid)"
    connection.execute(text(update), {"id": run.hex()})
    return cancels.requeue_children(connection, run, "s", NOW, 10)


def _begin(connection: Connection, run: bytes) -> Any:
    return [begun for begun in runs.begin(connection, NOW, 100) if begun.id == run]


RUN_MOVES: dict[str, tuple[Callable[[Connection, bytes], Any], RunState, tuple[RunState, ...]]] = {
    "begin": (_begin, RunState.RUNNING, (RunState.PENDING,)),
    "requeue": (_requeue_run, RunState.PENDING, (RunState.FAILED,)),
    "requeue a child": (_requeue_child, RunState.PENDING, (RunState.FAILED, RunState.CANCELLED)),
    "reopen": (
        lambda connection, run: runs.reopen(connection, [run], datetime.now(UTC)),
        RunState.RUNNING,
        (RunState.FAILED,),
    ),
    "succeed": (
        lambda c, run: runs.end(c, [(run, RunState.SUCCESS, None)], NOW),
        RunState.SUCCESS,
        (RunState.RUNNING,),
    ),
    "fail": (
        lambda c, run: runs.end(c, [(run, RunState.FAILED, None)], NOW),
        RunState.FAILED,
        (RunState.PENDING, RunState.RUNNING),
    ),
    "cancel": (
        lambda c, run: runs.end(c, [(run, RunState.CANCELLED, None)], NOW),
        RunState.CANCELLED,
        (RunState.PENDING, RunState.RUNNING),
    ),
}


def test_run_functions_cover_exactly_the_allowed_transitions() -> None:
    assert {(source, target) for _, target, sources in RUN_MOVES.values() for source in sources} == RUN_PAIRS


@pytest.mark.parametrize("name", RUN_MOVES)
@pytest.mark.parametrize("state", RunState)
def test_run_functions_move_runs_only_from_allowed_states(connection: Connection, state: RunState, name: str) -> None:
    run = put_run(connection, state)
    call, target, sources = RUN_MOVES[name]
    moved = call(connection, run)
    if state in sources:
        assert (state, target) in RUN_PAIRS
        assert run_state(connection, run) == target
    else:
        assert run_state(connection, run) == state
        assert not moved


@pytest.mark.parametrize("state", RunState)
def test_requesting_a_cancel_does_not_change_the_state_of_a_run(connection: Connection, state: RunState) -> None:
    run = put_run(connection, state)
    cancels.mark_cancelling(connection, [run])
    assert run_state(connection, run) == state
    assert bool(cancels.following(connection, bytes(16), 10)) == (state in (RunState.PENDING, RunState.RUNNING))
    assert runs.begin(connection, NOW, 10) == []


@pytest.mark.parametrize("state", RunState)
@pytest.mark.parametrize("cancelling", [False, True])
def test_a_task_is_revived_only_if_its_run_can_continue(
    connection: Connection, state: RunState, cancelling: bool
) -> None:
    run = put_run(connection, state)
    task = put(connection, T.FAILED, run=run)
    if cancelling:
        cancels.mark_cancelling(connection, [run])
    allowed = state is RunState.FAILED or (state is RunState.RUNNING and not cancelling)
    assert bool(revival.revive(connection, [task]).moved) == allowed
    assert row(connection, task).state == ("pending" if allowed else "failed")


# -- counters


def recount(connection: Connection, run: bytes) -> RunCounters:
    """Count the tasks of a run row by row, which the product never does."""
    statement = """
        SELECT status FROM orchestrator.tasks WHERE run_id = CAST(:id AS uuid)
         UNION ALL SELECT status FROM orchestrator.ended_tasks WHERE run_id = CAST(:id AS uuid)"""
    counted = Counter(connection.execute(text(statement), {"id": run.hex()}).scalars())
    ended = {str(state): counted[state] for state in ENDED_TASK_STATES}
    return RunCounters(total=counted.total(), open=sum(counted[state] for state in OPEN_TASK_STATES), **ended)


def counters(connection: Connection, run: bytes) -> RunCounters:
    found = results.progress(connection, run)
    assert found is not None
    return found[1]


def test_counters_stay_exact_when_tasks_end_and_are_revived(connection: Connection) -> None:
    tick = new_tick(connection)
    run = new_id()
    creation.create(connection, [NewRun(run, "run", 6)])
    tasks = [put(connection, run=run, position=position) for position in range(6)]
    tick.begin()

    def check(state: str, **expected: int) -> None:
        tick.advance()
        assert run_state(connection, run) == state
        assert counters(connection, run) == recount(connection, run) == RunCounters(total=6, **expected)

    check("running", open=6)
    for task in tasks[:4]:
        claim(connection, task)
    tick.report(
        Started(tasks[0], 1, 0.1), Succeeded(tasks[1], 1, 0.1, b""), Failed(tasks[2], 1, 0.1, TaskError("E", ""))
    )
    check("running", open=4, success=1, failed=1)
    tick.cancel([tasks[3], tasks[1], tasks[3]])
    check("running", open=3, success=1, failed=1, cancelled=1)
    tick.result.note(transitions.end(connection, T.SKIPPED, [AttemptEnd(tasks[4], None, "upstream")], NOW))
    check("running", open=2, success=1, failed=1, cancelled=1, skipped=1)
    tick.retry([tasks[2], tasks[1], tasks[3], tasks[2]])
    check("running", open=3, success=1, cancelled=1, skipped=1)
    for task in (tasks[2], tasks[5]):
        claim(connection, task)
    tick.report(
        *(
            Failed(task, row(connection, task).attempt, 0.1, TaskError("E", ""))
            for task in (tasks[0], tasks[2], tasks[5])
        ),
    )
    check("failed", open=0, success=1, failed=3, cancelled=1, skipped=1)
    assert len(tick.retry(runs.retryable_tasks(connection, run, NOW, 100)).moved) == 4
    check("running", open=4, success=1, cancelled=1)
    for task in (tasks[0], tasks[2], tasks[4], tasks[5]):
        claim(connection, task)
        tick.report(Succeeded(task, row(connection, task).attempt, 0.1, b""))
    check("failed", open=0, success=5, cancelled=1)


# -- random sequences


class Life(RuleBasedStateMachine):
    """Any events of a few tasks and runs, in any order."""

    connection: Connection

    def __init__(self) -> None:
        super().__init__()
        self.savepoint = self.connection.begin_nested()
        self.tasks: list[bytes] = []
        self.runs: list[bytes] = []
        self.tick = new_tick(self.connection)
        self.was: dict[bytes, tuple[str, int]] = {}
        self.was_runs: dict[bytes, str] = {}
        self.completed: set[bytes] = set()

    def teardown(self) -> None:
        self.savepoint.rollback()

    def some(self, choices: list[int]) -> list[bytes]:
        return [self.tasks[choice % len(self.tasks)] for choice in choices]

    # -- events

    @initialize(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=2), alone=st.integers(0, 2))
    def create(self, sizes: list[int], alone: int) -> None:
        options = '{"retry":{"max":1,"jitter":0}}'
        for size in sizes:
            run = new_id()
            creation.create(self.connection, [NewRun(run, "run", size)])
            new = [NewTask(new_id(), "job", "line", b"", 0, 0.0, options, run, place) for place in range(size)]
            enqueue.copy_tasks(self.connection, new)
            self.runs.append(run)
            self.tasks += [task.id for task in new]
        for _ in range(alone):
            self.tasks.append(put(self.connection))
        self.look()

    @rule()
    def begin_the_runs(self) -> None:
        self.tick.begin()

    @rule(count=st.integers(1, 4))
    def claim_some(self, count: int) -> None:
        queues = {"line": count} | {task.hex(): count for task in self.tasks}
        claims.claim(self.connection, queues, NOW)

    @rule(
        choices=st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True),
        kinds=st.lists(st.sampled_from(["started", "succeeded", "failed", "hopeless", "returned", "lost"]), min_size=3),
        late=st.sampled_from([0, 0, 0, 0, -1, 1]),
    )
    def report(self, choices: list[int], kinds: list[str], late: int) -> None:
        reports = []
        for task, kind in zip(self.some(choices), kinds, strict=False):
            attempt = self.was[task][1] + late
            error = TaskError("E", "")
            reports.append(
                {
                    "started": Started(task, attempt, 0.1),
                    "succeeded": Succeeded(task, attempt, 0.1, b"r"),
                    "failed": Failed(task, attempt, 0.1, error),
                    "hopeless": Failed(task, attempt, 0.1, error, retryable=False),
                    "returned": Returned(task, attempt, "drained"),
                    "lost": Lost(task, attempt, alone=False),
                }[kind]
            )
        self.tick.report(*reports)  # type: ignore[arg-type]

    @rule()
    def time_passes(self) -> None:
        waiting.promote_due(self.connection, NOW + timedelta(hours=1), 10)

    @rule(choices=st.lists(st.integers(0, 9), min_size=1, max_size=3))
    def cancel(self, choices: list[int]) -> None:
        self.tick.cancel(self.some(choices))

    @rule(choices=st.lists(st.integers(0, 9), min_size=1, max_size=3), state=st.sampled_from([T.SKIPPED, T.FAILED]))
    def give_up(self, choices: list[int], state: TaskState) -> None:
        endings = [AttemptEnd(task, None, "why") for task in dict.fromkeys(self.some(choices))]
        self.tick.result.note(transitions.end(self.connection, state, endings, NOW))

    @rule(choices=st.lists(st.integers(0, 9), min_size=1, max_size=3))
    def retry(self, choices: list[int]) -> None:
        self.tick.retry(self.some(choices))

    @rule(choice=st.integers(0, 1))
    def retry_run(self, choice: int) -> None:
        run = self.runs[choice % len(self.runs)]
        self.tick.retry(runs.retryable_tasks(self.connection, run, NOW, 100))

    @rule(choices=st.lists(st.integers(0, 9), min_size=1, max_size=2, unique=True))
    def complete_in_a_transaction(self, choices: list[int]) -> None:
        statement = text(
            "UPDATE orchestrator.tasks SET completion = '\\x01' WHERE id = CAST(:id AS uuid)"
            " AND status IN ('dispatched', 'running') AND completion IS NULL"
        )
        for task in self.some(choices):
            if self.connection.execute(statement, {"id": task.hex()}).rowcount:
                inbox.add(self.connection, RequestKind.COMPLETE_TASK, task, "0.1")
                self.completed.add(task)

    @rule()
    def apply_the_inbox(self) -> None:
        self.tick.apply_inbox(10)
        assert all(self.state_of(task) == T.SUCCESS for task in self.completed)

    def state_of(self, task: bytes) -> str:
        return row(self.connection, task).state

    @rule(choice=st.integers(0, 9))
    def cancel_run(self, choice: int) -> None:
        if choice < len(self.runs):  # rarely, or all runs would be cancelled at once
            cancels.mark_cancelling(self.connection, [self.runs[choice]])
        self.tick.cancel_runs(2)

    # -- invariants

    @invariant()
    def holds(self) -> None:
        if self.tasks:
            self.tick.advance()
            before, before_runs = self.was, self.was_runs
            self.look()
            self.check_tasks(before)
            self.check_runs(before_runs)

    def look(self) -> None:
        both = "SELECT id, status, attempt FROM orchestrator.{}"
        rows = [r for table in ("tasks", "ended_tasks") for r in self.connection.execute(text(both.format(table)))]
        assert len(rows) == len(self.tasks)
        self.was = {r[0].bytes: (r[1], r[2]) for r in rows}
        self.was_runs = {run: run_state(self.connection, run) for run in self.runs}

    def check_tasks(self, before: dict[bytes, tuple[str, int]]) -> None:
        assert self.was.keys() == before.keys()
        for task, (state, attempt) in self.was.items():
            old_state, old_attempt = before[task]
            claimed = old_state == "pending" and state == "dispatched"
            assert attempt == old_attempt + claimed
            assert state == old_state or (old_state, state) in TASK_PAIRS
            assert task not in self.completed or state in (*IN_FLIGHT_STATES, T.SUCCESS)

    def check_runs(self, before: dict[bytes, str]) -> None:
        for run, state in self.was_runs.items():
            counted = recount(self.connection, run)
            assert counters(self.connection, run) == counted
            old = before[run]
            if state != old and (old, state) not in RUN_PAIRS:
                assert {(old, "running"), ("running", state)} <= RUN_PAIRS  # began and ended in one tick
            if state == "running":
                assert counted.open
            elif state in ENDED_RUN_STATES:
                assert verdict(counted, state == "cancelled") == state


@pytest.mark.hypothesis
def test_random_sequences_keep_the_invariants(connection: Connection) -> None:
    class Connected(Life):
        pass

    Connected.connection = connection
    run_state_machine_as_test(Connected, settings=examples(40, stateful_step_count=30))
