"""`ctx.wait_condition`, handlers of signals, and waiting for handlers to finish."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from orchestrator import InvalidWorkflow, Orchestrator, RunFailed, WorkflowContext
from orchestrator.domain.code import history
from orchestrator.testing import TestedRun, WorkflowTest
from tests.unit.code_workflows.playing import played, started

app = Orchestrator(database_url="postgresql://nobody@nowhere.invalid/none")


@app.task(name="lookup")
def lookup(key: str) -> str: ...


@app.workflow(name="greeter")
async def greeter(ctx: WorkflowContext) -> list[str]:
    names: list[str] = []
    done = False

    @ctx.signal
    def greet(name: str) -> None:
        names.append(name)

    @ctx.signal("leave")
    def finish() -> None:
        nonlocal done
        done = True

    await ctx.wait_condition(lambda: done)
    return names


def test_an_async_condition_is_rejected() -> None:
    async def never() -> bool:
        return False

    @app.workflow(name="impatient")
    async def impatient(ctx: WorkflowContext) -> None:
        await ctx.wait_condition(never)

    with pytest.raises(RunFailed, match="TypeError: ctx.wait_condition: expected a plain function"):
        played(impatient)


@pytest.mark.parametrize("seconds", [0, -1])
def test_a_condition_that_is_met_does_not_time_out(seconds: float) -> None:
    @app.workflow(name="late")
    async def late(ctx: WorkflowContext) -> str:
        await ctx.wait_condition(lambda: True, timeout=seconds)
        with pytest.raises(TimeoutError):
            await ctx.wait_condition(lambda: False, timeout=seconds)
        return "met"

    assert played(late) == "met"


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_a_condition_may_raise_anything(kind: type[BaseException]) -> None:
    @app.workflow(name="raising")
    async def raising(ctx: WorkflowContext) -> None:
        def check() -> bool:
            raise kind("no")

        await ctx.wait_condition(check)

    with pytest.raises(RunFailed, match=kind.__name__):
        played(raising)


async def greets(run: TestedRun[list[str]], test: WorkflowTest) -> list[str]:
    await run.signal("greet", "Ann")
    await run.signal("greet", "Bob")
    await run.signal("leave")
    return await run.result()  # also replays the history


def test_signal_handlers_can_meet_a_condition() -> None:
    assert started(greeter, greets) == ["Ann", "Bob"]


def test_a_signal_with_invalid_arguments_is_dropped_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def play(run: TestedRun[list[str]], test: WorkflowTest) -> list[str]:
        await run.signal("greet", 7)
        await run.signal("leave", "a value that it does not take")
        return await greets(run, test)

    assert started(greeter, play) == ["Ann", "Bob"]
    assert "signal 'greet' was dropped" in caplog.text
    assert "signal 'leave' was dropped" in caplog.text


def test_a_signal_handler_with_two_arguments_is_rejected() -> None:
    @app.workflow(name="two-arguments")
    async def two_arguments(ctx: WorkflowContext) -> None:
        @ctx.signal
        def pay(amount: int, currency: str) -> None: ...

    with pytest.raises(RunFailed, match="A signal carries one value or none"):
        played(two_arguments)


@pytest.mark.parametrize(("after", "says"), [(59, "paid"), (61, "late")])
def test_a_condition_times_out_by_a_durable_timer(after: int, says: str) -> None:
    @app.workflow(name=f"billing-{after}")
    async def billing(ctx: WorkflowContext) -> str:
        paid: list[int] = []
        ctx.signal("pay")(paid.append)
        try:
            await ctx.wait_condition(lambda: paid, timeout=timedelta(minutes=1))
        except TimeoutError:
            return "late"
        return "paid"

    async def play(run: TestedRun[str], test: WorkflowTest) -> str:
        await test.skip(after)
        if after < 60:
            await run.signal("pay", 1)
        assert any(isinstance(event.what, history.TimerStarted) for event in run.history.events)
        return await run.result()

    assert started(billing, play) == says


def test_waiters_on_a_condition_are_woken_one_at_a_time_in_order() -> None:
    @app.workflow(name="takers")
    async def takers(ctx: WorkflowContext) -> list[tuple[str, int]]:
        tokens: list[int] = []
        taken: list[tuple[str, int]] = []

        async def take(who: str) -> None:
            await ctx.wait_condition(lambda: tokens)
            taken.append((who, tokens.pop()))

        both = asyncio.gather(take("first"), take("second"))
        await ctx.sleep(1)
        tokens.append(1)
        await ctx.sleep(1)
        assert taken == [("first", 1)]
        tokens.append(2)
        await both
        return taken

    assert played(takers) == [("first", 1), ("second", 2)]


def test_a_condition_raises_at_its_await_and_cannot_change_the_workflow() -> None:
    @app.workflow(name="careless")
    async def careless(ctx: WorkflowContext) -> list[str]:
        said = []
        for predicate in (lambda: 1 / 0, lambda: next(iter(())), lambda: ctx.set("seen", True)):
            try:
                await ctx.wait_condition(predicate)
            except (ZeroDivisionError, RuntimeError, InvalidWorkflow) as error:
                said.append(f"{type(error).__name__}: {error}")
        return said

    zero, stop, changed = played(careless)
    assert zero.startswith("ZeroDivisionError")
    assert "StopIteration" in stop
    assert "The condition of ctx.wait_condition may read the workflow" in changed


def test_a_cancel_interrupts_a_wait_for_a_condition() -> None:
    async def play(run: TestedRun[Any], test: WorkflowTest) -> None:
        await run.cancel()
        await run.result()

    with pytest.raises(RunFailed, match="was cancelled"):
        started(greeter, play)


@app.workflow(name="handlers")
async def handlers(ctx: WorkflowContext) -> list[str]:
    found: list[str] = []
    closing = False

    @ctx.update
    async def find(key: str) -> str:
        found.append(await lookup.schedule(key))
        return found[-1]

    @ctx.signal
    async def find_later(key: str) -> None:
        await ctx.sleep(5)
        found.append(await lookup.schedule(key))

    @ctx.signal
    def close() -> None:
        nonlocal closing
        closing = True

    await ctx.wait_condition(lambda: closing)
    await ctx.wait_condition(lambda: ctx.all_handlers_finished)
    return found


def test_a_workflow_can_wait_for_its_handlers_to_finish() -> None:
    async def play(run: TestedRun[list[str]], test: WorkflowTest) -> list[str]:
        await run.signal("find_later", "b")
        assert await run.update("find", "a") == "A"
        await run.signal("close")
        return await run.result()

    assert started(handlers, play, mocks={lookup: str.upper}) == ["A", "B"]


def test_messages_are_kept_until_their_handlers_exist() -> None:
    @app.workflow(name="late-handlers")
    async def late_handlers(ctx: WorkflowContext) -> list[str]:
        await ctx.sleep(60)
        heard: list[str] = []
        ctx.signal("greet")(lambda name: heard.append(name))
        ctx.update("add")(lambda name: heard.append(name))
        await ctx.wait_condition(lambda: ctx.all_handlers_finished)
        return heard

    async def play(run: TestedRun[list[str]], test: WorkflowTest) -> list[str]:
        await run.signal("greet", "Ann")
        await run.signal("greet", "Bob")
        return await run.result()

    assert started(late_handlers, play) == ["Ann", "Bob"]


def test_a_failed_signal_handler_fails_the_run() -> None:
    undone: list[str] = []

    @app.workflow(name="fails-by-signal")
    async def fails_by_signal(ctx: WorkflowContext) -> None:
        ctx.compensate(undone.append, "step")

        @ctx.signal
        def pay(amount: int) -> None:
            raise ValueError(f"cannot pay {amount}")

        await ctx.wait_condition(lambda: False)

    async def play(run: TestedRun[None], test: WorkflowTest) -> None:
        await run.signal("pay", 7)
        await run.result()

    with pytest.raises(RunFailed, match="cannot pay 7"):
        started(fails_by_signal, play)
    assert "step" in undone


def test_a_signal_handler_can_continue_as_new_with_pending_signals() -> None:
    @app.workflow(name="rounds")
    async def rounds(ctx: WorkflowContext, heard: list[str]) -> list[str]:
        @ctx.signal
        def hear(word: str) -> None:
            heard.append(word)
            if word == "again":
                ctx.continue_as_new(heard)

        await ctx.wait_condition(lambda: "end" in heard)
        return heard

    async def play(run: TestedRun[list[str]], test: WorkflowTest) -> list[str]:
        for word in ("a", "again", "b", "end"):
            await run.signal("hear", word)
        return await run.result()

    assert started(rounds, play, []) == ["a", "again", "b", "end"]
