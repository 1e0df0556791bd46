"""Child runs of workflows as code, and what happens to them when their parents end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from orchestrator import RunFailed, WorkflowContext, WorkflowHandle
from orchestrator.domain.ids import derived_id, to_text
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.code.workflow import CodeWorkflow
from tests.integration.code_stage import engine_, rest, run_row
from tests.integration.stage import System, Worker, raw

__all__ = ["engine_"]


@pytest.fixture
def sleeper(system: System) -> CodeWorkflow[..., Any]:
    @system.app.workflow(name="sleeper")
    async def sleeper(ctx: WorkflowContext) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ctx.set("tidied", True)

    return sleeper


@pytest.fixture
def worker(system: System) -> Worker:
    return system.worker(knows=("parent", "sleeper"))


def child_of(system: System, handle: Any) -> Any:
    """Return the row of the first child of a run."""
    child = to_text(derived_id(raw(handle), "child", 1))
    return system.sql("SELECT * FROM orchestrator.runs WHERE id = CAST(:id AS uuid)", id=child)[0]


def kinds_of(system: System, row: Any) -> list[str]:
    found = system.sql("SELECT kind FROM orchestrator.histories WHERE run_id = :id ORDER BY number", id=row["id"])
    return [one["kind"] for one in found]


@pytest.mark.parametrize("shape", ["returns", "raises", "continues", "starts it, too"])
def test_a_cancel_in_the_parents_last_turn_reaches_a_detached_child(
    system: System, sleeper: CodeWorkflow[..., Any], worker: Worker, engine_: Engine, shape: str
) -> None:
    @system.app.workflow(name="parent")
    async def parent(ctx: WorkflowContext, shape: str) -> None:
        if shape == "over":
            return
        child = sleeper.options(detached=True).schedule()
        if shape != "starts it, too":
            await ctx.signals("go").get()
        child.cancel()
        if shape == "raises":
            raise ValueError(shape)
        if shape == "continues":
            ctx.continue_as_new("over")

    handle = parent.start(shape)
    rest(system, worker, engine_)
    if shape != "starts it, too":
        handle.signal("go")
        rest(system, worker, engine_)
    assert run_row(system, handle)["status"] == ("failed" if shape == "raises" else "success")
    child = child_of(system, handle)
    assert child["status"] == "cancelled"
    assert "state_set" in kinds_of(system, child)


def ended_child(
    system: System, worker: Worker, engine: Engine, how: str, sleeper: CodeWorkflow[..., Any], **options: Any
) -> tuple[Any, WorkflowHandle[Any]]:
    """End a run that has a child; return the child's row, and the run."""

    @system.app.workflow(name="parent")
    async def parent(ctx: WorkflowContext) -> None:
        sleeper.options(**options).schedule()
        await ctx.signals("go").get()

    handle = parent.start()
    rest(system, worker, engine)
    if how == "terminate":
        handle.terminate()
    else:
        handle.signal("go")
    rest(system, worker, engine)
    rest(system, worker, engine)
    return child_of(system, handle), handle


@pytest.mark.parametrize("how", ["return", "terminate"])
@pytest.mark.parametrize(
    ("policy", "status", "reason", "is_told"),
    [
        (None, "cancelled", None, True),
        ("cancel", "cancelled", None, True),
        ("terminate", "cancelled", "terminated", False),
        ("abandon", "running", None, False),
    ],
)
def test_a_child_ends_as_its_close_policy_says_however_its_parent_ends(
    system: System,
    sleeper: CodeWorkflow[..., Any],
    worker: Worker,
    engine_: Engine,
    how: str,
    policy: str | None,
    status: str,
    reason: str | None,
    is_told: bool,
) -> None:
    chosen = {} if policy is None else {"close_policy": policy}
    child, parent = ended_child(system, worker, engine_, how, sleeper, **chosen)
    assert (child["status"], child["reason"]) == (status, reason)
    assert ("state_set" in kinds_of(system, child)) is is_told
    assert parent.status() == ("terminated" if how == "terminate" else "success")


def test_terminated_and_cancelled_runs_have_different_states(
    system: System, sleeper: CodeWorkflow[..., Any], worker: Worker, engine_: Engine
) -> None:
    terminated, cancelled = sleeper.start(), sleeper.start()
    rest(system, worker, engine_)
    terminated.terminate()
    cancelled.cancel()
    rest(system, worker, engine_)
    assert (terminated.status(), cancelled.status()) == ("terminated", "cancelled")
    with pytest.raises(RunFailed, match="was terminated") as refused:
        terminated.result(5)
    assert refused.value.kind == "RunTerminated"
    with pytest.raises(RunFailed, match="was cancelled"):
        cancelled.result(5)
