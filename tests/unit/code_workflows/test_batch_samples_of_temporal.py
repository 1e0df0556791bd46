"""Temporal's samples `resource_pool` and `batch_sliding_window` as workflows of this project."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from orchestrator import Orchestrator, WorkflowContext, workflow
from orchestrator.testing import WorkflowTest

app = Orchestrator(database_url="postgresql://nobody@nowhere.invalid/none")


# -- resource_pool


@app.task(name="use-resource")
def use_resource(resource: str, user: str) -> None: ...


@dataclass
class PoolState:
    holders: dict[str, str] = field(default_factory=dict)
    """The run that holds each resource; empty if the resource is free."""
    waiting: list[str] = field(default_factory=list)


@app.workflow(name="pool")
class Pool:
    def __init__(self, ctx: WorkflowContext) -> None:
        self.ctx = ctx
        self.state = PoolState()
        self.handed_out = 0

    @workflow.run
    async def run(self, state: PoolState) -> None:
        self.state = PoolState({**state.holders, **self.state.holders}, state.waiting + self.state.waiting)
        while True:
            await self.ctx.wait_condition(lambda: (self.state.waiting and self.free) or self.is_long)
            if self.is_long:
                await self.ctx.wait_condition(lambda: self.ctx.all_handlers_finished)
                self.ctx.continue_as_new(self.state)
            resource, user = self.free[0], self.state.waiting.pop(0)
            self.state.holders[resource] = user
            self.handed_out += 1
            await app.workflow_run(user).asignal("resource", resource)

    @property
    def free(self) -> list[str]:
        return [resource for resource, user in self.state.holders.items() if not user]

    @property
    def is_long(self) -> bool:
        return self.handed_out == 3 or self.ctx.should_continue_as_new

    @workflow.signal
    def acquire(self, user: str) -> None:
        self.state.waiting.append(user)

    @workflow.signal
    def release(self, resource: str) -> None:
        self.state.holders[resource] = ""

    @workflow.update
    def add_resources(self, resources: list[str]) -> int:
        self.state.holders |= dict.fromkeys(resources, "")
        return len(self.state.holders)

    @workflow.query
    def holders(self) -> dict[str, str]:
        return self.state.holders


@app.workflow(name="pool-user")
async def pool_user(ctx: WorkflowContext, pool: str) -> str:
    run = app.workflow_run(pool)
    await run.asignal("acquire", str(ctx.info.run_id))
    resource: str = await ctx.signals("resource", type=str).get()
    try:
        for _ in range(3):
            await use_resource.schedule(resource, str(ctx.info.run_id))
            await ctx.sleep(1)
    finally:
        await run.asignal("release", resource)
    return resource


def test_the_resource_pool_sample_lends_a_resource_to_one_run_at_once() -> None:
    used: list[tuple[str, str]] = []

    async def play() -> tuple[list[str], dict[str, str]]:
        async with WorkflowTest() as test:
            mocks: Any = {use_resource: lambda resource, user: used.append((resource, user))}
            pool = await test.start(Pool.run, PoolState({"a": ""}), mocks=mocks)
            users = [await test.start(pool_user, str(pool.id), mocks=mocks) for _ in range(8)]
            assert await pool.update(Pool.add_resources, ["b"]) == 2
            results = [await user.result() for user in users]
            return results, await pool.query(Pool.holders)

    results, holders = asyncio.run(play())
    assert set(results) == {"a", "b"}
    assert holders == {"a": "", "b": ""}
    assert len(used) == 24
    for resource in ("a", "b"):  # without another run in between
        users = [user for one, user in used if one == resource]
        assert users == [user for user in dict.fromkeys(users) for _ in range(3)]


# -- batch_sliding_window


@app.task(name="process-record")
def process_record(record: int) -> None: ...


@app.workflow(name="record")
async def record(ctx: WorkflowContext, number: int) -> None:
    await ctx.sleep(1 + number % 3)
    await process_record.schedule(number)
    await app.workflow_run(str(ctx.info.parent_id)).asignal("done", number)


@dataclass
class Window:
    size: int
    page: int
    offset: int
    most: int
    """The end of the record numbers; they begin at `offset`."""
    open: list[int] = field(default_factory=list)
    done: int = 0
    runs: int = 1


@app.workflow(name="sliding-window")
class SlidingWindow:
    def __init__(self, ctx: WorkflowContext) -> None:
        self.ctx = ctx
        self.ended: list[int] = []

    @workflow.run
    async def run(self, window: Window) -> tuple[int, int]:
        for number in range(window.offset, min(window.offset + window.page, window.most)):
            await self.ctx.wait_condition(lambda: len(self.left(window)) < window.size)
            record.options(close_policy="abandon").schedule(number)
            window.open.append(number)
            assert len(self.left(window)) <= window.size
        window.offset = min(window.offset + window.page, window.most)
        if window.offset < window.most:
            window.open, window.done = self.left(window), window.done + len(self.ended)
            window.runs += 1
            self.ctx.continue_as_new(window)
        await self.ctx.wait_condition(lambda: not self.left(window))
        return window.done + len(self.ended), window.runs

    def left(self, window: Window) -> list[int]:
        return [number for number in window.open if number not in self.ended]

    @workflow.signal
    def done(self, number: int) -> None:
        self.ended.append(number)


@app.workflow(name="batch")
async def batch(ctx: WorkflowContext, records: int, partitions: int) -> tuple[int, int]:
    size = records // partitions
    parts = [SlidingWindow.run.schedule(Window(3, 5, n * size, (n + 1) * size)) for n in range(partitions)]
    ended = [await part for part in parts]
    return sum(done for done, _ in ended), sum(runs for _, runs in ended)


def test_the_sliding_window_sample_processes_each_record_once() -> None:
    processed: list[int] = []

    async def play() -> tuple[int, int]:
        async with WorkflowTest() as test:
            mocks: Any = {process_record: processed.append}
            return await test.run(batch, 60, 3, mocks=mocks)

    assert asyncio.run(play()) == (60, 12)
    assert sorted(processed) == list(range(60))
