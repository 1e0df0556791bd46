"""Tasks and workflows of the growth benchmark; they do nothing."""

from __future__ import annotations

from orchestrator import WorkflowContext
from tests.benchmarks.peers.orchestrator_app import app, keyed, noop
from tests.benchmarks.peers.queue import effect

__all__ = ["app", "keyed", "noop", "sized", "stepping"]


@app.task
def sized(data: str) -> int:
    del data
    return effect()


@app.workflow
async def stepping(ctx: WorkflowContext, signals: int, steps: int) -> int:
    """Receive `signals` signals, run a task as a marker, wait for one more signal, and run the steps."""
    inbox = ctx.signals("more", type=int)
    for _ in range(signals):
        await inbox.get()
    await noop.schedule()
    await ctx.signals("go", type=int).get()
    return sum([await noop.schedule() for _ in range(steps)])
