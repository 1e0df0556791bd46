"""Effects of ticks that are rolled back, wholly or in part, are neither remembered nor announced."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from orchestrator import WorkflowContext
from orchestrator.domain.code.activation import Activated, Violation
from orchestrator.domain.code.commands import CancelTask, Command, StartTimer
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.store import inbox, leases
from orchestrator.store.inbox import RequestKind
from orchestrator.store.tasks import claims
from orchestrator.transport.codec import Applied, Attempt, Order, encode
from tests.integration.code_stage import act, activation
from tests.integration.stage import KEYS, System, Worker, raw


@pytest.fixture
def double(system: System) -> CodeWorkflow[..., Any]:
    job = system.job

    @system.app.workflow(name="double")
    async def double(ctx: WorkflowContext) -> int:
        first, second = await asyncio.gather(job.schedule(1), job.schedule(2))
        return int(first) + int(second)

    return double


@pytest.fixture
def worker(system: System) -> Worker:
    return system.worker(knows=("job", "double"))


@pytest.fixture
def engine_(system: System) -> Iterator[Engine]:
    engine = Engine(system.app.code_workflows.find, 1_000_000)
    yield engine
    engine.close()


@contextmanager
def rolled_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let ticks fail at their commit."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(leases, "commit", fail)
        yield


def test_a_rejected_turn_stops_no_running_task(
    system: System, double: CodeWorkflow[..., Any], worker: Worker, engine_: Engine
) -> None:
    handle = double.start()
    system.pass_seconds()
    worker.report(act(engine_, *worker.take()))
    system.tick()
    first, second = worker.take()
    worker.start(first, second)
    worker.succeed(first)
    system.tick()
    (turn,) = worker.take()
    never = StartTimer(1, uuid4().bytes, 1e300, 1e300)  # Postgres rejects this delay
    commands: list[Command] = [CancelTask(second.id), never]
    worker.report(Activated(turn.id, turn.attempt, 0.1, through=activation(turn).through, commands=commands))
    system.pass_seconds(3)
    assert handle.status() == "stuck"
    assert system.row(second.id)["status"] == "running"
    assert worker.orders() == []


def test_a_request_whose_tick_was_rolled_back_is_applied_by_the_next(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    system.pass_seconds()
    handle = system.job.enqueue()
    handle.cancel()
    with rolled_back(monkeypatch):
        system.tick()
    assert handle.status() == "pending"
    assert system.scheduler.term.due_in == 0.0, "nobody waits for a look"
    system.tick()
    assert handle.status() == "cancelled"


def test_a_query_of_a_rolled_back_tick_is_sent_again(
    system: System, double: CodeWorkflow[..., Any], worker: Worker, engine_: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = double.start()
    system.pass_seconds()
    worker.report(act(engine_, *worker.take()))
    system.tick()
    first, second = worker.take()
    worker.succeed(first)
    system.tick()
    (turn,) = worker.take()
    body = {"request": base64.b64encode(b"r" * 16).decode(), "name": "count", "value": ""}
    with system.engine.begin() as connection:
        inbox.add(connection, RequestKind.QUERY, raw(handle), msgspec.json.encode(body).decode())
    system.pass_seconds()  # the request has left the inbox, and waits for the turn in flight
    assert system.count("inbox") == 0
    worker.succeed(second)
    system.tick()
    worker.report(act(engine_, turn))
    with rolled_back(monkeypatch):
        system.tick()
    system.tick()
    (asked,) = [task for task in worker.take() if task.is_turn_task]
    assert [query.name for query in activation(asked).queries] == ["count"]


def test_stuck_runs_are_freed_after_a_rollback(
    system: System, double: CodeWorkflow[..., Any], worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = double.start()
    system.pass_seconds()
    (turn,) = worker.take()
    worker.report(Activated(turn.id, turn.attempt, 0.1, stuck=Violation(3, "Mismatch", "it does not fit", "")))
    system.pass_seconds()
    assert handle.status() == "stuck"
    system.worker("w2", knows=("job", "double"))
    with rolled_back(monkeypatch):
        system.pass_seconds()
    system.pass_seconds(2)
    assert handle.status() == "running", "the code of the new worker may be another"


def test_a_worker_that_left_does_not_count_as_dead_after_a_rollback(
    system: System, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    system.pass_seconds()
    worker.leave()
    with rolled_back(monkeypatch):
        system.pass_seconds()
    system.pass_seconds(6)
    assert [row["state"] for row in system.sql("SELECT state FROM orchestrator.workers")] == ["stopped"]


def test_tasks_cancelled_at_the_end_of_a_generation_are_stopped(
    system: System, double: CodeWorkflow[..., Any], worker: Worker, engine_: Engine
) -> None:
    double.start()
    system.pass_seconds()
    worker.report(act(engine_, *worker.take()))
    system.tick()
    first, second = worker.take()
    worker.start(first, second)
    worker.succeed(first)
    system.tick()
    (turn,) = [task for task in worker.take() if task.is_turn_task]
    through = activation(turn).through
    worker.report(Activated(turn.id, turn.attempt, 0.1, through=through, commands=[CancelTask(second.id)]))
    old = system.generation
    system.redis.set(KEYS.applied, encode(Applied(old, "0-1")))  # a failover loses this position, but not the report
    system.pass_seconds(3)
    assert system.generation != old
    assert Order(stop=[Attempt(second.id, second.attempt)]) in worker.orders()


def test_tasks_whose_claim_was_rolled_back_are_claimed_by_the_next_tick(
    system: System, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the front of a queue is slow, claims continue behind the last one."""
    fronts: list[float] = []

    def slow(*given: Any) -> list[claims.Claimed]:
        fronts.append(system.clock.now)
        system.clock.now += 1.0
        return claim(*given)

    claim = claims.claim
    monkeypatch.setattr(claims, "claim", slow)
    system.settle()
    before = len(fronts)
    system.tick_until(lambda: len(fronts) > before)
    handles = [system.job.enqueue(number) for number in range(3)]
    with rolled_back(monkeypatch):
        system.tick()
    assert len(fronts) == before + 1, "it was a claim from behind"
    system.tick()
    assert system.states(*handles) == ["dispatched"] * 3
