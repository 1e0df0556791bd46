"""The operations of the workflow context."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from orchestrator import (
    DeterminismViolation,
    HandlerFailed,
    InvalidArguments,
    InvalidTask,
    InvalidWorkflow,
    NotDeterministic,
    OperationFailed,
    Orchestrator,
    OrchestratorError,
    PayloadError,
    PromiseRejected,
    RunFailed,
    Settings,
    TaskFailed,
    UnknownHandler,
    UnknownTask,
    UpdateRefused,
    WorkflowContext,
    WorkflowFailed,
    WrongState,
)
from orchestrator.domain.code import commands, history
from orchestrator.domain.code.commands import OnCancel
from orchestrator.testing import After, Recording, TestedRun, WorkflowTest, replay
from tests.unit.code_workflows.playing import played, started

app = Orchestrator()


@dataclass
class Item:
    name: str
    price: float


@app.task(name="price")
def price(item: Item) -> float: ...


@app.task(name="undo")
def undo(label: str) -> None: ...


# -- tasks


@app.workflow(name="typed")
async def typed(ctx: WorkflowContext, item: Item) -> Item:
    return Item(
        item.name, await price.schedule(item) + await ctx.schedule(price, item) + await ctx.schedule("price", item)
    )


def test_arguments_and_results_are_typed() -> None:
    assert played(typed, Item("tea", 2), mocks={price: lambda item: item.price * 2}) == Item("tea", 12)


@app.workflow(name="catches")
async def catches(ctx: WorkflowContext) -> str:
    try:
        await price.schedule(Item("tea", 2))
    except TaskFailed as error:
        return f"{error.kind}: {error}"
    return "?"


def test_a_failed_task_raises_task_failed() -> None:
    assert played(catches, mocks={price: ValueError("sold out")}).startswith(
        "ValueError: Task 'price' failed: ValueError"
    )


@pytest.mark.parametrize(
    ("decorator", "call", "queue", "retries"),
    [
        ({}, {}, "orders", 3),
        ({"retries": 0, "queue": "default"}, {}, "default", 0),
        ({}, {"retries": 5, "queue": "other"}, "other", 5),
    ],
)
def test_a_task_inherits_queue_and_retries_unless_overridden(
    decorator: dict[str, Any], call: dict[str, Any], queue: str, retries: int
) -> None:
    app = Orchestrator()
    task = app.task(name="task", **decorator)(lambda: None)

    @app.workflow(name="options", queue="orders")
    async def options(ctx: WorkflowContext) -> None:
        await task.options(**call).schedule()

    async def look(run: TestedRun[Any], _: WorkflowTest) -> None:
        await run.result()
        (command, _end) = replay(options, run.history)
        assert isinstance(command, commands.ScheduleTask)
        assert command.task.queue == queue
        assert f'"max":{retries}' in (command.task.options or '"max":0')

    started(options, look, mocks={"task": None})


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (lambda: price(Item("tea", 1)), "called like a function inside a workflow"),
        (lambda: price.enqueue(Item("tea", 1)), "enqueued inside a workflow"),
        (lambda: typed(Item("tea", 1)), "called like a function"),
        (lambda: typed.start(Item("tea", 1)), r"was started inside a workflow.* Use `await .*\.schedule"),
        (lambda: typed.starting(id="mine").start(Item("tea", 1)), "was started inside a workflow"),
    ],
)
def test_direct_calls_inside_a_workflow_are_rejected_with_advice(code: Any, error: str) -> None:
    app = Orchestrator()

    @app.workflow(name="calls")
    async def calls(ctx: WorkflowContext) -> None:
        code()

    with pytest.raises(NotDeterministic, match=error):
        played(calls)


def test_scheduling_outside_of_a_workflow_is_rejected() -> None:
    with pytest.raises(OrchestratorError, match="Use enqueue"):
        price.schedule(Item("tea", 1))
    with pytest.raises(OrchestratorError, match="inside a workflow only"):
        typed.schedule(Item("tea", 1))


@app.workflow(name="clumsy")
async def clumsy(ctx: WorkflowContext, what: str) -> None:
    match what:
        case "unknown":
            await ctx.schedule("prize", 1)
        case "arguments":
            await price.schedule()  # type: ignore[call-arg]
        case "unserialisable":
            await price.schedule(object())  # type: ignore[arg-type]
        case "result":
            return object()  # type: ignore[return-value]
        case "operation":
            await ctx.run("a \ud800", lambda: None)
        case "sleep":
            await ctx.sleep(1, name="a \ud800")
        case "patch":
            ctx.patched("a \ud800")


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("unknown", f"{UnknownTask.__name__}: No task and no workflow is called 'prize'. Did you mean 'price'?"),
        ("arguments", f"{InvalidTask.__name__}: Task 'price': missing a required argument: 'item'"),
        ("unserialisable", f"{PayloadError.__name__}: Argument 1 of task 'price' cannot be serialised"),
        ("result", f"{PayloadError.__name__}: The result of workflow 'clumsy' cannot be serialised"),
        (
            "operation",
            r"The name of ctx.run: expected a text, without NUL or halves of surrogate pairs; found 'a \ud800'",
        ),
        ("sleep", "The name of ctx.sleep: expected a text"),
        ("patch", "The name of ctx.patched: expected a text"),
    ],
)
def test_invalid_input_fails_the_run_and_issues_no_command(what: str, error: str) -> None:
    async def look(run: TestedRun[Any], _: WorkflowTest) -> None:
        with pytest.raises(RunFailed) as failed:
            await run.result()
        assert error in str(failed.value)
        assert [type(event.what) for event in run.history.events[2:]] == [history.RunFailed]

    started(clumsy, look, what)


def test_invalid_arguments_are_rejected_at_the_start() -> None:
    with pytest.raises(InvalidTask, match="Workflow 'typed': missing a required argument"):
        played(typed)
    with pytest.raises(InvalidTask, match="Workflow 'typed', argument 'item': expected Item"):
        played(typed, 7)


# -- promises


@app.workflow(name="approval")
async def approval(ctx: WorkflowContext) -> str:
    try:
        item = await ctx.promise("approval", type=Item, timeout=timedelta(hours=1))
    except TimeoutError:
        return f"late at {ctx.now():%H:%M}"
    except PromiseRejected as error:
        return str(error)
    return item.name


def test_a_promise_is_resolved_from_outside() -> None:
    async def resolve(run: TestedRun[Any], _: WorkflowTest) -> str:
        await run.resolve("approval", Item("tea", 1))
        with pytest.raises(WrongState):
            await run.resolve("approval", Item("milk", 1))
        result: str = await run.result()
        return result

    assert started(approval, resolve) == "tea"


def test_a_promise_is_rejected_or_times_out() -> None:
    async def reject(run: TestedRun[Any], _: WorkflowTest) -> str:
        await run.reject("approval", "not today")
        result: str = await run.result()
        return result

    assert started(approval, reject) == "Promise 'approval' was rejected: not today"
    assert played(approval) == "late at 01:00"


def test_a_promise_that_times_out_is_cancelled() -> None:
    async def wait(run: TestedRun[Any], test: WorkflowTest) -> None:
        await test.skip(minutes=59)
        assert run.history.events[-1].what != history.RunCompleted
        await test.skip(minutes=2)
        assert [type(event.what) for event in run.history.events[-2:]] == [
            history.PromiseCancelled,
            history.RunCompleted,
        ]

    started(approval, wait)


@app.workflow(name="awaits_count")
async def awaits_count(ctx: WorkflowContext) -> int:
    await ctx.sleep(60)
    return await ctx.promise("count", type=int)


def test_an_early_promise_value_of_the_wrong_type_raises_in_the_workflow() -> None:
    async def resolve(run: TestedRun[Any], _: WorkflowTest) -> None:
        await run.resolve("count", "yes")
        with pytest.raises(RunFailed, match="Promise 'count' returned a value that does not match its type"):
            await run.result()

    started(awaits_count, resolve)


# -- signals, queries, updates


@app.workflow(name="basket")
async def basket(ctx: WorkflowContext) -> list[str]:
    names: list[str] = []

    @ctx.query
    def size() -> int:
        return len(names)

    @ctx.query("item")
    def nth(place: int) -> str:
        return names[place]

    @ctx.query
    def naughty() -> None:
        price.schedule(Item("tea", 1))

    @ctx.query
    def clock() -> float:
        return time.time()

    def is_cheap(item: Item) -> None:
        if item.price > 10:
            raise ValueError("too dear")

    @ctx.update(validate=is_cheap)
    async def add(item: Item) -> float:
        names.append(item.name)
        return await price.schedule(item)

    @ctx.update("drop")
    def remove() -> str:
        return names.pop()

    async for item in ctx.signals("item", type=Item):
        if item.name == "end":
            return names
        names.append(item.name)
    return []


def test_signals_come_in_order() -> None:
    async def fill(run: TestedRun[Any], _: WorkflowTest) -> list[str]:
        for name in ("tea", "milk", "end"):
            await run.signal("item", Item(name, 1))
        result: list[str] = await run.result()
        with pytest.raises(WrongState, match="has ended"):
            await run.signal("item", Item("late", 1))
        return result

    assert started(basket, fill) == ["tea", "milk"]


def test_queries_read_the_workflow_without_changing_it() -> None:
    async def ask(run: TestedRun[Any], _: WorkflowTest) -> None:
        await run.signal("item", Item("tea", 1))
        before = run.history
        assert await run.query("size") == 1
        assert await run.query("item", 0) == "tea"
        with pytest.raises(HandlerFailed, match="IndexError"):
            await run.query("item", 1)
        with pytest.raises(OrchestratorError, match="may read the workflow, but may not issue commands"):
            await run.query("naughty")
        with pytest.raises(OrchestratorError, match="time.time"):
            await run.query("clock")
        with pytest.raises(UnknownHandler, match="answers no query 'sise'. Did you mean 'size'?"):
            await run.query("sise")
        with pytest.raises(InvalidArguments, match="argument 'place': expected int"):
            await run.query("item", "x")
        assert run.history == before
        await run.signal("item", Item("end", 1))
        assert await run.result() == ["tea"]

    started(basket, ask)


def test_updates_are_validated_and_answered() -> None:
    async def change(run: TestedRun[Any], _: WorkflowTest) -> None:
        assert await run.update("add", Item("tea", 1)) == 4.5
        assert await run.query("size") == 1
        with pytest.raises(UpdateRefused, match="too dear"):
            await run.update("add", Item("gold", 11))
        assert await run.update("drop") == "tea"
        with pytest.raises(HandlerFailed, match="IndexError: pop from empty list"):
            await run.update("drop")
        with pytest.raises(OrchestratorError, match="answers no update 'ad'. Did you mean 'add'"):
            await run.update("ad")
        await run.signal("item", Item("end", 1))
        assert await run.result() == []

    started(basket, change, mocks={price: 4.5})


# -- child workflows


@app.workflow(name="leaf")
async def leaf(ctx: WorkflowContext, seconds: float) -> str:
    if seconds < 0:
        raise WorkflowFailed("cannot wait that long")
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        await asyncio.sleep(10)
        raise
    return f"{seconds:g} s for {ctx.info.parent_id}"


@app.workflow(name="parent")
async def parent(ctx: WorkflowContext, how: str) -> str:
    match how:
        case "await":
            return await leaf.schedule(5)
        case "by name":
            result: str = await ctx.schedule("leaf", 5)
            return result
        case "fail":
            try:
                await leaf.schedule(-1)
            except RunFailed as error:
                return str(error)
        case "detach":
            leaf.options(detached=True).schedule(1000)
        case "leave":
            leaf.schedule(1000)
            await asyncio.sleep(1)
        case _:
            child = leaf.options(on_cancel=cast("OnCancel", how), name="short-lived").schedule(1000)
            try:
                await asyncio.wait_for(child, 5)
            except TimeoutError:
                return str((ctx.now() - ctx.info.started_at).seconds)
    return "?"


def test_a_child_can_be_awaited_directly_and_by_name() -> None:
    async def look(run: TestedRun[Any], test: WorkflowTest) -> None:
        assert (
            await run.result() == f"5 s for {next(iter(map(str, [__import__('uuid').UUID(bytes=run.history.run_id)])))}"
        )

    for how in ("await", "by name"):
        started(parent, look, how)


def test_a_failed_child_raises_run_failed() -> None:
    assert "Workflow 'leaf' failed: orchestrator.errors.WorkflowFailed: cannot wait" in played(parent, "fail")


@pytest.mark.parametrize(("how", "seconds"), [("cancel", "5"), ("wait", "15"), ("abandon", "5")])
def test_cancelling_a_child_follows_its_on_cancel_option(how: str, seconds: str) -> None:
    async def look(run: TestedRun[Any], test: WorkflowTest) -> None:
        assert await run.result() == seconds
        asked = any(isinstance(event.what, history.ChildCancelRequested) for event in run.history.events)
        assert asked is (how != "abandon")

    started(parent, look, how)


@app.workflow(name="turns-away")
async def turns_away(ctx: WorkflowContext, detached: bool) -> None:
    child = leaf.options(on_cancel="abandon", detached=detached).schedule(1000)
    child.cancel()
    await asyncio.sleep(10)


@pytest.mark.parametrize("detached", [False, True])
def test_an_abandoned_child_ends_with_its_parent_unless_detached(detached: bool) -> None:
    async def look(run: TestedRun[Any], test: WorkflowTest) -> None:
        _, child = test.leader.runs.values()
        assert child.end is None
        await run.cancel()
        with pytest.raises(RunFailed, match="was cancelled"):
            await run.result()
        assert any(isinstance(event.what, history.RunCancelRequested) for event in child.history) is not detached

    started(turns_away, look, detached)


def test_the_workflow_test_limits_the_depth_of_child_runs() -> None:
    shallow = Orchestrator(Settings(max_depth=2))

    @shallow.workflow(name="deeper")
    async def deeper(ctx: WorkflowContext, depth: int = 0) -> str:
        try:
            return str(await deeper.schedule(depth + 1))
        except RunFailed as error:
            return f"{depth}: {error}"

    assert played(deeper).startswith("2: Workflow 'deeper' failed: InvalidWorkflow: A run of workflow 'deeper' would")


@pytest.mark.parametrize(("how", "cancelled"), [("detach", False), ("leave", True)])
def test_a_child_ends_with_its_parent_unless_it_is_detached(how: str, cancelled: bool) -> None:
    async def look(run: TestedRun[Any], test: WorkflowTest) -> None:
        await run.result()
        _, child = test.leader.runs.values()
        assert any(isinstance(event.what, history.RunCancelRequested) for event in child.history) is cancelled

    started(parent, look, how)


def test_a_child_can_be_mocked() -> None:
    assert played(parent, "await", mocks={leaf: lambda seconds: f"{seconds} mocked"}) == "5.0 mocked"
    assert "cannot" in played(parent, "fail", mocks={leaf: ValueError("cannot")})
    assert played(parent, "wait", mocks={leaf: After(100, "late")}) == "5"
    assert played(parent, "await", mocks={leaf: After(100, "late")}) == "late"


# -- values that replay repeats


def test_operations_run_once_and_are_recorded() -> None:
    app = Orchestrator()
    calls: list[str] = []

    def look() -> Item:
        calls.append("look")
        return Item("tea", 1)

    async def look_slowly() -> int:
        await asyncio.sleep(0.001)
        calls.append("slowly")
        return 3

    def fail() -> None:
        calls.append("fail")
        raise ValueError("dark")

    @app.workflow(name="operates")
    async def operates(ctx: WorkflowContext) -> list[Any]:
        item = await ctx.run("look", look)
        again = await ctx.run("again", lambda: {"name": "x", "price": 2}, type=Item)
        await asyncio.sleep(1)
        number = await ctx.run("slowly", look_slowly)
        try:
            await ctx.run("fail", fail)
        except OperationFailed as error:
            return [item, again, number, error.kind, str(error)]
        return []

    async def play(run: TestedRun[Any], _: WorkflowTest) -> None:
        expected = [{"name": "tea", "price": 1.0}, {"name": "x", "price": 2.0}, 3]
        assert await run.result() == [*expected, "ValueError", "Operation 'fail' failed: ValueError: dark"]
        await asyncio.to_thread(replay, operates, run.history)

    started(operates, play)
    assert calls == ["look", "slowly", "fail"]


def test_operations_are_retried_and_time_out() -> None:
    calls: list[str] = []

    def third() -> str:
        calls.append("third")
        if calls.count("third") < 3:
            raise OSError("away")
        return "here"

    async def never() -> None:
        calls.append("never")
        await asyncio.sleep(60)

    held = threading.Event()

    @app.workflow(name="tries")
    async def tries(ctx: WorkflowContext) -> list[str]:
        found = [await ctx.run("third", third, retries=2, timeout=60)]
        for name, function in (("never", never), ("held", held.wait)):
            try:
                await ctx.run(name, function, retries=1, timeout=timedelta(milliseconds=50))
            except OperationFailed as error:
                found.append(str(error))
        return found

    async def play(run: TestedRun[Any], _: WorkflowTest) -> None:
        late = [f"Operation '{name}' failed: TimeoutError: It took longer than 0.05 s." for name in ("never", "held")]
        assert await run.result() == ["here", *late]
        await asyncio.to_thread(replay, tries, run.history)

    started(tries, play)
    held.set()
    assert calls == [*["third"] * 3, *["never"] * 2]


def test_a_run_should_continue_as_new_once_its_history_is_old() -> None:
    @app.workflow(name="ages")
    async def ages(ctx: WorkflowContext) -> list[bool]:
        found = []
        for length in (timedelta(), timedelta(days=29), timedelta(hours=12)):
            await ctx.sleep(length, hours=12 if length.seconds else 0)
            found.append(ctx.should_continue_as_new)
        return found

    async def play(run: TestedRun[Any], _: WorkflowTest) -> None:
        assert await run.result() == [False, False, True]

    started(ages, play)


@app.workflow(name="chances")
async def chances(ctx: WorkflowContext) -> list[str]:
    first = [str(ctx.uuid()), str(ctx.random.random()), ctx.now().isoformat()]
    await ctx.sleep(hours=1, minutes=30, name="nap")
    return [*first, str(ctx.uuid()), str(ctx.random.random()), ctx.now().isoformat()]


def test_clock_random_and_uuids_repeat_on_replay_but_differ_by_run() -> None:
    async def play(run: TestedRun[Any], test: WorkflowTest) -> None:
        first = await run.result()
        assert len(set(first)) == 6
        assert first[2].endswith("T00:00:00+00:00")
        assert first[5].endswith("T01:30:00+00:00")
        second = await test.run(chances)
        assert not {*first[:2], *first[3:5]} & set(second)

    started(chances, play)


@app.workflow(name="keeps")
async def keeps(ctx: WorkflowContext) -> list[Any]:
    ctx.set("stage", {"name": "begun"})
    ctx.set("item", Item("tea", 1))
    ctx.set("gone", 1)
    ctx.clear("gone")
    ctx.get("stage")["name"] = "changed"  # `ctx.get` returns a copy
    return [ctx.get("stage"), ctx.get("item", type=Item).name, ctx.get("gone", "default"), ctx.get("never")]


def test_workflow_state_is_visible_from_outside() -> None:
    async def look(run: TestedRun[Any], _: WorkflowTest) -> None:
        assert await run.result() == [{"name": "begun"}, "tea", "default", None]
        assert run.state == {"stage": {"name": "begun"}, "item": {"name": "tea", "price": 1.0}}

    started(keeps, look)


def test_replay_writes_no_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    app = Orchestrator()

    @app.workflow(name="talks")
    async def talks(ctx: WorkflowContext) -> None:
        ctx.logger.info("before %s", "sleep")
        await asyncio.sleep(1)
        ctx.logger.warning("after")

    async def play(run: TestedRun[Any], _: WorkflowTest) -> None:
        await run.result()
        await asyncio.to_thread(replay, talks, run.history)

    with caplog.at_level(logging.INFO):
        started(talks, play)
    assert [record.message for record in caplog.records if "workflow.talks" in record.name] == ["before sleep", "after"]
    assert caplog.records[0].run_id  # type: ignore[attr-defined]


def test_info_describes_the_run() -> None:
    app = Orchestrator()

    @app.workflow(name="knows", version=3, queue="slow")
    async def knows(ctx: WorkflowContext) -> list[Any]:
        info = ctx.info
        return [info.workflow, info.version, info.queue, info.started_at, info.history_length, info.continue_suggested]

    assert played(knows) == ["knows", 3, "slow", datetime(2026, 1, 1, tzinfo=UTC), 1, False]


def test_continue_as_new_is_suggested_after_large_results() -> None:
    """A replay suggests it at the same place."""
    app = Orchestrator()
    part = app.task(name="part")(lambda number: number)

    @app.workflow(name="collects")
    async def collects(ctx: WorkflowContext) -> list[bool]:
        suggested = []
        for number in range(25):
            await part.schedule(number)
            suggested.append(ctx.info.continue_suggested)
        return suggested

    assert played(collects, mocks={part: "x" * 900_000}) == [False] * 22 + [True] * 3


# -- ends of a run


@app.workflow(name="counts")
async def counts(ctx: WorkflowContext, so_far: int) -> int:
    got: int = await ctx.signals("number", type=int).get()
    if so_far + got < 10:
        ctx.continue_as_new(so_far + got)
    return so_far + got


def test_continue_as_new_hands_over_unread_signals() -> None:
    async def play(run: TestedRun[Any], test: WorkflowTest) -> None:
        for number in (1, 2, 3, 4):
            test.leader.append(next(iter(test.leader.runs.values())), history.SignalReceived("number", bytes([number])))
        await test.settle()
        assert await run.result() == 10
        assert len(test.leader.runs) == 4

    started(counts, play, 0)


def test_a_saga_is_compensated_in_reverse_order(caplog: pytest.LogCaptureFixture) -> None:
    app = Orchestrator()
    undone: list[str] = []
    undo = app.task(name="undo")(lambda _: None)

    @app.workflow(name="saga")
    async def saga(ctx: WorkflowContext, fails: bool) -> str:
        ctx.compensate(undo, "hotel")
        ctx.compensate(undo, "flight")
        ctx.compensate(lambda: undone.append("note"))
        await asyncio.sleep(10)
        if fails:
            raise WorkflowFailed("no seats")
        return "booked"

    def mock(label: str) -> None:
        undone.append(label)
        if label == "flight":
            raise ValueError("the airline does not answer")

    assert played(saga, False, mocks={undo: mock}) == "booked"
    assert undone == []
    with pytest.raises(RunFailed, match="no seats"):
        played(saga, True, mocks={undo: mock})
    assert [one for one in undone if one != "note"] == ["flight", "hotel"]
    assert [record.message for record in caplog.records if "compensation 'undo' failed" in record.message]
    undone.clear()

    async def cancel(run: TestedRun[Any], _: WorkflowTest) -> None:
        await run.cancel("changed my mind")
        with pytest.raises(RunFailed, match="was cancelled"):
            await run.result()

    started(saga, cancel, True, mocks={undo: mock})
    assert [one for one in undone if one != "note"] == ["flight", "hotel"]


@app.workflow(name="stays")
async def stays(ctx: WorkflowContext) -> str:
    try:
        await asyncio.sleep(1000)
    except asyncio.CancelledError:
        await undo.schedule("cleaned up")
        return "finished anyway"
    return "?"


def test_a_shielded_step_ends_before_its_undo_runs() -> None:
    app = Orchestrator()
    done: list[str] = []
    charge, refund = app.task(name="charge")(lambda: None), app.task(name="refund")(lambda: None)

    @app.workflow(name="saga")
    async def saga(ctx: WorkflowContext) -> None:
        ctx.compensate(refund)
        charging = charge.schedule()
        try:
            await asyncio.shield(charging)
        except asyncio.CancelledError:
            await asyncio.wait([charging])
            done.append("charged" if charging.done() else "open")
            raise

    async def cancel(run: TestedRun[Any], _: WorkflowTest) -> None:
        await run.cancel("changed my mind")
        with pytest.raises(RunFailed, match="was cancelled"):
            await run.result()

    started(saga, cancel, mocks={charge: After(60, None), refund: lambda: done.append("refunded")})
    assert done[:2] == ["charged", "refunded"], "and then the test replays the code"


def test_the_arguments_of_an_undo_are_those_of_its_registration() -> None:
    app = Orchestrator()
    refunded: list[Item] = []

    @app.task
    def refund(item: Item) -> None: ...

    @app.workflow(name="undone")
    async def undone(ctx: WorkflowContext, item: Item) -> None:
        refunded.append(item)

    @app.workflow(name="saga")
    async def saga(ctx: WorkflowContext) -> None:
        item = Item("tea", 9)
        ctx.compensate(refund, item)
        ctx.compensate(undone, item)
        item.price = 4
        for undo in (refund, undone):
            with pytest.raises(InvalidTask, match="missing a required argument: 'item'"):
                ctx.compensate(undo)
            with pytest.raises(PayloadError, match="cannot be serialised"):
                ctx.compensate(undo, object())
        raise WorkflowFailed("no stock")

    with pytest.raises(RunFailed, match="no stock"):
        played(saga, mocks={refund: refunded.append})
    assert refunded == [Item("tea", 9), Item("tea", 9)]


def test_a_cancelled_workflow_may_still_complete() -> None:
    async def cancel(run: TestedRun[Any], _: WorkflowTest) -> None:
        await run.cancel()
        assert await run.result() == "finished anyway"

    started(stays, cancel, mocks={undo: None})


# -- changing code under running workflows


def version(app: Orchestrator, number: int) -> Any:
    """Return the workflow before, during or after a patch: 1, 2 or 3."""
    old, new = app.task(name="old")(lambda: None), app.task(name="new")(lambda: None)

    async def code(ctx: WorkflowContext) -> list[str]:
        seen: list[Any] = []
        for _ in range(2):
            if number == 2 and ctx.patched("better"):
                seen.append(await new.schedule())
            else:
                seen.append(await (new if number == 3 else old).schedule())
            await asyncio.sleep(1)
        return seen

    return app.workflow(name="changing")(code)


def recorded(workflow: Any, seconds: float) -> Recording:
    async def play(run: TestedRun[Any], test: WorkflowTest) -> Recording:
        await test.skip(seconds)
        return run.history

    return started(workflow, play, mocks={"old": "old", "new": "new"})


def test_patched_keeps_open_runs_on_the_old_branch() -> None:
    halfway = recorded(version(Orchestrator(), 1), 0.5)
    replay(version(Orchestrator(), 2), halfway)
    with pytest.raises(DeterminismViolation, match="Task type mismatch at task 1 .*'old'.*'new'"):
        replay(version(Orchestrator(), 3), halfway)


def test_patched_takes_the_new_branch_in_new_runs_and_on_their_replay() -> None:
    changed = version(Orchestrator(), 2)
    whole = recorded(changed, 10)
    assert [event.what.name for event in whole.events if isinstance(event.what, history.PatchRecorded)] == ["better"]
    assert (
        sum(isinstance(event.what, history.TaskScheduled) and event.what.name == "new" for event in whole.events) == 2
    )
    replay(changed, whole)


# -- registration


def test_invalid_workflow_declarations_are_rejected() -> None:
    app = Orchestrator()
    with pytest.raises(InvalidWorkflow, match="expected an `async def` function"):
        plain: Any = lambda _: None  # noqa: E731
        app.workflow(name="plain")(plain)
    with pytest.raises(InvalidWorkflow, match="its first parameter is its context"):

        async def lonely() -> None: ...

        without_context: Any = lonely
        app.workflow(name="lonely")(without_context)

    with pytest.raises(InvalidWorkflow, match="version: expected a whole number from 1, found 0"):

        @app.workflow(name="zeroth", version=0)
        async def zeroth(ctx: WorkflowContext) -> None: ...

    with pytest.raises(InvalidWorkflow, match="Unknown workflow option 'timeot'. Did you mean 'timeout'"):
        misspelt: Any = {"timeot": 3}
        app.workflow(name="late", **misspelt)
    with pytest.raises(InvalidWorkflow, match="Option timeout: expected a number of seconds.*found 'long'"):
        no_time: Any = "long"
        app.workflow(name="late", timeout=no_time)
    with pytest.raises(InvalidWorkflow, match="Option on_cancel: expected one of cancel, wait, abandon"):
        no_way: Any = "kill"
        leaf.options(on_cancel=no_way)
    with pytest.raises(InvalidTask, match="A workflow name has 1 to 128"):
        app.workflow(name="a b")(leaf.function)
    assert not app.code_workflows


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e12])
def test_a_timer_of_invalid_length_is_rejected(seconds: float) -> None:
    with pytest.raises(RunFailed, match="A timer waits a hundred years at most|Invalid delay: NaN"):
        played(leaf, seconds)


def test_several_versions_of_a_workflow_coexist() -> None:
    app = Orchestrator()

    async def first(ctx: WorkflowContext) -> None: ...

    async def second(ctx: WorkflowContext) -> None: ...

    one = app.workflow(name="flow", version=1)(first)
    two = app.workflow(name="flow", version=2)(second)
    assert app.code_workflows["flow"] is two
    assert app.code_workflows.find("flow", 1) is one
    assert app.code_workflows.find("flow", 7) is two
    with pytest.raises(InvalidWorkflow, match="Version 1 of workflow .* is registered twice"):
        app.workflow(name="flow", version=1)(second)
    with pytest.raises(OrchestratorError, match="No workflow is registered as 'flaw'. Did you mean 'flow'"):
        app.code_workflows.find("flaw")


def test_the_clock_of_a_test_can_be_set() -> None:
    async def play() -> None:
        async with WorkflowTest(datetime(2030, 5, 1, tzinfo=UTC)) as test:
            run = await test.start(approval)
            await test.skip(minutes=30)
            assert test.now == datetime(2030, 5, 1, 0, 30, tzinfo=UTC)
            assert await run.result() == "late at 01:00"

    asyncio.run(play())


def test_a_workflow_test_reports_a_wait_for_an_external_event() -> None:
    app = Orchestrator()

    @app.workflow(name="lonely")
    async def lonely(ctx: WorkflowContext) -> None:
        await ctx.promise("company")

    with pytest.raises(OrchestratorError, match=r"waits for something outside.*company"):
        played(lonely)


def test_a_task_without_a_mock_is_named() -> None:
    with pytest.raises(RunFailed, match="Task 'price' has no mock"):
        played(typed, Item("tea", 1))


def test_a_mock_can_take_time() -> None:
    assert played(catches, mocks={price: After(3600, ValueError("late"))}).startswith("ValueError")
