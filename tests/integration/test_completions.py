"""Tasks that complete in their own transactions: the fence, races with the leader, and rules of a block."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, exc, make_url, text
from sqlalchemy.orm import Session

from orchestrator import (
    AttemptOver,
    ConfigurationError,
    Duplicate,
    Orchestrator,
    OrchestratorError,
    PayloadError,
    Settings,
    TaskAborted,
    TaskContext,
    TaskTimeout,
    WrongState,
)
from orchestrator.domain.ids import time_ordered_id
from orchestrator.domain.states import TaskState
from orchestrator.domain.tasks.task import (
    Dispatch,
    Failed,
    Lost,
    NewTask,
    Noted,
    Returned,
    Started,
    Succeeded,
    TaskError,
)
from orchestrator.scheduler.tasks.locked import VERDICT
from orchestrator.scheduler.tick_result import TickResult
from orchestrator.sdk.tasks.context import enter_task
from orchestrator.sdk.values.payload import decode_value
from orchestrator.store import database, inbox
from orchestrator.store.inbox import RequestKind
from orchestrator.store.tasks import claims, completions, details, enqueue, transitions
from orchestrator.store.tasks.transitions import AttemptEnd, AttemptStart, Requeue
from orchestrator.workers.functions import Allowed
from orchestrator.workers.running.job import Bundle, Job
from orchestrator.workers.running.runner import Runner
from orchestrator.workers.running.task_runtime import JobRuntime
from tests.emptying import empty
from tests.integration.parts import Parts
from tests.outbox import KeptOutbox
from tests.waiting import eventually

NOW = datetime(2026, 11, 15, 12, tzinfo=UTC)
ERROR = '{"kind": "ValueError", "message": "no", "traceback": ""}'
ONE, TWO = b"\x01", b"\x02"
"""Encoded results."""


@pytest.fixture(scope="module")
def engine(database_url: str) -> Iterator[Engine]:
    engine = database.engine_for(database_url)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE ledger (entry text)")
        connection.exec_driver_sql(
            "CREATE TABLE unique_later (entry text, UNIQUE (entry) DEFERRABLE INITIALLY DEFERRED)"
        )
        connection.exec_driver_sql("CREATE TABLE account (id int PRIMARY KEY)")
        connection.exec_driver_sql(
            "CREATE TABLE booking (account int REFERENCES account DEFERRABLE INITIALLY DEFERRED)"
        )
        connection.exec_driver_sql("INSERT INTO account VALUES (7)")
    yield engine
    engine.dispose()


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    """The leader's connection, on empty tables."""
    with engine.begin() as connection:
        empty(connection)
        connection.exec_driver_sql("DELETE FROM ledger")
    with engine.connect() as connection:
        yield connection


@pytest.fixture
def impatient(connection: Connection) -> Iterator[None]:
    """Let the leader's statements fail soon if they wait for a lock."""
    connection.exec_driver_sql("SET lock_timeout = '300ms'")
    connection.commit()
    yield
    connection.rollback()
    connection.exec_driver_sql("RESET lock_timeout")
    connection.commit()


@pytest.fixture
def other(engine: Engine) -> Iterator[Connection]:
    """A worker's connection."""
    with engine.connect() as connection:
        yield connection


def put(
    connection: Connection, *, running: bool = False, options: str | None = None, callbacks: str | None = None
) -> bytes:
    """Create and claim a task, and commit."""
    task = time_ordered_id(1_700_000_000_000, os.urandom(10))
    enqueue.insert_task(
        connection, NewTask(task, "job", task.hex(), b"\x92\x90\x80", options=options, callbacks=callbacks)
    )
    assert [claimed.attempt for claimed in claims.claim(connection, {task.hex(): 1}, NOW)] == [1]
    if running:
        transitions.start(connection, [AttemptStart(task, 1, 0.5, "worker")], NOW)
    connection.commit()
    return task


def outcome(connection: Connection, task: bytes) -> tuple[Any, ...]:
    """Return a task's state, attempt and result, from whichever table holds the task."""
    found = connection.execute(
        text("""
            SELECT status, attempt, result FROM orchestrator.ended_tasks WHERE id = CAST(:id AS uuid) UNION ALL
            SELECT status, attempt, completion FROM orchestrator.tasks WHERE id = CAST(:id AS uuid)"""),
        {"id": task.hex()},
    ).all()
    connection.rollback()
    ((status, attempt, result),) = found
    return status, attempt, None if result is None else bytes(result)


def ledger(connection: Connection) -> list[str]:
    entries = [row[0] for row in connection.exec_driver_sql("SELECT entry FROM ledger ORDER BY entry")]
    connection.rollback()
    return entries


def write(connection: Connection, entry: str) -> None:
    connection.execute(text("INSERT INTO ledger VALUES (:entry)"), {"entry": entry})


def complete(connection: Connection, task: bytes, attempt: int = 1, result: bytes = ONE) -> bool:
    """Complete a task as a worker does."""
    assert completions.begin(connection, task, attempt)
    write(connection, task.hex())
    done = completions.commit(connection, task, attempt, result, 0.25)
    connection.rollback()
    return done


def apply(connection: Connection, *reports: Any) -> TickResult:
    tick = Parts(connection, NOW)
    tick.report(*reports)
    tick.apply_inbox(100)
    connection.commit()
    return tick.result


# -- losing an attempt

TAKERS: dict[str, Callable[[Connection, bytes], Any]] = {
    "requeue": lambda c, task: transitions.requeue(
        c, [Requeue(task, 1, 0.0, 1, 0, False, "failed", ERROR, "w", 0.1)], NOW
    ),
    "fail the attempt": lambda c, task: transitions.end(c, TaskState.FAILED, [AttemptEnd(task, 1, "why", ERROR)], NOW),
    "fail": lambda c, task: transitions.end(c, TaskState.FAILED, [AttemptEnd(task, None, "why", ERROR)], NOW),
    "cancel": lambda c, task: transitions.end(c, TaskState.CANCELLED, [AttemptEnd(task, None, "why", ERROR)], NOW),
}


@pytest.mark.parametrize("name", TAKERS)
@pytest.mark.parametrize("running", [False, True])
def test_a_completed_task_is_not_taken_away(
    connection: Connection, other: Connection, name: str, running: bool
) -> None:
    task = put(connection, running=running)
    assert complete(other, task)
    assert TAKERS[name](connection, task) == []
    connection.commit()
    apply(connection)
    assert outcome(connection, task) == ("success", 1, ONE)
    assert ledger(connection) == [task.hex()]


@pytest.mark.parametrize("name", TAKERS)
@pytest.mark.parametrize("running", [False, True])
def test_a_completion_that_commits_while_the_leader_waits_for_the_row_wins(
    connection: Connection, other: Connection, name: str, running: bool
) -> None:
    task = put(connection, running=running)
    with holding(other, task) as release:
        moved = beside(lambda: TAKERS[name](connection, task), connection, release)
    assert moved == []
    connection.commit()
    assert outcome(connection, task) == ("running" if running else "dispatched", 1, ONE)


@pytest.mark.parametrize("name", TAKERS)
def test_a_completion_of_an_attempt_taken_away_meanwhile_is_rolled_back(
    connection: Connection, other: Connection, name: str
) -> None:
    task = put(connection)
    assert completions.begin(other, task, 1)
    write(other, "too late")
    assert TAKERS[name](connection, task)
    done = beside(lambda: completions.commit(other, task, 1, ONE, 0.1), other, connection.commit)
    other.rollback()
    assert done is False
    assert outcome(connection, task)[0] in ("pending", "failed", "cancelled")
    assert ledger(connection) == []
    assert connection.exec_driver_sql("SELECT count(*) FROM orchestrator.inbox").scalar_one() == 0


@pytest.mark.usefixtures("impatient")
def test_a_deferred_constraint_that_waits_holds_no_lock_on_the_task(
    connection: Connection, other: Connection, engine: Engine
) -> None:
    task = put(connection)
    with engine.connect() as colleague:
        colleague.exec_driver_sql("SELECT FROM account WHERE id = 7 FOR UPDATE")
        assert completions.begin(other, task, 1)
        write(other, "too late")
        other.exec_driver_sql("INSERT INTO booking VALUES (7)")

        def take_away() -> None:
            try:
                apply(connection, Failed(task, 1, 5.0, TaskError("TaskTimeout", "")))
            finally:
                colleague.rollback()

        assert beside(lambda: completions.commit(other, task, 1, ONE, 0.1), other, take_away) is False
    other.rollback()
    assert (outcome(connection, task)[0], ledger(connection)) == ("failed", [])


def test_other_writes_of_the_leader_do_no_harm_to_a_completion(connection: Connection, other: Connection) -> None:
    task = put(connection)
    with holding(other, task) as release:
        beside(lambda: details.save(connection, [Noted(task, 1, b"details")]), connection, release)
    connection.commit()
    assert outcome(connection, task)[1:] == (1, ONE)


REPORTS_OF_LOCKED: dict[str, tuple[str, Callable[[bytes], Any]]] = {
    "failed": ("failed", lambda task: Failed(task, 1, 5.0, TaskError("TaskTimeout", ""))),
    "lost": ("pending", lambda task: Lost(task, 1, alone=False)),
    "returned": ("pending", lambda task: Returned(task, 1, "draining")),
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("name", REPORTS_OF_LOCKED)
@pytest.mark.parametrize("completes", [True, False])
def test_a_report_about_a_locked_task_is_kept_until_the_lock_is_gone(
    connection: Connection, other: Connection, name: str, completes: bool
) -> None:
    state, report = REPORTS_OF_LOCKED[name]
    task, free = put(connection, running=True), put(connection, running=True)
    with holding(other, task) as release:
        first = apply(connection, report(task), Started(task, 1, 0.1), report(free))
        again = apply(connection)
        assert (first.wake.contested, again.wake.contested) == (True, True)
        assert (outcome(connection, task)[0], outcome(connection, free)[0]) == ("running", state)
        if completes:
            release()
    apply(connection)  # a leader that knows nothing of the first
    assert outcome(connection, task)[0] == ("running" if completes else state)
    assert inbox_kinds(connection) == []
    assert apply(connection).wake.contested is False


@pytest.mark.usefixtures("impatient")
def test_the_start_of_a_locked_attempt_is_not_awaited(connection: Connection, other: Connection) -> None:
    task = put(connection)
    with holding(other, task) as release:
        apply(connection, Started(task, 1, 0.5))
        release()
    assert outcome(connection, task) == ("dispatched", 1, ONE)


@pytest.mark.usefixtures("impatient")
def test_a_verdict_about_a_locked_task_is_not_kept(connection: Connection, other: Connection) -> None:
    """The reconciler repeats it, and the worker's own kept report comes first."""
    task = put(connection)
    verdict = (VERDICT, "w", Returned(task, 1, "message lost"))
    leader = Parts(connection, NOW)
    with holding(other, task):
        leader.judge(verdict)
        assert inbox_kinds(connection) == []
        leader.report(Failed(task, 1, 5.0, TaskError("TaskTimeout", "")))
        leader.tx.connection.commit()
    leader.judge(verdict)
    leader.apply_inbox(100)
    connection.commit()
    assert outcome(connection, task)[0] == "failed"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("completes", [True, False])
def test_a_cancel_of_a_locked_task_is_kept_until_the_lock_is_gone(
    connection: Connection, other: Connection, completes: bool
) -> None:
    task, free = put(connection, running=True), put(connection, running=True)
    for target in (task, free):
        inbox.add(connection, RequestKind.CANCEL_TASK, target)
    connection.commit()
    with holding(other, task) as release:
        result = apply(connection)
        assert (result.wake.contested, result.outgoing.set_aside) == (True, [])
        assert (outcome(connection, free)[0], inbox_kinds(connection)) == ("cancelled", ["cancel task"])
        if completes:
            release()
    apply(connection)
    assert outcome(connection, task)[0] == ("running" if completes else "cancelled")
    assert inbox_kinds(connection) == []


@pytest.mark.usefixtures("impatient")
def test_the_leader_itself_asks_again_to_cancel_a_locked_task(connection: Connection, other: Connection) -> None:
    task = put(connection, running=True)
    with holding(other, task):
        Parts(connection, NOW).cancel([task])
        connection.commit()
    apply(connection)
    assert outcome(connection, task)[0] == "cancelled"


@pytest.mark.usefixtures("impatient")
def test_a_completion_whose_task_somebody_has_locked_is_kept(connection: Connection, other: Connection) -> None:
    task = put(connection)
    assert complete(other, task)
    other.exec_driver_sql(f"SELECT FROM orchestrator.tasks WHERE id = '{task.hex()}' FOR UPDATE")
    apply(connection)
    assert inbox_kinds(connection) == ["complete task"]
    other.rollback()
    apply(connection)
    assert outcome(connection, task) == ("success", 1, ONE)


@pytest.mark.usefixtures("impatient")
def test_requests_about_locked_tasks_do_not_keep_others_from_their_turn(
    connection: Connection, other: Connection
) -> None:
    task, free = put(connection, running=True), put(connection, running=True)
    for target in (task, free):
        inbox.add(connection, RequestKind.CANCEL_TASK, target)
    connection.commit()
    with holding(other, task):
        for _ in range(2):
            leader = Parts(connection, NOW)
            leader.apply_inbox(1)
            connection.commit()
        assert outcome(connection, free)[0] == "cancelled"


@pytest.mark.usefixtures("impatient")
def test_who_has_locked_a_task_for_long_is_logged(
    connection: Connection, other: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    task = put(connection, running=True)
    inbox.add(connection, RequestKind.CANCEL_TASK, task)
    connection.exec_driver_sql("UPDATE orchestrator.inbox SET created_at = now() - interval '6 seconds'")
    connection.commit()
    pid = other.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
    with holding(other, task):
        apply(connection)
    assert [f"holder=pid {pid} " in record.getMessage() for record in caplog.records] == [True]
    assert "task.locked request='cancel task'" in caplog.text


def inbox_kinds(connection: Connection) -> list[str]:
    kinds = [row[0] for row in connection.exec_driver_sql("SELECT kind FROM orchestrator.inbox ORDER BY id")]
    connection.rollback()
    return kinds


class holding:  # noqa: N801
    """A completion that is written but not committed, as in the moment before the commit."""

    def __init__(self, connection: Connection, task: bytes) -> None:
        self._connection = connection
        self._task = task

    def __enter__(self) -> Callable[[], None]:
        self._connection.execute(
            text("UPDATE orchestrator.tasks SET completion = :result WHERE id = CAST(:id AS uuid)"),
            {"result": ONE, "id": self._task.hex()},
        )
        return self._connection.commit

    def __exit__(self, *_: object) -> None:
        self._connection.rollback()


def beside(call: Callable[[], Any], connection: Connection, release: Callable[[], None]) -> Any:
    """Call something that has to wait in Postgres; release it once it waits, and return its result."""
    backend = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
    with ThreadPoolExecutor(1) as thread, connection.engine.connect() as watcher:

        def waits() -> bool:
            kind = watcher.execute(
                text("SELECT wait_event_type FROM pg_stat_activity WHERE pid = :pid"), {"pid": backend}
            ).scalar_one()
            watcher.rollback()
            return bool(kind == "Lock")

        future = thread.submit(call)
        try:
            eventually(waits, "one waits for the other")
        finally:
            release()
        return future.result(60)


# -- how the leader learns of it


@pytest.mark.parametrize("order", ["report first", "inbox first", "report never"])
def test_a_completion_counts_once_with_or_without_a_report(
    connection: Connection, other: Connection, order: str
) -> None:
    task = put(connection)
    report = Succeeded(task, 1, 0.25, TWO)
    assert complete(other, task)
    first = apply(connection, *([report] if order == "report first" else []))
    second = apply(connection, *([report] if order == "inbox first" else []))
    assert outcome(connection, task) == ("success", 1, ONE)
    assert [ended.id for tick in (first, second) for ended in tick.outgoing.ended] == [task]
    assert sum(tick.capacity.out_of_flight.total() for tick in (first, second)) == 1
    assert connection.exec_driver_sql("SELECT count(*) FROM orchestrator.inbox").scalar_one() == 0


@pytest.mark.parametrize("retries", [None, '{"retry":{"max":3}}'])
def test_a_failure_or_a_loss_after_the_completion_changes_nothing(
    connection: Connection, other: Connection, retries: str | None
) -> None:
    tasks = [put(connection, options=retries) for _ in range(2)]
    for task in tasks:
        assert complete(other, task)
    apply(connection, Failed(tasks[0], 1, 0.1, TaskError("E", "")), Lost(tasks[1], 1, alone=True))
    assert [outcome(connection, task) for task in tasks] == [("success", 1, ONE)] * 2
    assert connection.exec_driver_sql("SELECT count(*) FROM orchestrator.attempts").scalar_one() == 0


def test_a_cancel_after_the_completion_comes_too_late(connection: Connection, other: Connection) -> None:
    task = put(connection)
    assert complete(other, task)
    tick = Parts(connection, NOW)
    tick.cancel([task])
    connection.commit()
    assert tick.result.outgoing.ended == []
    assert tick.result.outgoing.revoked == []
    apply(connection)
    assert outcome(connection, task) == ("success", 1, ONE)


def test_a_success_callback_receives_the_completion(
    app: Orchestrator, connection: Connection, other: Connection
) -> None:
    job = app.task(name="job", on_success=app.tasks["child"])(lambda: None)
    assert complete(other, put(connection, callbacks=job._new((), {}).callbacks))
    (follower,) = apply(connection).tasks.follow_ups
    assert (follower.name, decode_value(follower.payload)) == ("child", [[1], {}])


def test_a_completion_of_an_earlier_attempt_is_rejected_at_once(connection: Connection, other: Connection) -> None:
    task = put(connection)
    transitions.requeue(connection, [Requeue(task, 1)], NOW)
    connection.commit()
    assert not completions.begin(other, task, 1)
    other.rollback()
    claims.claim(connection, {task.hex(): 1}, NOW)
    connection.commit()
    assert not completions.begin(other, task, 1)
    assert completions.begin(other, task, 2)


def test_a_task_completes_only_once(connection: Connection, other: Connection) -> None:
    task = put(connection)
    assert complete(other, task)
    assert not completions.begin(other, task, 1)
    assert completions.commit(other, task, 1, TWO, 0.1) is False
    other.rollback()
    assert outcome(connection, task)[2] == ONE


def test_a_constraint_that_fails_at_the_commit_rolls_everything_back(connection: Connection, other: Connection) -> None:
    task = put(connection)
    assert completions.begin(other, task, 1)
    other.exec_driver_sql("INSERT INTO unique_later VALUES ('same'), ('same')")
    with pytest.raises(exc.IntegrityError):
        completions.commit(other, task, 1, ONE, 0.1)
    other.rollback()
    assert outcome(connection, task) == ("dispatched", 1, None)


def test_a_transaction_that_is_left_idle_ends(connection: Connection, other: Connection) -> None:
    assert completions.begin(other, put(connection), 1)
    assert other.exec_driver_sql("SHOW idle_in_transaction_session_timeout").scalar_one() == "1min"
    other.rollback()
    assert other.exec_driver_sql("SHOW idle_in_transaction_session_timeout").scalar_one() == "0"


# -- the block


class Running:
    """A task that runs in the current thread."""

    def __init__(self, app: Orchestrator, task: bytes, options: str | None = None) -> None:
        self.job = Job(Dispatch(task, 1, "job", b"", "default", options), Bundle("", "", "", 1), 0, 0.0)
        self.job.begin(0.0)
        self.outbox = KeptOutbox()
        self.runtime = JobRuntime(self.job, self.outbox, app)
        self.ctx: TaskContext = self.runtime.context()


@pytest.fixture
def app(database_url: str, redis_url: str) -> Iterator[Orchestrator]:
    app = Orchestrator(Settings(database_url=database_url, redis_url=redis_url, max_payload=1_000))
    app.task(name="child")(lambda number=0: number)
    yield app
    app.close()


@pytest.fixture
def running(connection: Connection, app: Orchestrator) -> Iterator[Running]:
    running = Running(app, put(connection))
    enter_task(running.runtime)
    yield running
    enter_task(None)


def children(connection: Connection) -> int:
    found: int = connection.exec_driver_sql("SELECT count(*) FROM orchestrator.tasks WHERE name = 'child'").scalar_one()
    connection.rollback()
    return found


def test_all_of_a_block_commits_together(app: Orchestrator, running: Running, connection: Connection) -> None:
    child = app.tasks["child"]
    child.options(on_success=True).enqueue(1)
    with running.ctx.transaction() as transaction:
        write(transaction, "once")
        child.enqueue(2)
        child.enqueue_in(transaction, 3)
        app.enqueue_many(child, [(4,), (5,)])
        child.options(on_success=True).enqueue(6)
        assert running.ctx.complete({"balance": 7}) == {"balance": 7}
        assert (ledger(connection), children(connection)) == ([], 0)
    assert (ledger(connection), children(connection)) == (["once"], 6)
    assert outcome(connection, running.job.dispatch.id)[2] == b"\x81\xa7balance\x07"
    assert running.outbox.tasks == []
    assert running.job.children == []
    child.enqueue(7)
    child.options(on_success=True).enqueue(8)  # the task has succeeded: at once
    assert len(running.outbox.tasks) == 2


def test_a_block_leaves_no_warning_in_the_log_of_postgres(running: Running) -> None:
    """Each block left a warning about a ROLLBACK outside of any transaction."""
    with running.ctx.transaction() as connection:
        lent: Any = connection.connection.dbapi_connection
        connection.execute(text("INSERT INTO ledger VALUES ('quiet')"))
    assert lent.notices == []


def test_a_block_stores_no_result_if_the_task_keeps_none(app: Orchestrator, connection: Connection) -> None:
    running = Running(app, put(connection), options='{"store_result":false}')
    with running.ctx.transaction():
        assert running.ctx.complete(object()) is not None
    assert outcome(connection, running.job.dispatch.id)[2] == b"\xc0"


def test_a_keyed_child_commits_with_the_block_and_is_deduplicated_later(
    app: Orchestrator, running: Running, connection: Connection
) -> None:
    child = app.tasks["child"].options(unique_key="one of them")
    with pytest.raises(ZeroDivisionError), running.ctx.transaction():
        child.enqueue(1)
        _ = 1 / 0
    with running.ctx.transaction():
        child.enqueue(2)
        child.enqueue(3)
    apply(connection)
    assert children(connection) == 1


def test_a_block_that_raises_is_rolled_back_and_may_be_retried(
    app: Orchestrator, running: Running, connection: Connection
) -> None:
    child = app.tasks["child"]
    child.options(on_success=True).enqueue(1)
    for result in (1, 2):
        with pytest.raises(ZeroDivisionError), running.ctx.transaction() as transaction:
            write(transaction, "never")
            child.options(on_success=True).enqueue(2)
            child.enqueue(3)
            running.ctx.complete(result)
            _ = 1 / 0
    assert len(running.job.children) == 1
    assert (ledger(connection), children(connection)) == ([], 0)
    with running.ctx.transaction() as transaction:
        write(transaction, "once")
    assert (ledger(connection), children(connection)) == (["once"], 1)
    assert outcome(connection, running.job.dispatch.id)[2] == b"\xc0"


def test_a_task_has_one_transaction(running: Running) -> None:
    with running.ctx.transaction(), pytest.raises(WrongState, match="open already"), running.ctx.transaction():
        pass
    with pytest.raises(WrongState, match="ends once"), running.ctx.transaction():
        pass


def test_an_explicit_commit_inside_a_block_is_rejected(running: Running, connection: Connection) -> None:
    with pytest.raises(WrongState, match="at the end of its block"), running.ctx.transaction() as transaction:
        write(transaction, "never")
        transaction.commit()
    assert ledger(connection) == []
    with running.ctx.transaction() as transaction:
        with Session(transaction) as session:
            write(session.connection(), "session")
            session.commit()
            assert ledger(connection) == []
        with pytest.raises(exc.DBAPIError), transaction.begin_nested():
            transaction.exec_driver_sql("SELECT 1 / 0")
        write(transaction, "after the savepoint")
    assert ledger(connection) == ["after the savepoint", "session"]


@pytest.mark.parametrize(
    "sql",
    ["COMMIT", " -- done\n/* so */ commit", "END;", "ROLLBACK", "abort", "rollback work", "PREPARE TRANSACTION 'x'"],
)
def test_a_statement_that_would_end_the_transaction_is_rejected(
    running: Running, connection: Connection, sql: str
) -> None:
    refused = pytest.raises(WrongState, match="It was not run: the block commits by itself")
    with refused, running.ctx.transaction() as transaction:
        write(transaction, "never")
        transaction.execute(text(sql))
    assert ledger(connection) == []
    assert outcome(connection, running.job.dispatch.id)[2] is None


@pytest.mark.parametrize(
    "end",
    ["SELECT 1; COMMIT", "SELECT 1; COMMIT AND CHAIN", "SELECT 1; COMMIT; BEGIN", "SELECT 1; ROLLBACK", "cursor"],
)
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_transaction_that_was_ended_in_sql_does_not_complete_the_task(
    running: Running, connection: Connection, end: str, goes_on: bool
) -> None:
    noticed = pytest.raises(WrongState, match="has ended its transaction .* Remove the statement")
    with noticed, running.ctx.transaction() as transaction:
        write(transaction, "committed")
        if end == "cursor":
            transaction.connection.cursor().execute("COMMIT")
        else:
            transaction.exec_driver_sql(end)
        if goes_on:
            transaction.exec_driver_sql("SELECT 1")
    assert ledger(connection) == ([] if "ROLLBACK" in end else ["committed"])
    assert outcome(connection, running.job.dispatch.id) == ("dispatched", 1, None)
    with running.ctx.transaction() as transaction:
        write(transaction, "another try")
    assert "another try" in ledger(connection)
    assert outcome(connection, running.job.dispatch.id)[2] == b"\xc0"


def test_a_block_may_roll_back_and_go_on(running: Running, connection: Connection) -> None:
    with running.ctx.transaction() as transaction:
        write(transaction, "never")
        transaction.rollback()
        transaction.exec_driver_sql("SAVEPOINT mine")
        write(transaction, "nor this")
        transaction.exec_driver_sql("ROLLBACK TO SAVEPOINT mine")
        write(transaction, "kept")
    assert ledger(connection) == ["kept"]
    assert outcome(connection, running.job.dispatch.id)[2] == b"\xc0"


@pytest.mark.parametrize("how", ["rollback", "begin_nested", "SAVEPOINT"])
def test_a_rollback_inside_a_block_undoes_its_follow_ups_and_its_result(
    app: Orchestrator, running: Running, connection: Connection, how: str
) -> None:
    child = app.tasks["child"].options(on_success=True)
    child.enqueue(1)  # before the block, which its rollback does not undo
    with running.ctx.transaction() as transaction:
        child.enqueue(2)
        running.ctx.complete("kept by a savepoint")
        savepoint = transaction.begin_nested() if how == "begin_nested" else None
        if how == "SAVEPOINT":
            transaction.exec_driver_sql("SAVEPOINT mine")
        child.enqueue(3)
        running.ctx.complete("never")
        if savepoint is not None:
            savepoint.rollback()
        elif how == "SAVEPOINT":
            transaction.execute(text("rollback work to savepoint Mine"))
        else:
            transaction.rollback()
        write(transaction, "kept")
    assert ledger(connection) == ["kept"]
    assert children(connection) == (1 if how == "rollback" else 2)
    kept = None if how == "rollback" else "kept by a savepoint"
    assert decode_value(outcome(connection, running.job.dispatch.id)[2]) == kept


def test_a_result_set_in_a_released_savepoint_ends_with_the_savepoint_around_it(
    running: Running, connection: Connection
) -> None:
    with running.ctx.transaction() as transaction:
        running.ctx.complete(1)
        outer = transaction.begin_nested()
        with transaction.begin_nested():
            running.ctx.complete(2)
        outer.rollback()
    assert outcome(connection, running.job.dispatch.id)[2] == ONE


@pytest.mark.parametrize("driver", ["psycopg2", "psycopg"])
def test_nothing_that_a_block_sets_for_its_session_reaches_the_next_block(
    database_url: str, redis_url: str, connection: Connection, driver: str
) -> None:
    url = make_url(database_url).set(drivername=f"postgresql+{driver}")
    date_style = "German" if driver == "psycopg2" else "ISO"  # psycopg does not replace it when connecting
    url = url.update_query_dict({"options": f"-c datestyle={date_style} -c app.tenant=nobody"})
    app = Orchestrator(Settings(database_url=url.render_as_string(hide_password=False), redis_url=redis_url))
    connection.exec_driver_sql("DROP ROLE IF EXISTS tenant; CREATE ROLE tenant")
    connection.exec_driver_sql("GRANT USAGE ON SCHEMA orchestrator TO tenant")
    connection.exec_driver_sql("GRANT ALL ON ALL TABLES IN SCHEMA orchestrator TO tenant")
    connection.exec_driver_sql("GRANT ALL ON ALL SEQUENCES IN SCHEMA orchestrator TO tenant")
    connection.commit()
    before = Running(app, put(connection))
    try:
        with before.ctx.transaction() as transaction:
            first = session_state(transaction)
            assert "nobody" in first
            assert NOW in first
            transaction.exec_driver_sql("CREATE TEMPORARY TABLE customers (name text)")
            transaction.exec_driver_sql("CREATE TEMPORARY SEQUENCE invoices")
            transaction.exec_driver_sql("SELECT nextval('invoices'), pg_advisory_lock(7)")
            transaction.exec_driver_sql("DECLARE held CURSOR WITH HOLD FOR SELECT 1")
            transaction.exec_driver_sql("LISTEN others")
            transaction.exec_driver_sql("SELECT set_config('app.tenant', 'acme', false)")
            transaction.exec_driver_sql("SET search_path = pg_catalog; SET datestyle = 'SQL'")
            transaction.exec_driver_sql("SET default_transaction_read_only = on")
            transaction.exec_driver_sql("SET SESSION AUTHORIZATION tenant; SET ROLE tenant")
        assert before.job.completion is not None
        with Running(app, put(connection)).ctx.transaction() as transaction:
            assert session_state(transaction) == first
    finally:
        app.close()
        connection.exec_driver_sql("DROP OWNED BY tenant; DROP ROLE tenant")
        connection.commit()


def session_state(connection: Connection) -> tuple[Any, ...]:
    """Return the server process of a connection, and what its session keeps beyond a transaction."""
    return tuple(
        connection.execute(
            text("""
                SELECT pg_backend_pid(), session_user, current_user, current_setting('app.tenant'),
                       current_setting('search_path'), current_setting('application_name'),
                       current_setting('default_transaction_read_only'), CAST(:now AS timestamptz),
                       (SELECT array_agg(name) FROM pg_cursors), to_regclass('pg_temp.customers'),
                       (SELECT array_agg(channel) FROM pg_listening_channels() AS channel),
                       (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid())
            """),
            {"now": NOW},
        ).one()
    )


def test_a_block_of_an_ended_attempt_raises_an_error(
    app: Orchestrator, running: Running, connection: Connection
) -> None:
    task = running.job.dispatch.id
    late = pytest.raises(AttemptOver, match="Attempt 1 of task .* no longer counts")
    with late, running.ctx.transaction() as transaction:
        write(transaction, "never")
        transitions.requeue(connection, [Requeue(task, 1)], NOW)
        connection.commit()
    assert ledger(connection) == []
    with pytest.raises(AttemptOver), running.ctx.transaction():
        raise AssertionError("not even begun")


def test_invalid_uses_of_a_transaction_are_rejected_with_advice(app: Orchestrator, running: Running) -> None:
    with pytest.raises(WrongState, match="call it inside"):
        running.ctx.complete(1)
    with pytest.raises(PayloadError, match="The result of task 'job'"), running.ctx.transaction():
        running.ctx.complete("x" * 2_000)

    async def on_the_loop() -> None:
        with running.ctx.transaction():
            raise AssertionError

    with pytest.raises(OrchestratorError, match="asyncio.to_thread"):
        asyncio.run(on_the_loop())
    running.runtime = JobRuntime(running.job, running.outbox)
    with pytest.raises(ConfigurationError, match="worker --database"), running.runtime.transaction():
        raise AssertionError
    alone = TaskContext(task_id=running.ctx.task_id, task_name="job", attempt=1, queue="default")
    with pytest.raises(OrchestratorError, match="created directly"):
        alone.transaction()


@pytest.mark.parametrize("result", ["no number", "too large" * 1_000, object()])
def test_a_result_that_is_refused_in_a_block_fails_the_task_without_retries(
    app: Orchestrator, connection: Connection, result: Any
) -> None:
    def job(ctx: TaskContext) -> int:
        with ctx.transaction() as transaction:
            write(transaction, "never")
            return ctx.complete(result)

    task = app.task(name="job", retries=2)(job)._new((), {})
    dispatch = Dispatch(put(connection), 1, "job", task.payload, "default", task.options)
    running = Job(dispatch, Bundle("", "", "", 1), 0, 0.0)
    running.begin(0.0)
    report = Runner(app, KeptOutbox(), Allowed(app, ()), database=True).run(running)
    assert isinstance(report, Failed)
    assert (report.error.kind, report.retryable) == ("orchestrator.errors.PayloadError", False)
    assert "return ctx.complete(result)" in report.error.traceback
    assert ledger(connection) == []


def test_a_thread_of_an_async_task_may_use_a_block(running: Running, connection: Connection) -> None:
    def block() -> None:
        with running.ctx.transaction() as transaction:
            write(transaction, threading.current_thread().name)

    async def task() -> None:
        await asyncio.to_thread(block)

    asyncio.run(task())
    assert len(ledger(connection)) == 1


@pytest.mark.parametrize("reason", [TaskTimeout, TaskAborted])
def test_a_stopped_task_neither_begins_nor_commits_a_block(
    app: Orchestrator, connection: Connection, reason: type[Exception]
) -> None:
    running = Running(app, put(connection), options='{"timeout":1}')
    with pytest.raises(reason), running.ctx.transaction() as transaction:
        write(transaction, "late")
        running.job.stop_with(reason, 0.0)  # the code continues
    with pytest.raises(reason), running.ctx.transaction():
        raise AssertionError("not even begun")
    assert (ledger(connection), running.job.completion) == ([], None)


def test_a_soft_timeout_that_was_caught_lets_the_block_commit(running: Running, connection: Connection) -> None:
    with running.ctx.transaction() as transaction:
        write(transaction, "in time")
        running.job.warn()
    assert ledger(connection) == ["in time"]


def test_a_thread_that_a_task_left_behind_commits_nothing(running: Running, connection: Connection) -> None:
    with pytest.raises(AttemptOver, match="Task 'job' has ended"), running.ctx.transaction() as transaction:
        write(transaction, "late")
        running.job.finish()
    assert ledger(connection) == []


def test_a_timeout_during_the_commit_is_raised_after_the_commit(
    running: Running, engine: Engine, connection: Connection
) -> None:
    job = running.job
    raised: list[object] = []
    job.interruptible(raised.append)

    def commit() -> None:
        with running.ctx.transaction() as transaction:
            write(transaction, "in time")

    thread = threading.Thread(target=commit)
    with engine.connect() as other:
        other.exec_driver_sql(f"SELECT FROM orchestrator.tasks WHERE id = '{job.dispatch.id.hex()}' FOR UPDATE")
        thread.start()
        eventually(lambda: job.committing, "the commit waits for the row")
        job.stop_with(TaskTimeout, 1.0)
        assert (raised, job.completion) == ([], None)
        other.rollback()
    thread.join(60)
    assert (raised, job.completion) == ([TaskTimeout], b"\xc0")
    assert ledger(connection) == ["in time"]


# -- privileges


def test_the_documented_rights_are_enough(
    database_url: str, redis_url: str, engine: Engine, connection: Connection, app: Orchestrator
) -> None:
    guide = Path(__file__).parents[2] / "docs" / "exactly-once.md"
    (grants,) = re.findall(r"^```sql\n(.*?)^```$", guide.read_text(), re.MULTILINE | re.DOTALL)
    with engine.begin() as owner:
        owner.exec_driver_sql(grants.replace("'…'", "'secret'").replace("accounts", "ledger"))
    try:
        url = make_url(database_url).set(username="shop_worker", password="secret")
        settings = Settings(database_url=url.render_as_string(hide_password=False), redis_url=redis_url)
        worker = Orchestrator(settings)
        running = Running(worker, put(connection))
        enter_task(running.runtime)
        child = worker.task(name="child")(lambda number=0: number)
        with running.ctx.transaction() as transaction:
            assert transaction.exec_driver_sql("SELECT current_user").scalar_one() == "shop_worker"
            write(transaction, "allowed")
            child.options(delay=5).enqueue(1)
            child.options(concurrency_key="lane").enqueue(2)
            first = child.options(unique_key="key").enqueue(3)
            assert child.options(unique_key="key").enqueue(4) == first
            with pytest.raises(Duplicate, match="other arguments"):
                worker.enqueue_many(child.options(idempotency_key="once"), [(5,), (6,)])
        enter_task(None)
        worker.close()
        apply(connection)
        assert outcome(connection, running.job.dispatch.id)[0] == "success"
        assert (ledger(connection), children(connection)) == (["allowed"], 4)
    finally:
        enter_task(None)
        connection.rollback()
        with engine.begin() as owner:
            owner.exec_driver_sql("DROP OWNED BY shop_worker; DROP ROLE shop_worker")
