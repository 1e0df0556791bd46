"""Queries of runs whose code a worker lacks, unknown to the leader: they are answered without being sent again.

A client repeats a query after five seconds. None does here: each query is in the inbox once.
"""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator import WorkflowContext, WorkflowHandle
from orchestrator.domain.tasks.task import Lost, Returned
from orchestrator.sdk.backend.code_requests import add_request
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.ids import new_id
from orchestrator.store.code import expectations
from orchestrator.store.inbox import RequestKind
from tests.integration.code_stage import act, activation, rest
from tests.integration.stage import System, Worker, raw

NO_ARGUMENTS = b"\x92\x90\x80"
FORBIDDEN = b"\x92\x91\xc3\x80"
"""With True."""


@pytest.fixture
def handle(system: System) -> WorkflowHandle[Any]:
    """A started run."""

    @system.app.workflow(name="basket")
    async def basket(ctx: WorkflowContext) -> None:
        @ctx.query
        def look(random: bool = False) -> float:
            return ctx.random.random() if random else 7

        await ctx.signals("end").get()

    return basket.start()


@pytest.fixture
def worker(system: System) -> Worker:
    return system.worker(knows=("job", "basket"))


def ask(system: System, handle: WorkflowHandle[Any], arguments: bytes = NO_ARGUMENTS) -> bytes:
    request = new_id()
    with system.engine.begin() as connection:
        add_request(connection, RequestKind.QUERY, raw(handle), request=request, name="look", value=arguments)
    return request


def answer(system: System, request: bytes) -> expectations.PromiseAnswer | None:
    with system.engine.connect() as connection:
        return expectations.find_answer(connection, request)


def is_answered(system: System, request: bytes) -> bool:
    return answer(system, request) == expectations.PromiseAnswer(request, b"\x07")


def test_a_query_during_a_turn_is_answered_by_the_next_turn(
    system: System, handle: WorkflowHandle[Any], worker: Worker, engine_: Engine
) -> None:
    system.pass_seconds()
    (first,) = worker.take()
    request = ask(system, handle)
    system.pass_seconds()
    worker.report(act(engine_, first))
    rest(system, worker, engine_)
    assert is_answered(system, request)


def test_a_query_of_evicted_code_is_answered(
    system: System, handle: WorkflowHandle[Any], worker: Worker, engine_: Engine
) -> None:
    rest(system, worker, engine_)
    engine_.evict(raw(handle))
    requests = [ask(system, handle), ask(system, handle)]
    rest(system, worker, engine_)
    assert all(is_answered(system, request) for request in requests)


def test_a_query_after_a_rejected_query_is_answered(
    system: System, handle: WorkflowHandle[Any], worker: Worker, engine_: Engine
) -> None:
    rest(system, worker, engine_)
    refused = ask(system, handle, FORBIDDEN)
    rest(system, worker, engine_)
    error = answer(system, refused)
    assert error is not None
    assert error.error is not None
    request = ask(system, handle)
    rest(system, worker, engine_)
    assert is_answered(system, request)


def test_a_query_returned_by_a_worker_is_asked_again(
    system: System, handle: WorkflowHandle[Any], worker: Worker, engine_: Engine
) -> None:
    rest(system, worker, engine_)
    request = ask(system, handle)
    system.pass_seconds()
    (turn,) = worker.take()
    worker.report(Returned(turn.id, turn.attempt, "draining"))
    rest(system, worker, engine_)
    assert is_answered(system, request)


def test_a_query_that_is_lost_with_its_worker_is_asked_again_alone(
    system: System, handle: WorkflowHandle[Any], worker: Worker, engine_: Engine
) -> None:
    rest(system, worker, engine_)
    request = ask(system, handle)
    system.pass_seconds()
    (turn,) = worker.take()
    assert activation(turn).queries
    worker.report(Lost(turn.id, turn.attempt, alone=False))
    system.pass_seconds()
    (again,) = worker.take()
    assert again.alone
    worker.report(act(engine_, again))
    rest(system, worker, engine_)
    assert is_answered(system, request)


def test_a_query_that_kills_its_own_process_gets_an_error(
    system: System, handle: WorkflowHandle[Any], worker: Worker, engine_: Engine
) -> None:
    rest(system, worker, engine_)
    request = ask(system, handle)
    for alone in (False, True):
        system.pass_seconds()
        (turn,) = worker.take()
        assert activation(turn).queries
        assert turn.alone == alone
        with system.engine.begin() as connection:  # as the client does after a while
            add_request(connection, RequestKind.QUERY, raw(handle), request=request, name="look", value=NO_ARGUMENTS)
        system.pass_seconds()
        worker.report(Lost(turn.id, turn.attempt, alone=alone, reason="exit code 3"))
    system.pass_seconds()
    found = answer(system, request)
    assert found is not None
    assert found.error is not None
    assert found.error.kind == "WorkerLost"
    assert "exit code 3" in found.error.message
    (next_turn,) = worker.take()
    assert not activation(next_turn).queries
    worker.report(act(engine_, next_turn))
    rest(system, worker, engine_)
    assert handle.status() == "running"
