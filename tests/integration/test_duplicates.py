"""A task id among both open and ended tasks: the leader removes the open row, and other tasks go on."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.domain.states import TaskState
from orchestrator.sdk.dag.definitions import loads
from orchestrator.sdk.tasks.handle import Handle
from orchestrator.store import inbox
from orchestrator.store.inbox import RequestKind
from tests.integration.stage import KEYS, System, Worker, raw

REPOSITORY = Path(__file__).parents[2]
_COLUMNS = "id, seq, name, queue, priority, attempt, failures, losses, payload, options, created_at, lane, unique_key"


@pytest.fixture
def worker(system: System) -> Worker:
    worker = system.worker()
    system.settle()
    return worker


def end_by_hand(system: System, *handles: Handle[object], state: str = "success") -> None:
    """Insert ended rows for open tasks, as an earlier release or a manual change may have left."""
    system.sql(
        f"INSERT INTO orchestrator.ended_tasks ({_COLUMNS}, status, result, worker, ended_at) "
        f"SELECT {_COLUMNS}, :state, '\\x07'::bytea, 'of before', now() FROM orchestrator.tasks "
        f"WHERE id = ANY (CAST(:ids AS uuid[]))",
        state=state,
        ids=[handle.id for handle in handles],
    )


def fail_by_hand(system: System, handle: Handle[object]) -> None:
    """Insert a failed first attempt of the task, so that its number is taken."""
    system.sql(
        "INSERT INTO orchestrator.attempts (task_id, attempt, outcome, ended_at) "
        "VALUES (CAST(:id AS uuid), 1, 'failed', now())",
        id=handle.id,
    )


def error_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    return [text for text in texts if text.startswith("task.duplicates_removed")]


def check(system: System, handle: Handle[object], state: str = "success") -> None:
    """Check that the first end stands, and that nothing remains of the second."""
    row = system.row(handle)  # `row` looks among open tasks first
    assert (row["status"], bytes(row["result"]), row["worker"]) == (state, b"\x07", "of before")
    assert system.scheduler.term.dispatcher.in_flight == 0
    assert system.quarantine() == []


@pytest.mark.parametrize("end", ["success", "failure", "retry", "cancel", "loss", "completion"])
def test_a_duplicate_is_removed_when_it_ends_while_others_end(
    system: System, worker: Worker, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    handle, other = system.dispatch(2, retries=3 if end == "retry" else 0)
    by_id = {task.id: task for task in worker.take()}
    task, another = by_id[raw(handle)], by_id[raw(other)]
    worker.start(task, another)
    system.tick()
    end_by_hand(system, handle)
    if end == "success":
        worker.succeed(task, another)
    elif end == "failure":
        worker.fail(task)
        worker.succeed(another)
    elif end == "retry":
        fail_by_hand(system, handle)
        worker.fail(task)
        worker.succeed(another)
    elif end == "cancel":
        handle.cancel()
        worker.succeed(another)
    elif end == "completion":
        system.sql("UPDATE orchestrator.tasks SET completion = '\\x08' WHERE id = CAST(:id AS uuid)", id=handle.id)
        worker.succeed(task, another)
    else:
        fail_by_hand(system, handle)
        worker.held = [(another.id, another.attempt)]
        system.make_old()
        system.tick_until(lambda: error_lines(caplog))
        worker.succeed(another)
    system.pass_seconds(3)
    check(system, handle)
    assert system.row(other)["status"] == "success"
    (line,) = error_lines(caplog)
    assert handle.id in line
    assert other.id not in line


def test_all_duplicates_in_flight_are_removed_together(
    system: System, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    handles = system.dispatch(8)
    tasks = {task.id: task for task in worker.take()}
    end_by_hand(system, *handles[::2])
    worker.succeed(*tasks.values())
    system.pass_seconds(3)
    for handle in handles[::2]:
        check(system, handle)
    assert system.states(*handles) == ["success"] * 8
    assert len(error_lines(caplog)) == 1


def test_the_unique_key_of_a_duplicate_is_released(system: System, worker: Worker) -> None:
    handle = system.job.options(unique_key="one").enqueue()
    system.pass_seconds()
    tasks = worker.take()
    end_by_hand(system, handle)
    worker.succeed(*tasks)
    system.pass_seconds(3)
    assert system.count("unique_keys") == 0
    assert system.job.options(unique_key="one").enqueue().id != handle.id


def test_a_waiting_duplicate_can_be_retried(system: System, worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    handle = system.job.options(delay=3600.0).enqueue()
    system.tick()
    end_by_hand(system, handle, state=TaskState.FAILED)
    with system.engine.begin() as connection:
        inbox.add(connection, RequestKind.RETRY_TASK, raw(handle))
    system.pass_seconds(3)
    assert len(error_lines(caplog)) == 1
    worker.succeed(*worker.take())
    system.tick()
    assert (system.row(handle)["status"], system.count("tasks")) == ("success", 0)


def test_a_conflict_without_an_ended_row_removes_nothing(system: System, worker: Worker) -> None:
    """A conflict alone proves nothing: only a task that has ended is removed."""
    handle, other = system.dispatch(2, retries=3)
    tasks = {task.id: task for task in worker.take()}
    worker.start(*tasks.values())
    system.tick()
    fail_by_hand(system, handle)
    worker.fail(tasks[raw(handle)], retryable=True)
    worker.succeed(tasks[raw(other)])
    system.pass_seconds(3)
    assert system.states(handle, other) == ["failed", "success"]
    assert system.redis.xlen(KEYS.quarantine) == 1


WORKFLOW = """
name: wait
params: {invoices: {}}
tasks: {only: {task: pay, input: {invoices: "${params.invoices}"}}}
"""
REPEATED = """
from orchestrator import Orchestrator, chain

app = Orchestrator()

@app.task
def pay(invoices: set[str]) -> int: ...

numbers = {"one", "two", "three", "four"}
print(pay.options(idempotency_key="k").enqueue(numbers).id)
print(chain(pay.s(numbers), pay.si(numbers)).start(key="k").id)
print(app.workflows["wait"].options(key="k").start(invoices=numbers).id)
print(app.flows["ask"].options(key="k").start(invoices=numbers).id)
"""


def test_a_repeated_call_with_a_set_is_the_same_call_in_another_process(system: System) -> None:
    system.app.task(name="pay")(lambda invoices: invoices)
    system.app.workflows.apply(loads(WORKFLOW))
    node = {"kind": "approval", "params": {"approval_key": "$shared.ok"}}
    system.app.flows.publish("ask", {"start": "ask", "nodes": {"ask": node}})
    settings = system.settings
    outputs = set()
    for seed in ("1", "2", "3"):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "ORCHESTRATOR_DATABASE_URL": settings.require_database(),
            "ORCHESTRATOR_REDIS_URL": settings.require_redis(),
        }
        command = [sys.executable, "-c", REPEATED]
        outputs.add(subprocess.check_output(command, env=environment, cwd=REPOSITORY, text=True, timeout=120))
    assert len(outputs) == 1
