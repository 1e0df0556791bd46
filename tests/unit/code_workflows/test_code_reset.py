"""Runs that are reset to an earlier event: what is kept, repeated and sent again."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import pytest

from orchestrator import Orchestrator, RunFailed, WorkflowContext, WrongState
from orchestrator.domain.code import history, resets
from orchestrator.domain.code.history import Event
from orchestrator.domain.code.resets import Fate, preview
from orchestrator.domain.tasks.task import TaskError
from orchestrator.testing import TestedRun, WorkflowTest
from tests.unit.code_workflows.playing import started

app = Orchestrator()
RUN = bytes(range(16))


@app.task(name="pay")
def pay(rate: int) -> str: ...


@app.task(name="ship")
def ship(label: str) -> str: ...


@app.workflow(name="order")
async def order(ctx: WorkflowContext, rates: Any = None) -> list[Any]:
    rate = await ctx.run("rate", lambda: next(RATES))
    paid = await pay.schedule(rate)
    ctx.logger.info("paid at %d", rate)
    approved = ctx.promise("approval")
    remark = await ctx.signals("remark").get()
    ctx.set("remark", remark)
    label = f"{ctx.random.randrange(10**9)} {ctx.uuid()}"
    return [rate, paid, remark, await approved, await ship.schedule(label), await ctx.promise("receipt")]


RATES = count(1)


class Shop:
    """Mocks that record their arguments."""

    def __init__(self) -> None:
        self.paid: list[int] = []
        self.shipped: list[str] = []
        self.mocks: dict[Any, Any] = {pay: self._pay, ship: self._ship}

    def _pay(self, rate: int) -> str:
        self.paid.append(rate)
        return f"payment {len(self.paid)}"

    def _ship(self, label: str) -> str:
        self.shipped.append(label)
        return f"parcel {len(self.shipped)}"


async def run_to_end(run: TestedRun[list[Any]]) -> list[Any]:
    await run.signal("remark", "quick!")
    await run.resolve("approval", "yes")
    await run.resolve("receipt", "here")
    return await run.result()


def kinds(run: TestedRun[Any]) -> list[str]:
    return [type(event.what).__name__ for event in run.history.events]


def number_of(run: TestedRun[Any], kind: type, last: bool = False) -> int:
    found = [event.number for event in run.history.events if isinstance(event.what, kind)]
    return found[-1 if last else 0]


def test_a_reset_keeps_the_old_patch_branch_before_its_event() -> None:
    changed = False
    choices: list[bool] = []

    @app.workflow(name="patching")
    async def patching(ctx: WorkflowContext) -> None:
        if changed:
            choices.append(ctx.patched("change"))
        await ctx.sleep(1)

    async def then(old: TestedRun[None], test: WorkflowTest) -> None:
        nonlocal changed
        changed = True
        for to in (3, 1):
            await old.reset(to)
        assert choices == [False, True]

    started(patching, then)


@app.workflow(name="child")
async def child(ctx: WorkflowContext, seconds: float) -> str:
    await ctx.sleep(seconds)
    return f"slept {seconds:g} s"


def test_a_reset_does_not_restart_a_child_whose_cancel_is_awaited() -> None:
    @app.workflow(name="impatient")
    async def impatient(ctx: WorkflowContext) -> str:
        future = child.options(on_cancel="wait").schedule(60)
        await ctx.sleep(1)
        future.cancel()
        try:
            return await future
        except asyncio.CancelledError:
            return "cancelled"

    async def then(old: TestedRun[str], test: WorkflowTest) -> None:
        assert await old.result() == "cancelled"
        to = number_of(old, history.ChildCancelRequested)
        new = await old.reset(to)
        assert await new.result() == "cancelled"
        assert len(test.leader.runs) == 3
        cut = [*old.history.events[:to]]  # as if the child had not ended yet
        told = resets.reset(RUN, cut, bytes(16), to, 0.0).facts
        assert [type(fact).__name__ for fact in told] == ["ChildCancelled"]

    started(impatient, then)


def test_a_reset_drops_a_later_request_to_cancel() -> None:
    shop = Shop()

    async def then(old: TestedRun[list[Any]], test: WorkflowTest) -> None:
        await old.cancel()
        with pytest.raises(RunFailed):
            await old.result()
        new = await old.reset(number_of(old, history.PromiseCreated))
        assert (await run_to_end(new))[2:4] == ["quick!", "yes"]

    started(order, then, mocks=shop.mocks)


# -- rejected resets


def test_a_run_can_be_reset_only_to_certain_events() -> None:
    async def then(run: TestedRun[list[Any]], test: WorkflowTest) -> None:
        await run_to_end(run)
        events = run.history.events
        last = len(events)
        assert kinds(run)[:9] == [
            *("RunStarted", "ActivationApplied", "OperationRecorded", "TaskScheduled", "TaskCompleted"),
            *("ActivationApplied", "PromiseCreated", "SignalReceived", "ActivationApplied"),
        ]
        assert resets.allowed(events)[:4] == [1, 4, 5, 7]
        for to, message in (
            (0, f"cannot be reset to event 0: its events are numbered 1 to {last}."),
            (last + 1, f"its events are numbered 1 to {last}."),
            (2, "inside a batch of commands, .* Reset it to event 1 or 4."),
            (3, "Reset it to event 1 or 4."),
            (6, "Reset it to event 5 or 7."),
            (last, f"the code ended the run there. The last event that it can be reset to is {last - 2}."),
            (last - 1, f"the code ended the run there. The last event that it can be reset to is {last - 2}."),
        ):
            with pytest.raises(WrongState, match=message):
                await run.reset(to)

    started(order, then, mocks=Shop().mocks)


# -- the preview


def test_the_preview_of_a_reset_lists_the_fate_of_each_item() -> None:
    what: list[Any] = [
        history.RunStarted("w", 1, b""),
        history.ActivationApplied(1),
        history.OperationRecorded(1, "rate"),
        history.TaskScheduled(1, b"1" * 16, "pay"),
        history.TaskScheduled(2, b"2" * 16, "ship"),
        history.PromiseCreated(1, b"3" * 16, "approval"),
        history.PromiseCreated(2, b"4" * 16, "receipt"),
        history.ChildStarted(1, b"5" * 16, "mail", "mail", detached=True),
        history.TaskCompleted(b"1" * 16, b""),
        # the reset cuts the history here
        history.SignalReceived("remark", b""),
        history.SignalReceived("remark", b""),
        history.PromiseResolved(b"3" * 16, b""),
        history.UpdateRequested(b"6" * 16, "add", b""),
        history.UpdateRequested(b"9" * 16, "remove", b""),
        history.UpdateRequested(b"0" * 16, "remove", b""),
        history.ActivationApplied(15),
        history.UpdateAnswered(b"6" * 16, error=TaskError("ValueError", "no")),
        history.UpdateAnswered(b"9" * 16, b""),
        history.TaskScheduled(3, b"7" * 16, "mail"),
        history.PromiseCreated(3, b"8" * 16, "signature"),
        history.PromiseRejected(b"8" * 16, TaskError("PromiseRejected", "no")),
        history.RunCancelRequested(),
    ]
    events = [Event(number, 0.0, one) for number, one in enumerate(what, 1)]
    assert preview(RUN, events, 9) == [
        (1, "operation rate", Fate.KEPT),
        (1, "task pay", Fate.KEPT),
        (1, "task ship", Fate.AGAIN),
        (1, "task mail", Fate.MAYBE),
        (1, "promise receipt", Fate.OPEN),
        (1, "child mail", Fate.GOES_ON),
        (1, "promise approval", Fate.TOLD),
        (2, "signal remark", Fate.TOLD),
        (2, "update remove", Fate.TOLD),
        (1, "promise signature", Fate.ANEW),
        (1, "request to cancel", Fate.DROPPED),
        (1, "update add", Fate.DROPPED),
    ]
    begins = resets.reset(RUN, events, b"n" * 16, 9, 5.0, "why not")
    assert begins.copy[-1] == Event(10, 5.0, history.RunReset(RUN, 9, "why not"))
    assert [type(fact).__name__ for fact in begins.facts] == [
        *("SignalReceived", "SignalReceived", "PromiseResolved", "UpdateRequested", "UpdateRequested")
    ]
    assert [promise.name for promise in begins.promises] == ["receipt"]
    assert list(begins.handed_over) == [b"5" * 16]
