"""Two releases of the application, as during a deploy: each knows tasks that the other does not.

Each release has its own tasks, and its own version of a workflow. A process without a release knows both, like a new
release that still contains the previous release's code.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any, Final

from orchestrator import TaskContext, WorkflowContext
from tests.chaos.real.project.base import app, spend, token, write, written_down

RELEASE: Final = "CHAOS_RELEASE"
"""Environment variable with the release of a process."""
RELEASES: Final = (1, 2)
OF_RELEASE: Final = "_of_release_"
"""Part of the name of every task that only one release knows."""
BOTH: Final = "both"
STAGES: Final = ("start", "end")
_KNOWN: Final = tuple(release for release in RELEASES if os.environ.get(RELEASE, BOTH) in (BOTH, str(release)))


def own_stages(release: int) -> tuple[str, ...]:
    """Return the stages of runs that are pinned to a version."""
    return tuple(f"{release}-{name}" for name in STAGES)


def _work(context: TaskContext, seconds: float = 0.0) -> str:
    with written_down(context):
        spend(seconds)
    return token(context)


def _stage(context: TaskContext, run: str, name: str) -> str:
    write("stage", run, name, context.task_id)
    with written_down(context):
        pass
    return token(context)


async def _relay_1(ctx: WorkflowContext, alike: bool) -> dict[str, Any]:
    """Run the stages one after another."""
    if alike:
        return {"release": 1, "tokens": await _run_common_stages(ctx)}
    tokens: dict[str, str] = {}
    for name in own_stages(1):
        tokens[name] = await STAGE[1].schedule(str(ctx.info.run_id), name)
        await ctx.sleep(0.2)
    return {"release": 1, "tokens": tokens}


async def _relay_2(ctx: WorkflowContext, alike: bool) -> dict[str, Any]:
    """Sleep first, then run all stages at once, so that a history of version 1 does not match."""
    if alike:
        return {"release": 2, "tokens": await _run_common_stages(ctx)}
    await ctx.sleep(0.4)
    names, run = own_stages(2), str(ctx.info.run_id)
    tokens = await asyncio.gather(*(STAGE[2].schedule(run, name) for name in names))
    return {"release": 2, "tokens": dict(zip(names, tokens, strict=True))}


async def _run_common_stages(ctx: WorkflowContext) -> dict[str, str]:
    """Run stages that both versions can continue."""
    tokens: dict[str, str] = {}
    for name in STAGES:
        tokens[name] = await stage_of_any.schedule(str(ctx.info.run_id), name)
        await ctx.sleep(0.2)
    return tokens


WORK: Final = {release: app.task(name=f"work{OF_RELEASE}{release}")(_work) for release in _KNOWN}
STAGE: Final = {release: app.task(name=f"stage{OF_RELEASE}{release}")(_stage) for release in _KNOWN}
stage_of_any = app.task(name="stage_of_any_release")(_stage)
RELAY: Final = {
    release: app.workflow(name="relay", version=release)((_relay_1, _relay_2)[release - 1]) for release in _KNOWN
}
