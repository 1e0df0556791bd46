"""Queries of ended runs: a worker replays the events that the code has seen, and only the answer leaves the worker."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from orchestrator import WorkflowContext, WorkflowHandle
from orchestrator.domain.tasks.task import Lost
from orchestrator.scheduler.code import runs
from orchestrator.sdk.backend.code_requests import add_request
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.values.payload import decode_value
from orchestrator.store.code import expectations
from orchestrator.store.inbox import RequestKind
from tests.integration.code_stage import kinds, rest
from tests.integration.stage import System, Worker, raw

NO_ARGUMENTS = b"\x92\x90\x80"
PERFORMED: list[str] = []


@pytest.fixture
def basket(system: System) -> CodeWorkflow[..., Any]:
    PERFORMED.clear()

    @system.app.workflow(name="basket")
    async def basket(ctx: WorkflowContext) -> list[str]:
        items: list[str] = []
        ctx.query("look")(lambda: items)
        ctx.set("phase", "open")
        async for item in ctx.signals("add", type=str):
            if item == "end":
                ctx.set("phase", "closed")
                return items
            items.append(item)
            await ctx.run("note", partial(PERFORMED.append, item))
        raise AssertionError

    return basket


def ask(system: System, handle: WorkflowHandle[Any]) -> bytes:
    request = new_id()
    with system.engine.begin() as connection:
        add_request(connection, RequestKind.QUERY, raw(handle), request=request, name="look", value=NO_ARGUMENTS)
    return request


def answer(system: System, request: bytes) -> expectations.PromiseAnswer:
    with system.engine.connect() as connection:
        found = expectations.find_answer(connection, request)
    assert found is not None
    return found


@pytest.fixture
def worker(system: System) -> Worker:
    return system.worker(knows=("job", "basket"))


def test_an_ended_run_answers_queries(
    system: System, basket: CodeWorkflow[..., Any], worker: Worker, engine_: Engine
) -> None:
    handle = basket.start()
    handle.signal("add", "tea")
    handle.signal("add", "end")
    rest(system, worker, engine_)
    assert handle.result(0) == ["tea"]
    before = kinds(system, handle)

    request = ask(system, handle)
    rest(system, worker, engine_)
    assert decode_value(answer(system, request).result or b"") == ["tea"]
    assert kinds(system, handle) == before
    assert PERFORMED == ["tea"]
    assert handle.state() == {"phase": "closed"}


def test_a_terminated_run_answers_with_the_state_of_its_code(
    system: System, basket: CodeWorkflow[..., Any], worker: Worker, engine_: Engine
) -> None:
    handle = basket.start()
    handle.signal("add", "tea")
    rest(system, worker, engine_)
    handle.signal("add", "milk")
    handle.terminate()
    rest(system, worker, engine_)
    assert handle.status() == "terminated"

    request = ask(system, handle)
    rest(system, worker, engine_)
    assert decode_value(answer(system, request).result or b"") == PERFORMED
    assert handle.state() == {"phase": "open"}


def test_ended_runs_without_turns_or_with_long_histories_reject_queries(
    system: System,
    basket: CodeWorkflow[..., Any],
    worker: Worker,
    engine_: Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    early, long = basket.start(), basket.start()
    early.terminate()
    long.signal("add", "end")
    rest(system, worker, engine_)
    monkeypatch.setattr(runs, "PAGE", 100)
    for handle, says in ((early, "it ended before its code ran"), (long, "at most 100 are replayed")):
        request = ask(system, handle)
        rest(system, worker, engine_)
        error = answer(system, request).error
        assert error is not None
        assert says in error.message


def test_a_query_reports_code_that_no_longer_matches(
    system: System, basket: CodeWorkflow[..., Any], worker: Worker, engine_: Engine
) -> None:
    handle = basket.start()
    handle.signal("add", "tea")
    handle.signal("add", "end")
    rest(system, worker, engine_)

    async def changed(ctx: WorkflowContext) -> None:
        await ctx.run("something else", list)

    basket.function = changed
    request = ask(system, handle)
    rest(system, worker, engine_)
    error = answer(system, request).error
    assert error is not None
    assert "the code does not match the history" in error.message
    assert handle.status() == "success"


def test_a_query_that_kills_its_process_is_retried_alone_then_fails(
    system: System, basket: CodeWorkflow[..., Any], worker: Worker, engine_: Engine
) -> None:
    handle = basket.start()
    handle.signal("add", "end")
    rest(system, worker, engine_)
    request = new_id()
    for alone in (False, True):
        with system.engine.begin() as connection:
            add_request(connection, RequestKind.QUERY, raw(handle), request=request, name="look", value=NO_ARGUMENTS)
        system.pass_seconds()
        (turn,) = worker.take()
        assert turn.alone == alone
        worker.report(Lost(turn.id, turn.attempt, alone=alone, reason="exit code 3"))
        system.pass_seconds()
    error = answer(system, request).error
    assert error is not None
    assert error.kind == "WorkerLost"
