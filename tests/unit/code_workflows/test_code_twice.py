"""A workflow test detects code whose values or answers differ on replay."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from orchestrator import DeterminismViolation, Orchestrator, OrchestratorError, WorkflowContext
from orchestrator.testing import TestedRun, WorkflowTest, replay
from tests.unit.code_workflows.playing import played, started

app = Orchestrator()
fickle = itertools.count(1)
"""Values that no replay repeats, and that no guard detects."""


@app.workflow
async def wavering(ctx: WorkflowContext, where: str, rounds: int = 0) -> int:
    number = next(fickle)

    @ctx.update
    def ask() -> int:
        return number

    if where == "state":
        ctx.set("number", number)
    if where == "timer":
        await ctx.sleep(number)
    if where == "continue" and not rounds:
        ctx.continue_as_new(where, number)
    if where == "error":
        raise (ValueError if number % 2 else KeyError)("no")
    if where == "answer":
        await ctx.sleep(1)
    return number if where == "result" else 0


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("result", "end of the run"),
        ("state", "state 1 set number"),
        ("timer", "timer 1"),
        ("continue", "end of the run"),
        ("error", "end of the run"),
    ],
)
def test_a_value_that_differs_on_replay_is_detected(where: str, what: str) -> None:
    with pytest.raises(DeterminismViolation, match=f"Value mismatch at {what}.*not in the history"):
        played(wavering, where)


def test_an_answer_that_differs_on_replay_is_detected() -> None:
    async def ask(run: TestedRun[Any], _: WorkflowTest) -> None:
        await run.update("ask")
        await run.result()

    with pytest.raises(DeterminismViolation, match="Value mismatch at answer to an update"):
        started(wavering, ask, "answer")


def test_replay_accepts_changed_values_unless_exact() -> None:
    async def record(run: TestedRun[Any], _: WorkflowTest) -> None:
        with pytest.raises(DeterminismViolation):
            await run.result()
        replay(wavering, run.history)
        with pytest.raises(DeterminismViolation):
            replay(wavering, run.history, exactly=True)

    started(wavering, record, "result")


@app.workflow
async def asks(ctx: WorkflowContext) -> str:
    return await ctx.promise("approval", type=str)


def test_a_workflow_test_names_the_line_where_the_code_waits() -> None:
    with pytest.raises(
        OrchestratorError, match=r"\(test_code_twice.py, line \d+, in asks: return await ctx.promise.*\)"
    ):
        played(asks)
