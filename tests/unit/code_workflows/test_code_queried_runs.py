"""Queries of other runs from inside a workflow, in the leader of tests."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator import NotDeterministic, NotFound, Orchestrator, RunFailed, UnknownHandler, WorkflowContext, workflow
from orchestrator.testing import TestedRun, WorkflowTest
from tests.unit.code_workflows.playing import started

app = Orchestrator(database_url="postgresql://nobody@nowhere.invalid/none")


@app.workflow(name="counter")
class Counter:
    def __init__(self, ctx: WorkflowContext) -> None:
        self.ctx, self.count = ctx, 0

    @workflow.run
    async def run(self, count: int) -> int:
        self.count = count
        await self.ctx.promise("end")
        return count

    @workflow.query
    def times(self, number: int) -> tuple[int, ...]:
        return (self.count * number,)


@app.workflow(name="mother")
async def mother(ctx: WorkflowContext, query: str = "", other: str = "") -> tuple[int, ...]:
    child = Counter.run.schedule(7)
    if other:
        found: tuple[int, ...] = await app.workflow_run(other).aquery(query)
        return found
    return await child.handle.aquery(query or Counter.times, 3)


def test_a_child_is_queried_at_once_and_another_run_after_its_end() -> None:
    async def play(run: TestedRun[int], test: WorkflowTest) -> Any:
        assert await test.run(mother) == (21,)
        await run.resolve("end")
        return await test.run(mother, "times", run.id)

    with pytest.raises(RunFailed, match="InvalidArguments: .*number"):
        started(Counter.run, play, 5)


@pytest.mark.parametrize(
    ("query", "other", "kind"),
    [("time", "", UnknownHandler), ("times", "0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17", NotFound)],
)
def test_each_way_to_fail_has_a_type(query: str, other: str, kind: type[Exception]) -> None:
    async def play(run: TestedRun[Any], test: WorkflowTest) -> Any:
        return await run.result()

    with pytest.raises(RunFailed, match=f"{kind.__name__}: "):
        started(mother, play, query, other)


def test_a_query_that_blocks_is_refused() -> None:
    @app.workflow(name="hasty")
    async def hasty(ctx: WorkflowContext) -> Any:
        return Counter.run.schedule(7).handle.query(Counter.times, 3)

    async def play(run: TestedRun[Any], test: WorkflowTest) -> Any:
        return await run.result()

    with pytest.raises(NotDeterministic, match=r"await handle.aquery\(name\)"):
        started(hasty, play)
