"""Queries of other runs from inside a workflow, on the real leader: replay returns the answers of the history."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator import (
    InvalidArguments,
    NotFound,
    OrchestratorError,
    ResultTimeout,
    UnknownHandler,
    WorkflowContext,
    WrongState,
    workflow,
)
from orchestrator.sdk.code.engine import Engine
from tests.integration.code_stage import act, kinds
from tests.integration.stage import System, Worker

NOBODY = "0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17"


class Stage:
    """A counter that other workflows query, and a worker that forgets their code after each turn."""

    def __init__(self, system: System, engine: Engine) -> None:
        self.system, self.engine, self.app = system, engine, system.app
        self.worker: Worker = system.worker("w1", knows=("counter", "asks", "mother"))
        app = system.app

        @app.workflow(name="counter")
        class Counter:
            def __init__(self, ctx: WorkflowContext) -> None:
                self.ctx, self.count = ctx, 0

            @workflow.run
            async def run(self, count: int = 0) -> int:
                self.count = count
                await self.ctx.wait_condition(lambda: self.count < 0)
                return self.count

            @workflow.signal
            def push(self, number: int) -> None:
                self.count = number

            @workflow.query
            def times(self, number: int) -> tuple[int, ...]:
                return (self.count * number,)

        @app.workflow(name="asks")
        async def asks(ctx: WorkflowContext, of: str, query: str = "times", number: Any = 2, key: str = "") -> str:
            handle = Counter.run.find(key) if key else app.workflow_run(of)
            try:
                first = await handle.aquery(query, number)
                await handle.asignal("push", 100)
                return f"{first}, then {await handle.aquery(query, number)}"
            except OrchestratorError as error:
                return f"{type(error).__name__}: {error}"

        @app.workflow(name="mother")
        async def mother(ctx: WorkflowContext) -> tuple[int, ...]:
            child = Counter.run.schedule(7)
            return await child.handle.aquery(Counter.times, 3)

        self.counter: Any = Counter
        self.asks, self.mother = asks, mother

    def go_on(self, turns: int = 20) -> None:
        for _ in range(turns):
            self.system.pass_seconds()
            for sent in self.worker.take():
                if sent.is_turn_task:
                    self.worker.report(act(self.engine, sent))
                    self.engine.evict(sent.id)


@pytest.fixture
def stage(system: System, engine_: Engine) -> Stage:
    return Stage(system, engine_)


def test_a_run_is_queried_by_its_id(stage: Stage) -> None:
    counter = stage.counter.run.starting(id="c-1").start(5)
    runs = [stage.asks.start(counter.id), stage.asks.start("", key="c-1")]
    stage.go_on()
    assert [run.result(0) for run in runs] == ["[10], then [200]"] * 2
    assert kinds(stage.system, runs[0]).count("signal_sent") == 3
    assert stage.system.sql("SELECT * FROM orchestrator.answers") == []


def test_a_workflow_can_query_an_ended_run(stage: Stage) -> None:
    counter = stage.counter.run.start(-5)
    stage.go_on()
    assert counter.result(0) == -5
    asking = stage.asks.start(counter.id)
    stage.go_on()
    assert asking.result(0) == f"WrongState: Cannot signal run {counter.id}: it is in state 'success'."
    assert kinds(stage.system, asking).count("promise_resolved") == 1


def test_a_parent_can_query_a_child_at_once(stage: Stage) -> None:
    run = stage.mother.start()
    stage.go_on()
    assert run.result(0) == (21,)


@pytest.mark.parametrize(
    ("of", "query", "number", "kind", "words"),
    [
        (NOBODY, "times", 2, NotFound, f"No run has the id {NOBODY}"),
        ("", "time", 2, UnknownHandler, "no query 'time'. Did you mean 'times'"),
        ("", "times", "much", InvalidArguments, "number"),
    ],
)
def test_each_query_failure_has_its_own_error_type(
    stage: Stage, of: str, query: str, number: Any, kind: type[Exception], words: str
) -> None:
    counter = stage.counter.run.start(5)
    run = stage.asks.start(of or counter.id, query, number)
    stage.go_on()
    assert run.result(0).startswith(kind.__name__)
    assert words in run.result(0)


def test_a_query_lost_with_the_leader_is_repeated_until_its_timeout(stage: Stage) -> None:
    @stage.app.workflow(name="unheard")  # unknown to all workers
    async def unheard(ctx: WorkflowContext) -> None: ...

    counter, nobody = stage.counter.run.start(5), unheard.start()
    stage.go_on()
    asking, late = stage.asks.start(counter.id), stage.asks.start(nobody.id)
    while "signal_sent" not in kinds(stage.system, asking):
        stage.go_on(1)
    for seconds in range(6, 60, 6):
        stage.system.lead(offset=seconds)  # a new leader knows no queries
        stage.go_on(6)
    assert asking.result(0) == "[10], then [200]"
    assert kinds(stage.system, asking).count("signal_sent") == 4
    assert (
        late.result(0) == f"{ResultTimeout.__name__}: The query 'times' of run {nobody.id} had no answer within 30 s."
    )


def test_a_run_without_code_rejects_queries(stage: Stage) -> None:
    many = stage.app.start_many(stage.system.job, [1])
    run = stage.asks.start(many.id)
    stage.go_on()
    assert run.result(0).startswith(WrongState.__name__)
