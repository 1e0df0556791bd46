"""Signals and updates with ids, and updates whose answers are fetched later, in the leader of tests."""

from __future__ import annotations

from typing import Any

from orchestrator import Orchestrator, WorkflowContext
from orchestrator.testing import TestedRun, WorkflowTest
from tests.unit.code_workflows.playing import started

app = Orchestrator(database_url="postgresql://nobody@nowhere.invalid/none")


@app.workflow(name="counter")
async def counter(ctx: WorkflowContext) -> int:
    count = 0

    @ctx.update
    async def add(number: int, pause: float = 0) -> int:
        nonlocal count
        await ctx.sleep(pause)
        count += number
        return count

    @ctx.signal
    def push(number: int) -> None:
        nonlocal count
        count += number

    await ctx.promise("end")
    return count


def test_what_is_sent_twice_with_an_id_is_applied_once() -> None:
    async def play(run: TestedRun[int], test: WorkflowTest) -> Any:
        once = run.options(id="request-7")
        assert [await once.update("add", 5), await once.update("add", 5)] == [5, 5]
        assert await run.options(id="request-8").update("add", 5) == 10
        await once.signal("push", 1)
        await once.signal("push", 1)
        await run.signal("push", 1)
        later = await run.start_update("add", 1, pause=60)
        await test.skip(60)
        assert later.result() == 13
        await run.resolve("end")
        return await run.result()

    assert started(counter, play) == 13
