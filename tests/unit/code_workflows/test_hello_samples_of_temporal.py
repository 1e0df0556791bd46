"""What Temporal's other `hello` samples show, as tasks and workflows of this project.

Activity choice, retry, heartbeat, async and method; async activity completion, local activity, patch, search
attributes, and standalone activity. Elsewhere: activities in threads (`tests/unit/test_pool.py`) and in processes
(`tests/acceptance/test_enqueue_to_result.py`), cron (`tests/integration/test_code_schedules.py`), mTLS
(`tests/acceptance/test_tls.py`), and `update_with_start` (`tests/integration/test_code_message_ids.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from orchestrator import Depends, Orchestrator, TaskContext, WorkflowContext
from orchestrator.testing import TestedRun, WorkflowTest, eager, replay
from tests.unit.code_workflows.playing import played, started

app = Orchestrator(database_url="postgresql://nobody@nowhere.invalid/none")


# -- hello_activity_choice


class Fruit(StrEnum):
    APPLE = "apple"
    BANANA = "banana"


@app.task(name="order-apples")
def order_apples(count: int) -> str: ...


@app.task(name="order-bananas")
def order_bananas(count: int) -> str: ...


ORDERS = {Fruit.APPLE: order_apples, Fruit.BANANA: order_bananas}


@app.workflow(name="choice")
async def choice(ctx: WorkflowContext, fruits: dict[Fruit, int]) -> list[str]:
    return [await ORDERS[fruit].schedule(count) for fruit, count in fruits.items()]


def test_activity_choice() -> None:
    mocks: Any = {order_apples: lambda count: f"{count} apples", order_bananas: lambda count: f"{count} bananas"}
    assert played(choice, {Fruit.BANANA: 2, Fruit.APPLE: 1}, mocks=mocks) == ["2 bananas", "1 apples"]


# -- hello_activity_retry, _heartbeat, _async and _method, and hello_standalone_activity


@app.resource
def composer() -> Iterator[str]:
    yield "Hello"


@app.task(name="retried", retries=3)
def retried(ctx: TaskContext) -> list[int]:
    counted: list[int] = (ctx.details or {}).get("counted", [])
    ctx.heartbeat({"counted": [*counted, ctx.attempt]})  # for the next attempt
    if ctx.attempt < 3:
        raise ConnectionError("not yet")
    return counted


@app.task(name="greet-async")
async def greet_async(name: str, greeting: str = Depends(composer)) -> str:
    await asyncio.sleep(0)
    return f"{greeting}, {name}!"


def test_activities() -> None:
    with eager(app):
        assert retried.enqueue().result() == [1, 2]
        assert greet_async.enqueue("Ann").result() == "Hello, Ann!"


# -- hello_async_activity_completion


@app.workflow(name="completion")
async def completion(ctx: WorkflowContext, name: str) -> str:
    return f"{await ctx.promise('greeting', type=str)}, {name}!"  # whoever has the id of the run completes it


def test_async_activity_completion() -> None:
    async def play(run: TestedRun[str], test: WorkflowTest) -> str:
        await run.resolve("greeting", "Hello")
        return await run.result()

    assert started(completion, play, "Ann") == "Hello, Ann!"


# -- hello_local_activity


def test_local_activity() -> None:
    calls: list[int] = []

    def compose() -> str:
        calls.append(1)
        if len(calls) < 3:
            raise ConnectionError("not yet")
        return "Hello"

    @app.workflow(name="local")
    async def local(ctx: WorkflowContext, name: str) -> str:
        return f"{await ctx.run('compose', compose, retries=2, timeout=10)}, {name}!"

    assert played(local, "Ann") == "Hello, Ann!"
    assert len(calls) == 3  # and none on replay


# -- hello_patch


def test_patch() -> None:
    @app.workflow(name="patch")
    async def first(ctx: WorkflowContext) -> str:
        await ctx.sleep(60)
        return "Hello"

    @app.workflow(name="patch", version=2)
    async def second(ctx: WorkflowContext) -> str:
        await ctx.sleep(60)
        return "Goodbye" if ctx.patched("goodbye") else "Hello"

    async def play(run: TestedRun[str], test: WorkflowTest) -> Any:
        assert await run.result() == "Hello"
        return run.history

    replay(second, started(first, play), exactly=True)
    assert played(second) == "Goodbye"


# -- hello_search_attributes


def test_search_attributes() -> None:
    @app.workflow(name="attributes")
    async def attributes(ctx: WorkflowContext) -> Any:
        ctx.set_attributes(customer="ann", stage="asked")
        await ctx.sleep(60)
        ctx.set_attributes(stage="greeted", customer=None)
        return ctx.attributes

    assert played(attributes) == {"stage": "greeted"}
