"""A signal that is to start a run if there is none, and comes when the run that was open has ended."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import text

from orchestrator import ResultTimeout, WorkflowContext, WorkflowHandle
from orchestrator.domain.code.activation import Activated
from orchestrator.domain.code.commands import CompleteRun, ContinueRun
from orchestrator.domain.code.history import RunStarted
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.store.code import runs as code_runs
from orchestrator.store.runs import creation
from tests.integration.stage import ONE, System, Worker
from tests.waiting import eventually

TWO = b"\x02"


@pytest.fixture
def basket(system: System) -> CodeWorkflow[..., Any]:
    @system.app.workflow(name="basket")
    async def basket(ctx: WorkflowContext) -> int:
        return int(await ctx.signals("number", type=int).get())

    return basket


@pytest.fixture
def worker(system: System) -> Worker:
    return system.worker(knows=("job", "basket"))


@pytest.fixture
def first(system: System, basket: CodeWorkflow[..., Any], worker: Worker) -> WorkflowHandle[Any]:
    """A run under the id b-1, whose code has its first turn."""
    first = basket.starting(id="b-1").start()
    system.pass_seconds()
    return first


def signalled(basket: CodeWorkflow[..., Any], number: int = 1) -> WorkflowHandle[Any]:
    return basket.starting(id="b-1", signal=("number", number)).start()


def end(worker: Worker, result: bytes) -> None:
    """End the run whose turn it is."""
    (turn,) = worker.take()
    worker.report(Activated(turn.id, turn.attempt, 0.1, through=1, commands=[CompleteRun(result)]))


def test_the_handle_is_about_the_run_that_begins_with_it(
    system: System, basket: CodeWorkflow[..., Any], worker: Worker, first: WorkflowHandle[Any]
) -> None:
    handle = signalled(basket)
    assert handle == first
    end(worker, ONE)
    system.tick()
    assert (first.status(), first.result(0)) == ("success", 1)
    assert handle.status() == "running"
    assert [event.what.__struct_config__.tag for event in handle.history().events] == ["run_started", "signal_received"]
    system.pass_seconds()
    end(worker, TWO)
    system.tick()
    assert (handle.result(0), asyncio.run(handle.aresult(0)), first.result(0)) == (2, 2, 1)


def test_or_about_the_one_that_another_signal_has_begun(
    system: System, basket: CodeWorkflow[..., Any], worker: Worker, first: WorkflowHandle[Any]
) -> None:
    handles = [signalled(basket, number) for number in (1, 2, 3)]
    end(worker, ONE)
    system.pass_seconds()
    assert len({handle.history().run_id for handle in handles}) == 1
    end(worker, TWO)
    system.tick()
    assert [handle.result(0) for handle in handles] == [2, 2, 2]
    assert system.count("runs") == 2


def test_it_stays_with_the_run_that_gets_the_signal(
    system: System, basket: CodeWorkflow[..., Any], worker: Worker, first: WorkflowHandle[Any]
) -> None:
    """Also where that goes on in another."""
    handle = signalled(basket)
    system.tick()
    (turn,) = worker.take()
    worker.report(Activated(turn.id, turn.attempt, 0.1, through=1, commands=[ContinueRun(b"\x92\x90\x80", {})]))
    system.pass_seconds(2)
    assert handle.status() == "running"
    end(worker, TWO)
    system.tick()
    assert (first.result(0), handle.result(0)) == (2, 2)


def test_a_client_starts_another_run_at_the_same_moment(
    system: System, basket: CodeWorkflow[..., Any], worker: Worker, first: WorkflowHandle[Any]
) -> None:
    """Whoever takes the id first has it, and the signal goes there."""
    handle = signalled(basket)
    end(worker, ONE)
    mine = uuid4()
    with system.engine.connect() as connection, connection.begin() as transaction:
        connection.execute(text("UPDATE orchestrator.run_keys SET run_id = :id"), {"id": mine})
        started = RunStarted("basket", 1, b"\x92\x90\x80")
        creation.create(connection, [code_runs.new_run(mine.bytes, [started])])
        ticking = threading.Thread(target=system.tick)
        ticking.start()
        eventually(lambda: system.sql("SELECT 1 FROM pg_locks WHERE NOT granted"))
        transaction.commit()
        ticking.join()
    system.pass_seconds()
    assert system.count("runs") == 2
    assert handle.history().run_id == mine.bytes
    assert [event.what.__struct_config__.tag for event in handle.history().events] == ["run_started", "signal_received"]


def test_nobody_returns_before_it_is_known_where_the_signal_went(
    system: System, basket: CodeWorkflow[..., Any], worker: Worker, first: WorkflowHandle[Any]
) -> None:
    handle = signalled(basket)
    (request,) = system.sql("DELETE FROM orchestrator.inbox RETURNING *")  # as if it had not been committed yet
    end(worker, ONE)
    system.tick()
    assert first.result(0) == 1
    system.sql(
        "INSERT INTO orchestrator.inbox (id, kind, target, body) OVERRIDING SYSTEM VALUE"
        " VALUES (:id, :kind, :target, CAST(:body AS jsonb))",
        id=request["id"],
        kind=request["kind"],
        target=request["target"],
        body=json.dumps(request["body"]),
    )
    with pytest.raises(ResultTimeout):
        handle.result(0)
    with pytest.raises(ResultTimeout):
        asyncio.run(handle.aresult(0))
    system.pass_seconds(2)
    end(worker, TWO)
    system.tick()
    assert handle.result(0) == 2
