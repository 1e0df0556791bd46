"""Handles of other runs inside a workflow: signals, cancels and waits are commands, whose outcomes are recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from orchestrator import (
    NotFound,
    Orchestrator,
    RunFailed,
    UnknownHandler,
    WorkflowContext,
    WorkflowFailed,
    WrongState,
    workflow,
)
from orchestrator.domain.code import history
from orchestrator.domain.code.history import Event
from orchestrator.testing import Recording, WorkflowTest, replay

app = Orchestrator(database_url="postgresql://nobody@nowhere.invalid/none")
NOBODY = "0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17"


@app.workflow(name="target")
async def target(ctx: WorkflowContext, how: str = "returns") -> str:
    if how == "continues":
        ctx.continue_as_new("waits")
    if how == "fails":
        raise WorkflowFailed("no")
    if how == "waits":
        return f"got {await ctx.signals('news').get()}"
    return how


@app.workflow(name="watcher")
async def watcher(ctx: WorkflowContext, of: str, what: str, later: float = 0.0) -> str:
    handle = app.workflow_run(of)
    if later:
        await ctx.sleep(later)
    calls: dict[str, Callable[[], Any]] = {
        "signal": lambda: handle.asignal("news", 7),
        "cancel": handle.acancel,
        "await": handle.aresult,
        "expire": lambda: handle.aresult(timeout=60),
    }
    try:
        return f"{await calls[what]()}"
    except (NotFound, WrongState, RunFailed, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"


def recorded(*args: Any) -> Recording:
    async def play() -> Recording:
        async with WorkflowTest() as test:
            run = await test.start(watcher, *args)
            await run.result()
            return run.history

    return Recording.from_json(asyncio.run(play()).to_json())


def test_a_history_of_the_previous_release_still_replays() -> None:
    """Senders received no outcome then: `await handle.asignal(…)` returned at once."""
    new = recorded(NOBODY, "signal")
    kept = [one for one in new.events if not isinstance(one.what, (history.PromiseRejected, history.RunCompleted))]
    old: list[Event] = []
    for event in kept[:-1]:  # without the last turn
        what = event.what
        if isinstance(what, history.SignalSent):
            what = msgspec.structs.replace(what, id=None)
        old.append(Event(len(old) + 1, event.at, what))
    completed = history.RunCompleted(b"\xa4None")
    replay(watcher, Recording(new.run_id, [*old, Event(len(old) + 1, old[-1].at, completed)]), exactly=True)
    replay(watcher, new, exactly=True)


def test_a_reset_between_a_signal_and_its_answer_delivers_the_answer() -> None:
    async def play() -> list[str]:
        async with WorkflowTest() as test:
            run = await test.start(watcher, NOBODY, "signal", 5.0)
            first = await run.result()
            (number,) = [one.number for one in run.history.events if isinstance(one.what, history.SignalSent)]
            again = await run.reset(to=number)
            return [first, await again.result()]

    first, again = asyncio.run(play())
    assert first == again
    assert first.startswith("NotFound")


def test_a_run_continues_when_it_is_no_longer_awaited() -> None:
    @app.workflow(name="impatient")
    async def impatient(ctx: WorkflowContext, of: str) -> str:
        waiting = asyncio.ensure_future(app.workflow_run(of).aresult())
        await ctx.sleep(1)
        waiting.cancel()
        await ctx.sleep(1)
        return "gone"

    async def play() -> list[str]:
        async with WorkflowTest() as test:
            one = await test.start(target, "waits")
            assert await (await test.start(impatient, one.id)).result() == "gone"
            await one.signal("news", 1)
            return [await one.result()]

    assert asyncio.run(play()) == ["got 1"]


def test_a_signal_without_a_handler_is_rejected() -> None:
    @app.workflow(name="closed")
    class Closed:
        def __init__(self, ctx: WorkflowContext) -> None:
            self.ctx, self.paid = ctx, 0

        @workflow.run
        async def run(self) -> int:
            await self.ctx.wait_condition(lambda: self.paid)
            return self.paid

        @workflow.signal
        def pay(self, amount: int) -> None:
            self.paid = amount

    @app.workflow(name="payer")
    async def payer(ctx: WorkflowContext, to: str) -> str:
        for handle in (app.workflow_run(to), app.workflow_run(to, Closed.run)):
            handle.signal("pya", 7)  # only logged
            with pytest.raises(UnknownHandler, match="'closed' has no handler for signal 'pya'. Did you mean 'pay'"):
                await handle.asignal("pya", 7)
        await app.workflow_run(to).asignal("pay", 7)
        return "paid"

    async def play() -> None:
        async with WorkflowTest() as test:
            one = await test.start(Closed.run)
            assert await test.run(payer, one.id) == "paid"
            assert await one.result() == 7
            assert sum(isinstance(event.what, history.SignalReceived) for event in one.history.events) == 1

    asyncio.run(play())
