"""New code replays the open runs of older code: a mismatch makes a run stuck, and never fails it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from orchestrator import DeterminismViolation, InvalidTask, Orchestrator, WorkflowContext, WorkflowFailed
from orchestrator.domain.code import history
from orchestrator.domain.code.activation import Query
from orchestrator.domain.ids import derived_id
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.values.payload import encode_call, encode_value
from orchestrator.testing import Recording, replay
from orchestrator.testing.leader import MemoryLeader
from orchestrator.testing.memory_run import Run
from tests.unit.code_workflows.playing import played

LIMIT = 1_000_000


def application(code: Callable[..., Any]) -> Orchestrator:
    """Return an application that has this code as workflow `order`."""
    app = Orchestrator()
    for name in ("charge", "refund", "ship"):
        app.task(name=name)(lambda item: item)
    app.workflow(name="order")(code)
    return app


def encoded(value: Any) -> bytes:
    return encode_value(value, "a value", LIMIT)


@pytest.fixture
def begin() -> Iterator[Callable[..., World]]:
    """Begins runs, and evicts them from memory at the end of the test."""
    worlds: list[World] = []

    def begin(*args: Any) -> World:
        worlds.append(World(*args))
        return worlds[-1]

    yield begin
    for world in worlds:
        world.engine.close()


class World:
    """One run, whose code can be replaced while the run is open."""

    def __init__(self, code: Callable[..., Any], *args: Any) -> None:
        self.deploy(code)
        self.leader = MemoryLeader(self.engine, self.app.code_workflows.find, 1_700_000_000.0)
        started = history.RunStarted("order", 1, encode_call("order", args, {}, LIMIT))
        self.run: Run = self.leader.start(started, derived_id(bytes(16), "deploy"))
        self.leader.activate(self.run)

    def deploy(self, code: Callable[..., Any]) -> None:
        self.app = application(code)
        self.engine = Engine(self.app.code_workflows.find, LIMIT)

    def redeploy(self, code: Callable[..., Any]) -> None:
        self.engine.close()
        self.deploy(code)
        self.leader._engine, self.leader._find = self.engine, self.app.code_workflows.find

    def complete(self, result: Any) -> None:
        """Complete the oldest open task, and activate the run."""
        task = next(iter(self.run.tasks))
        self.leader.settle(self.run, task, history.TaskCompleted(task, encoded(result)))
        self.leader.activate(self.run)

    def ask(self, name: str) -> list[Any]:
        return self.leader.activate(self.run, [Query(derived_id(bytes(16), "query"), name, encoded(([], {})))])

    def check(self) -> None:
        """Replay the history with the current code, as `workflows replay-check` does."""
        replay(self.app.code_workflows["order"], Recording(self.run.id, self.run.history), strict=True)


async def order(ctx: WorkflowContext, item: str) -> str:
    @ctx.query
    def item_name() -> str:
        return item

    charge = await ctx.schedule("charge", item)
    ctx.compensate(ctx.schedule, "refund", charge)
    await ctx.schedule("ship", item)
    return "done"


async def other_type(ctx: WorkflowContext, item: int) -> str:
    return await order(ctx, str(item))


async def one_more(ctx: WorkflowContext, item: str, colour: str) -> str:
    return await order(ctx, item)


async def raises_first(ctx: WorkflowContext, item: str) -> str:
    raise ValueError("a typo in the new release")


async def raises_later(ctx: WorkflowContext, item: str) -> str:
    await ctx.schedule("charge", item)
    raise WorkflowFailed("nobody buys this any more")


async def raises_and_undoes(ctx: WorkflowContext, item: str) -> str:
    charge = await ctx.schedule("charge", item)
    ctx.compensate(ctx.schedule, "refund", charge)
    raise ValueError("a typo in the new release")


MISFITS = {
    other_type: "SignatureMismatch",
    one_more: "SignatureMismatch",
    raises_first: "RunEndMismatch",
    raises_later: "RunEndMismatch",
}


@pytest.mark.parametrize("code", MISFITS, ids=lambda code: code.__name__)
@pytest.mark.parametrize("how", ["an event", "a query"])
def test_mismatching_code_makes_a_run_stuck_until_the_right_code_returns(
    begin: Callable[..., World], code: Callable[..., Any], how: str
) -> None:
    world = begin(order, "tea")
    world.complete("charge-7")
    before = list(world.run.history)
    world.redeploy(code)
    if how == "a query":
        world.ask("item_name")
        assert world.run.history == before
    else:
        world.complete("parcel-1")
    assert world.run.stuck is not None
    assert world.run.stuck.kind == MISFITS[code]
    assert world.run.end is None
    with pytest.raises(DeterminismViolation):
        world.check()

    world.redeploy(order)
    world.check()
    world.leader.activate(world.run)
    assert world.run.stuck is None
    if how == "a query":
        world.complete("parcel-1")
    assert world.run.end is not None
    assert "refund" not in str(world.run.history)


def test_code_that_raises_during_replay_compensates_nothing(begin: Callable[..., World]) -> None:
    async def waits(ctx: WorkflowContext, item: str) -> None:
        charge = await ctx.schedule("charge", item)
        ctx.compensate(ctx.schedule, "refund", charge)
        await ctx.promise("approval")

    world = begin(waits, "tea")
    world.complete("charge-7")
    world.redeploy(raises_and_undoes)
    world.ask("item_name")
    assert not world.run.tasks
    assert world.run.stuck is not None
    assert world.run.stuck.kind == "RunEndMismatch"
    with pytest.raises(DeterminismViolation, match="a typo in the new release"):
        world.check()


def test_the_reason_of_a_stuck_run_names_the_error_and_its_place(begin: Callable[..., World]) -> None:
    world = begin(order, "tea")
    world.complete("charge-7")
    world.redeploy(raises_later)
    world.ask("item_name")
    stuck = world.run.stuck
    assert stuck is not None
    assert stuck.message.startswith("Run end mismatch (event 4): the history continues here, but the code raises")
    assert "WorkflowFailed: nobody buys this any more" in stuck.message
    assert "in raises_later" in stuck.difference


def test_an_error_after_the_end_of_the_history_fails_the_run(begin: Callable[..., World]) -> None:
    async def fails(ctx: WorkflowContext, item: str) -> None:
        await ctx.schedule("charge", item)
        await ctx.schedule("ship", item)
        raise WorkflowFailed("lost")

    world = begin(order, "tea")
    world.complete("charge-7")
    world.redeploy(fails)
    world.complete("parcel-1")
    assert world.run.stuck is None
    assert isinstance(world.run.history[-1].what, history.RunFailed)
    world.check()


async def undoes(ctx: WorkflowContext, item: str) -> None:
    ctx.compensate(ctx.schedule, "refund", 1)
    ctx.compensate(ctx.schedule, "refund", 2)
    await ctx.schedule("charge", item)
    raise WorkflowFailed("no")


def test_compensation_continues_after_a_replay(begin: Callable[..., World]) -> None:
    world = begin(undoes, "tea")
    world.complete("charge-7")
    assert [task.name for task in world.run.tasks.values()] == ["refund"]
    world.redeploy(undoes)
    world.check()
    world.complete(None)
    world.redeploy(undoes)
    world.complete(None)
    assert isinstance(world.run.history[-1].what, history.RunFailed)
    world.check()


def test_an_update_that_raises_only_on_replay_is_a_mismatch(begin: Callable[..., World]) -> None:
    def answering(answer: Callable[[], int]) -> Callable[..., Any]:
        async def asked(ctx: WorkflowContext) -> None:
            ctx.update("count")(answer)
            await ctx.promise("never")

        return asked

    def raises() -> int:
        raise ValueError("no more")

    world = begin(answering(lambda: 1))
    world.leader.append(world.run, history.UpdateRequested(b"u" * 16, "count", encoded(([], {}))))
    world.leader.activate(world.run)
    world.redeploy(answering(lambda: 2))
    world.check()
    world.redeploy(answering(raises))
    with pytest.raises(DeterminismViolation, match="answer mismatch.*ValueError: no more"):
        world.check()


def limited(most: int, *, answers: bool = True) -> Callable[..., Any]:
    """Return code whose validator rejects amounts above `most`, and whose handler answers at once or never."""

    async def account(ctx: WorkflowContext) -> None:
        total = 0

        def check(amount: int) -> None:
            if amount > most:
                raise ValueError(f"over {most}")

        @ctx.query
        def item_name() -> int:
            return total

        @ctx.update(validate=check)
        async def add(amount: int) -> int:
            nonlocal total
            total += amount
            if not answers:
                await ctx.promise("approval")
            return total

        await ctx.promise("never")

    return account


def add(world: World, amount: int) -> None:
    world.leader.append(world.run, history.UpdateRequested(b"u" * 16, "add", encoded(([amount], {}))))
    world.leader.activate(world.run)


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("amount", "answers", "total"), [(500, True, 0), (50, True, 50), (50, False, 50)], ids=["refused", "done", "open"]
)
@pytest.mark.parametrize("most", [10, 1_000])
def test_the_rejection_of_an_update_is_decided_once(
    begin: Callable[..., World], amount: int, answers: bool, total: int, most: int, as_json: bool
) -> None:
    world = begin(limited(100, answers=answers))
    add(world, amount)
    if as_json:
        world.run.history[:] = Recording.from_json(Recording(world.run.id, world.run.history).to_json()).events
    before = list(world.run.history)
    world.redeploy(limited(most, answers=answers))
    world.check()
    (answer,) = world.ask("item_name")
    assert answer.result == encoded(total)
    assert world.run.stuck is None
    assert world.run.history == before


def test_an_early_update_is_validated_when_its_handler_exists(begin: Callable[..., World]) -> None:
    async def waits(ctx: WorkflowContext) -> None:
        await ctx.promise("never")

    world = begin(waits)
    add(world, 500)
    world.redeploy(limited(100))
    (answer,) = world.ask("item_name")
    assert answer.result == encoded(0)
    assert "over 100" in str(world.run.answers)


def test_an_open_update_of_the_previous_release_is_validated_again(begin: Callable[..., World]) -> None:
    """That release's markers do not say which updates were accepted."""
    world = begin(limited(100, answers=False))
    add(world, 50)
    world.run.history[:] = [
        msgspec.structs.replace(event, what=history.ActivationApplied(event.what.through))
        if isinstance(event.what, history.ActivationApplied)
        else event
        for event in world.run.history
    ]
    world.redeploy(limited(100, answers=False))
    world.check()
    (answer,) = world.ask("item_name")
    assert answer.result == encoded(50)


async def steps(ctx: WorkflowContext, item: str) -> None:
    @ctx.update
    def add(amount: int) -> int:
        return amount

    await ctx.schedule("charge", item)
    ctx.set("charged", True)
    await ctx.schedule("ship", item)


async def no_steps(ctx: WorkflowContext, item: str) -> None:
    ctx.update("add")(lambda amount: amount)
    await ctx.promise("never")


async def no_state(ctx: WorkflowContext, item: str) -> None:
    ctx.update("add")(lambda amount: amount)
    await ctx.schedule("charge", item)
    await ctx.schedule("ship", item)


async def renamed(ctx: WorkflowContext, item: str) -> None:
    ctx.update("put")(lambda amount: amount)
    await ctx.schedule("charge", item)
    ctx.set("charged", True)
    await ctx.schedule("ship", item)


@pytest.mark.parametrize(
    ("code", "missing"),
    [
        (no_steps, r"at task 1 charge \(event 3\)"),
        (no_state, r"at state 1 set charged \("),
        (renamed, r"at an answer to an update \("),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_replay_check_finds_missing_commands(
    begin: Callable[..., World], code: Callable[..., Any], missing: str
) -> None:
    world = begin(steps, "tea")
    add(world, 1)
    world.complete("charge-7")
    world.redeploy(steps)
    world.check()
    world.redeploy(code)
    with pytest.raises(DeterminismViolation, match=f"Command missing {missing}"):
        world.check()


def test_arguments_of_the_wrong_type_are_rejected_when_a_run_starts() -> None:
    app = application(other_type)
    with pytest.raises(InvalidTask, match="Workflow 'order', argument 'item': expected int"):
        played(app.code_workflows["order"], "tea")

    @app.workflow(name="parent")
    async def parent(ctx: WorkflowContext) -> str:
        try:
            return str(await ctx.schedule("order", "tea"))
        except InvalidTask as error:
            await asyncio.sleep(1)
            return str(error)

    assert "argument 'item': expected int" in played(parent)


async def pays(ctx: WorkflowContext, item: str) -> str:
    @ctx.update
    async def pay(amount: int) -> str:
        async with asyncio.timeout(60):  # a timer that is cancelled in its first turn leaves no record
            pass
        return str(await ctx.schedule("charge", amount))

    await ctx.signals("end").get()
    return item


def pays_and(what: str) -> Callable[..., Any]:
    """Return code whose handler does one thing more, without waiting for it."""

    async def pays_and(ctx: WorkflowContext, item: str) -> str:
        @ctx.update
        async def pay(amount: int) -> str:
            async with asyncio.timeout(60):
                pass
            charging = ctx.schedule("charge", amount)
            if what == "before":
                ctx.schedule("ship", item)
            charge = str(await charging)
            await asyncio.create_task(act())
            return charge

        async def act() -> None:
            match what:
                case "task":
                    ctx.schedule("ship", item)
                case "operation":
                    await ctx.run("mail", lambda: RAN.append(item))
                case "state":
                    ctx.set("paid", item)
                case "patched" if ctx.patched("ship"):
                    ctx.schedule("ship", item)

        await ctx.signals("end").get()
        return item

    return pays_and


RAN: list[str] = []


def paid(begin: Callable[..., World]) -> World:
    world = begin(pays, "tea")
    request = history.UpdateRequested(derived_id(bytes(16), "pay"), "pay", encode_call("pay", [7], {}, LIMIT))
    world.leader.append(world.run, request)
    world.leader.activate(world.run)
    world.complete("charge-1")
    assert isinstance(world.run.history[-1].what, history.UpdateAnswered)
    world.run.applied = 0
    world.leader.append(world.run, history.SignalReceived("news", encoded(1)))
    return world


@pytest.mark.parametrize("what", ["before", "task", "operation", "state"])
def test_the_handler_of_an_update_that_was_answered_does_not_act_again(begin: Callable[..., World], what: str) -> None:
    RAN.clear()
    world = paid(begin)
    world.redeploy(pays_and(what))
    known = len(world.run.history)
    world.leader.activate(world.run)
    assert world.run.stuck is not None
    assert (world.run.stuck.kind, "update 'pay'" in world.run.stuck.message) == ("UpdateMismatch", True)
    assert (len(world.run.history), world.run.tasks, RAN) == (known, {}, []), "nothing was done"
    with pytest.raises(DeterminismViolation, match="update 'pay'"):
        world.check()
    world.redeploy(pays)
    world.leader.activate(world.run)
    assert world.run.stuck is None


def test_a_patched_handler_acts_only_for_later_updates(begin: Callable[..., World]) -> None:
    world = paid(begin)
    for code in (pays_and("patched"), pays_and("nothing")):
        world.redeploy(code)
        world.leader.activate(world.run)
        assert (world.run.stuck, world.run.tasks) == (None, {})
        world.run.applied = 0
        world.leader.append(world.run, history.SignalReceived("news", encoded(1)))
