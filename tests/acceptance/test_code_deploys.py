"""Deploys while runs of workflows as code are open, with real workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator import Orchestrator, OrchestratorError, WorkflowHandle
from tests.acceptance.stack import Stack, using
from tests.waiting import eventually

OLD = """
from orchestrator import Orchestrator, WorkflowContext

app = Orchestrator()

@app.task(name="charge")
def charge(order: str) -> str:
    return f"charge of {order}"

@app.task(name="refund")
def refund(charge: str) -> None:
    raise SystemExit("nobody is to be refunded")

@app.workflow(name="order")
async def order(ctx: WorkflowContext, order: str, report_to: str = "") -> str:
    @ctx.query
    def name() -> str:
        return order

    charged = await charge.schedule(order)
    ctx.compensate(refund, charged)
    ctx.set("charged", charged)
    await ctx.promise("approval")
    if report_to:
        app.workflow_run(report_to).signal("reported", order)
    return charged

@app.workflow(name="collects")
async def collects(ctx: WorkflowContext) -> str:
    return await ctx.signals("reported", type=str).get()
"""
DEPLOYS = {
    "another signature": ("order: str, report_to", "order: int, report_to"),
    "raises": ('await ctx.promise("approval")', "raise ValueError('a typo')"),
    "other arguments": ("charge.schedule(order)", 'charge.schedule(order + "!")'),
}


@pytest.fixture
def settings() -> dict[str, float]:
    return {"worker_ttl": 2.0, "heartbeat": 0.5}


def test_a_deploy_that_does_not_fit_makes_runs_stuck_and_the_next_one_frees_them(stack: Stack, tmp_path: Path) -> None:
    def deploy(name: str, code: str) -> None:
        """Stop the workers, and start one that has this code."""
        for process in stack.processes[1:]:
            process.stop()
        folder = tmp_path / name.replace(" ", "_")
        folder.mkdir()
        (folder / "shop.py").write_text(code)
        stack.worker("--app", "shop:app", folder=folder)

    stack.scheduler()
    deploy("first", OLD)
    app = Orchestrator()
    with using(app, stack):
        remote = app.workflow(name="order")(_order)
        collector = app.workflow(name="collects")(_collects).start()
        handle: WorkflowHandle[str] = remote.start("o-1", collector.id)
        eventually(lambda: stack.scalar("SELECT count(*) FROM orchestrator.promises"), "the order waits")
        assert handle.query("name") == "o-1"
        for name, (old, new) in DEPLOYS.items():
            deploy(name, OLD.replace(old, new))
            eventually(lambda: is_stuck(handle), f"stuck after {name}")
        deploy("last", OLD)
        eventually(lambda: handle.status() == "running", "free again")
        handle.resolve("approval")
        assert handle.result(60) == "charge of o-1"
        assert collector.result(60) == "o-1"
        assert "refund" not in str(handle.history().events)


def is_stuck(handle: WorkflowHandle[str]) -> bool:
    """Have its code run by asking it something, which nobody can answer; say whether that has made it stuck."""
    with pytest.raises(OrchestratorError):
        handle.query("name", timeout=1)
    return handle.status() == "stuck"


async def _order(ctx: object, order: str, report_to: str = "") -> str: ...


async def _collects(ctx: object) -> str: ...
