"""The workflows that are sent messages: both take steps one after the other, and note every message in its order."""

from __future__ import annotations

import time

from orchestrator import Orchestrator, WorkflowContext, workflow

app = Orchestrator()
END = -1
"""The last signal of a run."""


@app.task(name="step")
def step(number: int) -> int:
    time.sleep(0.02)
    return number + 1


@app.workflow(name="ledger")
class Ledger:
    """Handlers note messages at once, so that those of a sender stand in its order; every fifth update waits."""

    def __init__(self, ctx: WorkflowContext) -> None:
        self.ctx = ctx
        self.noted: list[int] = []

    @workflow.run
    async def run(self) -> list[int]:
        steps = 0
        while END not in self.noted:
            steps = await step.schedule(steps)
            if steps % 20 == 0:  # and a while in which there is nothing to follow
                await self._more()
        await self.ctx.wait_condition(lambda: self.ctx.all_handlers_finished)
        return self.noted

    async def _more(self) -> None:
        seen = len(self.noted)
        await self.ctx.wait_condition(lambda: len(self.noted) > seen or END in self.noted)

    @workflow.signal
    def push(self, number: int) -> None:
        self.noted.append(number)

    @workflow.update
    async def add(self, number: int) -> int:
        self.noted.append(number)
        place = len(self.noted)
        if number % 5 == 0:
            await step.schedule(number)
        elif number % 5 == 1:
            await self.ctx.sleep(0.01)
        return place

    @workflow.query
    def count(self) -> int:
        return len(self.noted)


@app.workflow(name="mailbox")
async def mailbox(ctx: WorkflowContext) -> list[int]:
    """Takes signals out of a mailbox between steps; updates are noted among them."""
    noted: list[int] = []
    signals = ctx.signals("push", type=int)

    @ctx.update
    async def add(number: int) -> int:
        noted.append(number)
        return len(noted)

    @ctx.query
    def count() -> int:
        return len(noted)

    steps = 0
    while END not in noted:
        steps = await step.schedule(steps)
        while len(signals):
            noted.append(signals.get_nowait())
    return noted
