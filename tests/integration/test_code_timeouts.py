"""The timeout of a code run: the code is asked to end, and after a grace period the run ends without it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from orchestrator import RunFailed, WorkflowContext
from orchestrator.domain.code.activation import Activated, Violation
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.code.workflow import CodeWorkflow
from tests.integration.code_stage import run_row, turn
from tests.integration.stage import System, Worker

TIMEOUT = 100
GRACE = 300


@pytest.fixture
def deaf(system: System) -> CodeWorkflow[..., Any]:
    @system.app.workflow(name="deaf", timeout=TIMEOUT)
    async def deaf(ctx: WorkflowContext, continues: bool = False) -> None:
        child = deaf_child.schedule()
        while True:
            try:
                await asyncio.wait([child, system.job.schedule()])
            except asyncio.CancelledError:
                if continues:
                    ctx.continue_as_new(True)

    @system.app.workflow(name="deaf_child")
    async def deaf_child(ctx: WorkflowContext) -> None:
        await ctx.sleep(days=30)

    return deaf


@pytest.fixture
def worker(system: System) -> Worker:
    return system.worker(knows=("job", "deaf", "deaf_child"))


def turns(system: System, worker: Worker, engine: Engine, times: int = 3) -> None:
    for _ in range(times):
        turn(system, worker, engine)


@pytest.mark.parametrize("continues", [False, True])
def test_code_that_ignores_its_timeout_is_ended_after_the_grace_period(
    system: System, deaf: CodeWorkflow[..., Any], worker: Worker, engine_: Engine, continues: bool
) -> None:
    handle = deaf.start(continues)
    turns(system, worker, engine_)
    system.lead(offset=TIMEOUT + 1)
    turns(system, worker, engine_)
    assert handle.status() == "running"
    system.lead(offset=TIMEOUT + GRACE - 150)
    turns(system, worker, engine_)
    assert handle.status() == "running"
    system.lead(offset=TIMEOUT + GRACE + 5)
    turns(system, worker, engine_)
    assert handle.status() == "failed"
    with pytest.raises(RunFailed, match="RunTimedOut: The run took longer than it may"):
        handle.result(0)
    assert system.sql("SELECT 1 FROM orchestrator.tasks") == []
    assert {row["status"] for row in system.sql("SELECT * FROM orchestrator.runs WHERE workflow = 'deaf_child'")} == {
        "cancelled"
    }


def test_the_grace_period_starts_when_the_code_learns_of_the_timeout(
    system: System, deaf: CodeWorkflow[..., Any], worker: Worker, engine_: Engine
) -> None:
    handle = deaf.start()
    turns(system, worker, engine_)
    worker.die()
    for offset in (TIMEOUT + 1, TIMEOUT + GRACE + 5):
        system.lead(offset=offset)
        system.pass_seconds(3)
    assert handle.status() == "running"
    system.worker("w2", knows=("job", "deaf", "deaf_child"))
    (second,) = [one for one in system.workers if one.name == "w2"]
    turns(system, second, engine_)
    system.lead(offset=TIMEOUT + 2 * GRACE + 10)
    turns(system, second, engine_)
    assert handle.status() == "failed"


def test_a_stuck_run_is_not_ended_by_its_timeout(
    system: System, deaf: CodeWorkflow[..., Any], worker: Worker, engine_: Engine
) -> None:
    handle = deaf.start()
    for offset in (0, TIMEOUT + 1, TIMEOUT + GRACE + 5, TIMEOUT + 2 * GRACE + 10):
        system.lead(offset=offset)
        system.pass_seconds()
        (turn,) = worker.take()  # a new leader retries the run
        worker.report(Activated(turn.id, turn.attempt, 0.1, stuck=Violation(1, "Mismatch", "no")))
        system.pass_seconds(2)
        assert run_row(system, handle)["stuck"] is not None


def test_code_that_hangs_in_a_turn_is_ended(
    system: System, deaf: CodeWorkflow[..., Any], worker: Worker, engine_: Engine
) -> None:
    handle = deaf.start()
    turns(system, worker, engine_)
    system.lead(offset=TIMEOUT + 1)
    system.pass_seconds(2)
    assert worker.take()
    system.lead(offset=TIMEOUT + GRACE + 5)
    system.pass_seconds(3)
    assert handle.status() == "failed"


@pytest.mark.parametrize(
    ("does", "status", "error"), [("return", "success", ""), ("raise", "failed", "ValueError: no")]
)
def test_code_that_catches_the_timeout_decides_how_the_run_ends(
    system: System, engine_: Engine, does: str, status: str, error: str
) -> None:
    @system.app.workflow(name="decides", timeout=TIMEOUT)
    async def decides(ctx: WorkflowContext) -> str:
        try:
            await ctx.sleep(days=30)
        except asyncio.CancelledError:
            if does == "raise":
                raise ValueError("no") from None
        return "what there was"

    handle = decides.start()
    worker = system.worker(knows=("job", "decides"))
    turns(system, worker, engine_)
    system.lead(offset=TIMEOUT + 1)
    turns(system, worker, engine_)
    assert handle.status() == status
    if error:
        with pytest.raises(RunFailed, match=error):
            handle.result(0)
    else:
        assert handle.result(0) == "what there was"
