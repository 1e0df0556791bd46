"""Signals and updates with ids, and updates whose answers are fetched later, in the leader of tests."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator import InvalidArguments, Orchestrator, UpdateRefused, WorkflowContext
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


def test_an_update_that_was_refused_may_be_sent_again_with_its_id() -> None:
    limit = [10]

    @app.workflow(name="limited")
    async def limited(ctx: WorkflowContext) -> int:
        total = 0

        def check(number: int) -> None:
            if number > limit[0]:
                raise ValueError("too much")

        @ctx.update(validate=check)
        def add(number: int) -> int:
            nonlocal total
            total += number
            return total

        await ctx.wait_condition(lambda: total > 0)
        await ctx.sleep(1)
        return total

    async def play(run: TestedRun[int], _: WorkflowTest) -> None:
        once = run.options(id="m-1")
        for _again in range(2):
            with pytest.raises(UpdateRefused, match="too much"):
                await once.update("add", 20)
        limit[0] = 100
        assert [await once.update("add", 20), await once.update("add", 20)] == [20, 20]
        assert await run.result() == 20

    started(limited, play)


@pytest.mark.parametrize("to", [3, None], ids=["before", "behind"])
@pytest.mark.parametrize("is_ended", [False, True], ids=["open", "ended"])
def test_a_reset_run_knows_the_messages_that_it_repeats(to: int | None, is_ended: bool) -> None:
    async def play(run: TestedRun[int], test: WorkflowTest) -> Any:
        once = run.options(id="request-7")
        assert await once.update("add", 5) == 5
        await once.signal("push", 1)
        to_event = to or run.history.events[-1].number
        if is_ended:
            await run.terminate()
        again = (await run.reset(to_event)).options(id="request-7")
        assert await again.update("add", 5) == 5
        await again.signal("push", 1)
        await again.resolve("end")
        return await again.result()

    assert started(counter, play) == 6


@pytest.mark.parametrize("is_ended", [False, True], ids=["open", "ended"])
def test_an_update_that_failed_after_the_event_of_a_reset_can_be_sent_again(is_ended: bool) -> None:
    async def play(run: TestedRun[int], test: WorkflowTest) -> Any:
        once = run.options(id="request-7")
        with pytest.raises(InvalidArguments):
            await once.update("add", "much")
        if is_ended:
            await run.terminate()
        again = await run.reset(3)
        assert await again.options(id="request-7").update("add", 5) == 5
        assert await again.options(id="request-7").update("add", 5) == 5
        await again.resolve("end")
        return await again.result()

    assert started(counter, play) == 5


@pytest.mark.parametrize("is_ended", [False, True], ids=["open", "ended"])
def test_an_update_that_was_refused_and_sent_again_is_known_after_a_reset(is_ended: bool) -> None:
    async def play(run: TestedRun[int], test: WorkflowTest) -> Any:
        once = run.options(id="request-7")
        with pytest.raises(InvalidArguments):
            await once.update("add", "much")
        assert await once.update("add", 5) == 5
        if is_ended:
            await run.terminate()
        again = await run.reset(3)
        assert await again.options(id="request-7").update("add", 5) == 5
        await again.resolve("end")
        return await again.result()

    assert started(counter, play) == 5
