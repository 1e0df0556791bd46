"""Workflows as classes: an instance for each run, with typed handlers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orchestrator import (
    HandlerFailed,
    InvalidArguments,
    InvalidWorkflow,
    Orchestrator,
    OrchestratorError,
    RunFailed,
    UpdateRefused,
    WorkflowContext,
    workflow,
)
from orchestrator.domain.code.history import Event, RunCompleted, RunStarted
from orchestrator.sdk.code.recording import Recording
from orchestrator.testing import TestedRun, WorkflowTest, replay
from orchestrator.testing.workflows import Mocks
from tests.unit.code_workflows.playing import played, started

app = Orchestrator(database_url="postgresql://nobody@nowhere.invalid/none")


@dataclass
class Item:
    name: str
    price: float


@app.task(name="ship")
def ship(item: Item) -> str: ...


@app.workflow(name="order", version=2)
@dataclass
class Order:
    """An order of a customer."""

    ctx: WorkflowContext
    items: list[Item] = field(default_factory=list)
    paid: float = 0

    @workflow.run
    async def run(self, owner: str) -> list[str]:
        self.ctx.set("owner", owner)
        await self.ctx.wait_condition(lambda: self.items and self.paid >= self.total())
        await self.ctx.wait_condition(lambda: self.ctx.all_handlers_finished)
        return [await ship.schedule(item) for item in self.items]

    @workflow.signal
    def pay(self, amount: float) -> None:
        self.paid += amount

    @workflow.query
    def total(self) -> float:
        return sum(item.price for item in self.items)

    @workflow.query
    def dearest(self) -> Item:
        return max(self.items, key=lambda item: item.price)

    @workflow.update
    async def add(self, item: Item) -> float:
        await self.ctx.sleep(0)
        self.items.append(item)
        return self.total()

    @add.validator
    def check(self, item: Item) -> None:
        if item.price > 100:
            raise ValueError("too expensive")

    @workflow.update
    def remove(self, name: str) -> Item:
        (found,) = (item for item in self.items if item.name == name)
        self.items.remove(found)
        return found


MOCKS: Mocks = {ship: lambda item: f"parcel with {item.name}"}


def test_handlers_return_values_of_the_annotated_types() -> None:
    async def play(run: TestedRun[list[str]], test: WorkflowTest) -> list[str]:
        assert await run.update(Order.add, Item("tea", 3)) == 3
        assert await run.update("add", Item("milk", 1)) == 4
        assert await run.query(Order.dearest) == Item("tea", 3)
        assert await run.query("dearest") == {"name": "tea", "price": 3}
        assert await run.update(Order.remove, name="milk") == Item("milk", 1)
        with pytest.raises(UpdateRefused, match="too expensive"):
            await run.update(Order.add, Item("gold", 1000))
        with pytest.raises(HandlerFailed, match="ValueError"):
            await run.update(Order.remove, "gold")
        with pytest.raises(InvalidArguments):
            await run.update(Order.add, "tea")  # type: ignore[call-overload]
        with pytest.raises(InvalidArguments, match="Nothing was sent"):
            await run.signal(Order.pay, "much")  # type: ignore[call-overload]
        await run.signal(Order.pay, 2)
        await run.signal("pay", 1)
        return await run.result()

    assert started(Order.run, play, "Ann", mocks=MOCKS) == ["parcel with tea"]


def test_each_run_and_each_replay_has_its_own_instance() -> None:
    async def play(run: TestedRun[list[str]], test: WorkflowTest) -> Any:
        other = await test.start(Order.run, "Bob", mocks=MOCKS)
        await run.update(Order.add, Item("tea", 3))
        assert await other.query(Order.total) == 0
        await run.signal(Order.pay, 3)
        await run.result()
        return run.history

    replay(Order.run, started(Order.run, play, "Ann", mocks=MOCKS), exactly=True)


def test_a_class_is_registered_like_a_function() -> None:
    assert app.code_workflows["order"] is Order.run
    assert (Order.run.name, Order.run.version) == ("order", 2)

    @app.workflow
    class Parent:
        def __init__(self, ctx: WorkflowContext) -> None: ...

        @workflow.run
        async def main(self, count: int) -> int:
            return count + 1

    assert Parent.main.name.endswith("Parent")
    assert played(Parent.main, 1) == 2

    @app.workflow(name="child")
    class Child(Parent):
        @workflow.query
        def more(self) -> int:
            return 1

    assert played(Child.main, 2) == 3
    assert (Parent.main.name, Child.main.name) == (app.code_workflows[Parent.main.name].name, "child")

    class NotRegistered(Parent): ...

    with pytest.raises(AttributeError, match=r"put @app\.workflow above it"):
        _ = NotRegistered.main


def test_invalid_workflow_classes_are_rejected() -> None:
    class NoRun:
        def __init__(self, ctx: WorkflowContext) -> None: ...

    class NoContext:
        @workflow.run
        async def run(self) -> None: ...

    class NotAsync:
        def __init__(self, ctx: WorkflowContext) -> None: ...

        @workflow.run  # type: ignore[arg-type]
        def run(self) -> None: ...

    class TwoValues:
        def __init__(self, ctx: WorkflowContext) -> None: ...

        @workflow.run
        async def run(self) -> None: ...

        @workflow.signal
        def move(self, x: int, y: int) -> None: ...

    class MaybeTwoValues:
        def __init__(self, ctx: WorkflowContext) -> None: ...

        @workflow.run
        async def run(self) -> None: ...

        @workflow.signal
        def move(self, x: int, y: int = 2) -> None: ...

    class AsyncQuery:
        def __init__(self, ctx: WorkflowContext) -> None: ...

        @workflow.run
        async def run(self) -> None: ...

        @workflow.query
        async def total(self) -> int:
            return 1

    class AsyncValidator:
        def __init__(self, ctx: WorkflowContext) -> None: ...

        @workflow.run
        async def run(self) -> None: ...

        @workflow.update
        def add(self, number: int) -> int:
            return number

        @add.validator  # type: ignore[arg-type]
        async def check(self, number: int) -> None: ...

    class OtherValidator:
        def __init__(self, ctx: WorkflowContext) -> None: ...

        @workflow.run
        async def run(self) -> None: ...

        @workflow.update
        def add(self, number: int, by: int = 1) -> int:
            return number + by

        @add.validator  # type: ignore[arg-type]
        def check(self, number: int) -> None: ...

    for kind, says in (
        (TwoValues, "Signal 'move': .* A signal carries one value or none"),
        (
            MaybeTwoValues,
            r"Signal 'move': expected one parameter or none, found \(self, x.* A signal carries one value",
        ),
        (AsyncQuery, "Query 'total': .* not async"),
        (AsyncValidator, "Update 'add', its validator 'check': .* not async"),
        (OtherValidator, r"its validator 'check': .* expected \(self, number: .*, by: .*\).*, found \(self, number"),
        (NoRun, "expected one @workflow.run method, found none"),
        (NoContext, "with its context as the one argument"),
        (NotAsync, "expected an `async def` function"),
    ):
        with pytest.raises(InvalidWorkflow, match=says):
            app.workflow(kind)
    with pytest.raises(InvalidWorkflow, match="Version 2 of workflow .* is registered twice"):

        @app.workflow(name="order", version=2)
        class Other:
            def __init__(self, ctx: WorkflowContext) -> None: ...

            @workflow.run
            async def run(self) -> None: ...


def test_invalid_handler_decorators_are_rejected() -> None:
    with pytest.raises(InvalidWorkflow, match="@workflow.signal: expected a method, found 'pay'. .* without brackets"):
        workflow.signal("pay")  # type: ignore[arg-type]
    with pytest.raises(InvalidWorkflow, match="@workflow.query: the class has a signal 'pay' already"):

        class Twice:
            @workflow.signal
            def pay(self) -> None: ...

            @workflow.query  # type: ignore[no-redef]
            def pay(self) -> int:  # noqa: F811
                return 1


def test_a_class_is_replayed_and_scheduled_by_its_name(tmp_path: Path) -> None:
    async def play(run: TestedRun[list[str]], test: WorkflowTest) -> Any:
        await run.update(Order.add, Item("tea", 3))
        await run.signal(Order.pay, 3)
        await run.result()
        return run.history

    file = tmp_path / "history.json"
    file.write_text(started(Order.run, play, "Ann", mocks=MOCKS).to_json())
    assert replay(Order, str(file)) == replay(Order.run, file) != []
    with pytest.raises(InvalidWorkflow, match="expected JSON or the path of a file .* No such file"):
        replay(Order, "missing.json")
    with pytest.raises(InvalidWorkflow, match="replay: expected a workflow or a class below @app.workflow"):
        replay(Item, file)

    app.schedule(every="1h", params={"owner": "Ann"})(Order)
    (declared,) = app.schedules._declared.values()
    assert declared.target.name == "order"


@app.workflow
@dataclass
class Stubborn:
    ctx: WorkflowContext

    @workflow.run
    async def run(self, stops: bool = False) -> str:
        try:
            await self.ctx.wait_condition(lambda: stops)
        except asyncio.CancelledError:
            await self.ctx.sleep(3)
        return "done"

    @workflow.signal
    def fails(self) -> None:
        raise RuntimeError("broken")

    @workflow.update
    async def restart(self) -> None:
        self.ctx.continue_as_new(True)


def test_a_failed_signal_handler_fails_even_a_run_that_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def play(run: TestedRun[str], test: WorkflowTest) -> None:
        await run.signal(Stubborn.fails)
        with pytest.raises(RunFailed, match="RuntimeError: broken"):
            await run.result()

    started(Stubborn.run, play)
    assert "the handler of signal 'fails' failed, and so does the run" in caplog.text


def test_an_update_handler_continues_as_new_even_if_the_code_goes_on() -> None:
    async def play(run: TestedRun[str], test: WorkflowTest) -> Any:
        await run.update(Stubborn.restart)
        assert await run.result() == "done"
        return run.history

    events = started(Stubborn.run, play).events
    assert isinstance(events[0].what, RunStarted)
    assert events[0].what.continued_from is not None


def test_an_older_run_that_completed_after_a_failed_handler_replays() -> None:
    async def play(run: TestedRun[str], test: WorkflowTest) -> Any:
        await run.signal(Stubborn.fails)
        with pytest.raises(RunFailed):
            await run.result()
        return run.history

    recording = started(Stubborn.run, play)
    *others, last = recording.events
    completed = Event(last.number, last.at, RunCompleted(msgspec.msgpack.encode("done")))
    replay(Stubborn, Recording(recording.run_id, [*others, completed]))


def test_errors_name_the_called_handler_once() -> None:
    app = Orchestrator(database_url="postgresql://nobody@nowhere.invalid/none")

    @app.workflow(name="fast")
    class Fast:
        def __init__(self, ctx: WorkflowContext) -> None:
            self.ctx = ctx

        @workflow.run
        async def run(self, seconds: float = 1) -> None:
            await self.ctx.sleep(seconds)

        @workflow.query
        def ask(self, number: int) -> int:
            return number

        @workflow.update
        def act(self, number: int) -> int:
            return number

        @workflow.signal
        def tell(self, number: int) -> None: ...

    async def play() -> list[str]:
        said = []
        async with WorkflowTest() as test:
            run = await test.start(Fast.run)
            for call in (
                lambda: test.start(Fast.run, object()),
                lambda: run.query(Fast.ask, object()),  # type: ignore[call-overload]
                lambda: run.update(Fast.act, object()),  # type: ignore[call-overload]
                lambda: run.signal(Fast.tell, object()),  # type: ignore[call-overload]
                lambda: run.query("ask"),
                lambda: run.update("act"),
                lambda: run.update("akt"),
                lambda: run.update(Fast.ask),  # type: ignore[call-overload]
            ):
                with pytest.raises(OrchestratorError) as raised:
                    await call()
                said.append(str(raised.value).partition(" cannot be serialised")[0])
        return said

    assert asyncio.run(play()) == [
        "Argument 1 of workflow 'fast'",
        "Argument 1 of query 'ask'",
        "Argument 1 of update 'act'",
        "Argument 1 of signal 'tell'",
        "Query 'ask': missing a required argument: 'number'. Expected ask(number: 'int').",
        "Update 'act': missing a required argument: 'number'. Expected act(number: 'int').",
        "The workflow answers no update 'akt'. Did you mean 'act'? It answers: act.",
        "Expected an update given by its name or its method, found <query "
        "test_errors_name_the_called_handler_once.<locals>.Fast.ask>. Nothing was sent.",
    ]
