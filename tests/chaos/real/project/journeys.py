"""Code workflows that wait for everything possible: parallel and sequential tasks, timers, messages, a child.

Each returns the results and messages that it received, to compare with the journal.
"""

from __future__ import annotations

import asyncio
from typing import Any

from orchestrator import TaskContext, WorkflowContext
from tests.chaos.real.project.base import app, spend, token, write, written_down

ROW = ("then-0", "then-1")
LEG = ("leg-0", "leg-1")
UNDO = "undo"


@app.task
def step(context: TaskContext, journey: str, name: str, seconds: float = 0.0) -> str:
    write("step", journey, name, context.task_id)
    with written_down(context):
        spend(seconds)
    return token(context)


@app.workflow(name="leg")
async def leg(ctx: WorkflowContext, journey: str) -> dict[str, str]:
    """A child workflow with some steps of its parent's journey."""
    tokens = await asyncio.gather(*(step.schedule(journey, name, 0.1) for name in LEG))
    await asyncio.sleep(0.1)
    return dict(zip(LEG, tokens, strict=True))


@app.workflow(name="journey")
async def journey(ctx: WorkflowContext, width: int) -> dict[str, Any]:
    run = str(ctx.info.run_id)
    news = ctx.signals("news", type=int)
    added: list[int] = []

    @ctx.update
    def add(number: int) -> int:
        added.append(number)
        return number

    beside = [f"beside-{number}" for number in range(width)]
    tokens = dict(zip(beside, await asyncio.gather(*(step.schedule(run, name) for name in beside)), strict=True))
    ctx.compensate(step, run, UNDO)
    for name in ROW:
        tokens[name] = await step.schedule(run, name, 0.05)
    await ctx.sleep(0.3)
    answer = await ctx.promise("answer", type=int)
    heard = [news.get_nowait() for _ in range(len(news))]
    tokens |= await leg.schedule(run)
    return {"width": width, "tokens": tokens, "answer": answer, "heard": heard, "added": added}


@app.workflow(name="rounds")
async def rounds(ctx: WorkflowContext, number: int = 0) -> None:
    """Continue as new forever: only a timeout, a cancellation or the parent's end stops the run."""
    await ctx.sleep(0.05)
    ctx.continue_as_new(number + 1)


@app.workflow(name="guardian")
async def guardian(ctx: WorkflowContext) -> None:
    """A parent that ends while its child continues forever."""
    rounds.schedule()
    await ctx.sleep(1.0)


@app.workflow(name="inquiry")
async def inquiry(ctx: WorkflowContext, heard: list[int]) -> dict[str, Any]:
    """Wait for an answer with a timeout, and continue as new until it arrives. Collect all signals meanwhile."""
    news = ctx.signals("news", type=int)
    answer: int | None = None
    for _ in range(2):
        try:
            answer = await asyncio.wait_for(ctx.promise("answer", type=int), 0.05)
            break
        except TimeoutError:
            continue
    heard = [*heard, *(news.get_nowait() for _ in range(len(news)))]
    if answer is None:
        ctx.continue_as_new(heard)
    return {"answer": answer, "heard": heard, "added": []}
