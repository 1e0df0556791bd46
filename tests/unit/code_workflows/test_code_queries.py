"""Queries only read a workflow. Queries that change it are rejected and leave no trace."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from orchestrator import InvalidWorkflow, Orchestrator, OrchestratorError, UpdateRefused, WorkflowContext
from orchestrator.testing import After, TestedRun, WorkflowTest
from tests.unit.code_workflows.playing import started

app = Orchestrator()


@app.task(name="work")
def work(label: str) -> str: ...


class Inside:
    """The objects of a workflow that a query might change."""

    def __init__(self, ctx: WorkflowContext) -> None:
        self.ctx = ctx
        self.random = ctx.random
        self.event, self.waited_for, self.lock = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self.queue: asyncio.Queue[int] = asyncio.Queue()
        self.semaphore = asyncio.Semaphore(1)
        self.future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.scheduled = work.schedule("slow")
        self.sleeping = ctx.sleep(1000)
        self.gathered = asyncio.gather(work.schedule("gathered"))
        self.task = asyncio.create_task(asyncio.sleep(1000))
        self.timer = asyncio.get_running_loop().call_later(1000, self.event.set)
        self.waiter = asyncio.create_task(self.waited_for.wait())
        self.signals = ctx.signals("item", type=str)

    def seen(self) -> list[Any]:
        return [
            *(self.ctx.random.random(), self.ctx.random.gauss(0, 1), str(self.ctx.uuid()), self.ctx.get("key")),
            *(self.event.is_set(), self.lock.locked(), self.queue.qsize(), self.semaphore.locked()),
            *(self.future.done(), self.scheduled.cancelled(), self.sleeping.cancelled(), self.gathered.cancelled()),
            *(self.task.cancelling(), self.timer.cancelled(), self.waiter.done(), len(self.signals)),
            *(len(asyncio.all_tasks()), self.ctx.patched("late")),
        ]


def swallowed(inside: Inside) -> None:
    for act in (inside.event.set, inside.waited_for.set, inside.future.cancel, inside.ctx.uuid):
        try:
            act()
        except OrchestratorError:
            continue


NAUGHTY: dict[str, Callable[[Inside], Any]] = {
    "random": lambda inside: inside.ctx.random.random(),
    "kept random": lambda inside: inside.random.choice([1, 2, 3]),
    "gauss": lambda inside: inside.random.gauss(0, 1),
    "seed": lambda inside: inside.random.seed(1),
    "uuid": lambda inside: inside.ctx.uuid(),
    "event": lambda inside: inside.event.set(),
    "waited for": lambda inside: inside.waited_for.set(),
    "clear": lambda inside: inside.event.clear(),
    "lock": lambda inside: inside.lock.release(),
    "semaphore": lambda inside: inside.semaphore.release(),
    "put": lambda inside: inside.queue.put_nowait(1),
    "signals": lambda inside: inside.signals.get_nowait(),
    "set_result": lambda inside: inside.future.set_result(1),
    "set_exception": lambda inside: inside.future.set_exception(ValueError()),
    "callback": lambda inside: inside.future.add_done_callback(print),
    "cancel a future": lambda inside: inside.future.cancel(),
    "cancel a durable one": lambda inside: inside.scheduled.cancel(),
    "cancel a sleep": lambda inside: inside.sleeping.cancel(),
    "cancel gathered": lambda inside: inside.gathered.cancel(),
    "cancel a task": lambda inside: inside.task.cancel(),
    "cancel a timer": lambda inside: inside.timer.cancel(),
    "create a task": lambda _: asyncio.get_running_loop().create_task(asyncio.sleep(1)),
    "gather": lambda _: asyncio.gather(asyncio.sleep(1)),
    "create a future": lambda _: asyncio.get_running_loop().create_future(),
    "call_soon": lambda _: asyncio.get_running_loop().call_soon(print),
    "call_later": lambda _: asyncio.get_running_loop().call_later(0, print),
    "schedule": lambda _: work.schedule("more"),
    "sleep": lambda inside: inside.ctx.sleep(1),
    "promise": lambda inside: inside.ctx.promise("more"),
    "run": lambda inside: inside.ctx.run("more", int),
    "set": lambda inside: inside.ctx.set("key", 1),
    "patched": lambda inside: inside.ctx.patched("late"),
    "compensate": lambda inside: inside.ctx.compensate(work, "undone"),
    "register": lambda inside: inside.ctx.query(lambda: 1),
    "continue": lambda inside: inside.ctx.continue_as_new(),
    "caught": swallowed,
}


@app.workflow(name="watched")
async def watched(ctx: WorkflowContext) -> list[Any]:
    inside = Inside(ctx)
    ctx.random.gauss(0, 1)  # `gauss` keeps a second number for the next call

    @ctx.query
    def act(name: str) -> Any:
        NAUGHTY[name](inside)

    @ctx.query
    def leave() -> None:
        raise SystemExit(7)

    @ctx.query
    def look() -> list[Any]:
        return [inside.event.is_set(), len(ctx.signals("item")), len(ctx.signals("never")), ctx.get("key"), ctx.now()]

    await ctx.promise("go")
    await asyncio.sleep(1)
    return inside.seen()


async def finish_run(run: TestedRun[Any]) -> Any:
    await run.signal("item", "kept")
    await run.resolve("go")
    return await run.result()


def result_without_queries() -> Any:
    async def play(run: TestedRun[Any], _: WorkflowTest) -> Any:
        return await finish_run(run)

    return started(watched, play, mocks={work: After(500, "late")})


@pytest.mark.parametrize("name", NAUGHTY)
def test_a_query_that_changes_the_workflow_is_rejected_without_a_trace(name: str) -> None:
    async def play(run: TestedRun[Any], _: WorkflowTest) -> Any:
        if name == "signals":
            await run.signal("other")
        before = run.history
        for _time in range(2):
            with pytest.raises(
                OrchestratorError, match="query 'act' may read the workflow, but may not issue commands"
            ):
                await run.query("act", name)
        assert run.history == before
        assert (await run.query("look"))[:4] == [False, 0, 0, None]
        return await finish_run(run)

    assert started(watched, play, mocks={work: After(500, "late")}) == result_without_queries()


def test_a_query_that_raises_system_exit_is_answered() -> None:
    async def play(run: TestedRun[Any], _: WorkflowTest) -> Any:
        with pytest.raises(OrchestratorError, match="SystemExit: 7"):
            await run.query("leave")
        return await finish_run(run)

    assert started(watched, play, mocks={work: After(500, "late")}) == result_without_queries()


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit, BaseException])
def test_any_exception_of_a_validator_rejects_the_update(kind: type[BaseException]) -> None:
    own = Orchestrator()

    @own.workflow(name="exits")
    async def exits(ctx: WorkflowContext) -> str:
        def check() -> None:
            raise kind("bad")

        ctx.update("poke", validate=check)(lambda: None)
        await ctx.signals("end").get()
        return "went on"

    async def play(run: TestedRun[str], _: WorkflowTest) -> str:
        with pytest.raises(UpdateRefused, match=kind.__name__):
            await run.update("poke")
        await run.signal("end")
        return await run.result()

    assert started(exits, play) == "went on"


@pytest.mark.parametrize("name", ["async", "no argument", "awaitable"])
def test_invalid_validators_are_rejected(name: str) -> None:
    own = Orchestrator()

    async def never(number: int) -> None:
        raise ValueError("no")

    given: dict[str, Any] = {"async": never, "no argument": lambda: None, "awaitable": lambda number: never(number)}

    @own.workflow(name="hopes")
    async def hopes(ctx: WorkflowContext) -> str:
        try:
            ctx.update("poke", validate=given[name])(lambda number: number)
        except InvalidWorkflow as error:
            return str(error)
        await ctx.signals("end").get()
        return ""

    async def play(run: TestedRun[str], _: WorkflowTest) -> str:
        if name == "awaitable":
            with pytest.raises(UpdateRefused, match="must not be async") as raised:
                await run.update("poke", 1)
            return str(raised.value)
        return await run.result()

    assert "validator" in started(hopes, play)


def test_validators_cannot_change_the_workflow() -> None:
    own = Orchestrator()

    @own.workflow(name="validated")
    async def validated(ctx: WorkflowContext) -> bool:
        event = asyncio.Event()

        def validate() -> None:
            event.set()

        @ctx.update(validate=validate)
        def change() -> None: ...

        await ctx.promise("go")
        return event.is_set()

    async def play(run: TestedRun[Any], _: WorkflowTest) -> Any:
        with pytest.raises(OrchestratorError, match="validator of update 'change' may read the workflow"):
            await run.update("change")
        await run.resolve("go")
        return await run.result()

    assert started(validated, play) is False


def test_answers_of_the_wrong_type_are_errors_and_the_run_continues() -> None:
    app = Orchestrator()

    @app.workflow(name="typed-answers")
    async def typed(ctx: WorkflowContext) -> list[str]:
        seen: list[str] = []

        @ctx.query
        def number(fits: bool) -> int:
            return 7 if fits else "seven"  # type: ignore[return-value]

        @ctx.update
        async def add(text: str, fits: bool) -> int:
            seen.append(text)
            return len(seen) if fits else "many"  # type: ignore[return-value]

        @ctx.update
        def later(text: str) -> Awaitable[int]:
            return add(text, True)

        await ctx.signals("end").get()
        return seen

    async def play(run: TestedRun[Any], _: WorkflowTest) -> Any:
        assert await run.query("number", True) == 7
        with pytest.raises(
            OrchestratorError, match="result of query 'number' does not match its annotation: expected int"
        ):
            await run.query("number", False)
        assert await run.update("add", "a", True) == 1
        with pytest.raises(
            OrchestratorError, match="result of update 'add' does not match its annotation: expected int"
        ):
            await run.update("add", "b", False)
        assert await run.update("later", "c") == 3
        await run.signal("end")
        return await run.result()  # also replays the run

    assert started(typed, play) == ["a", "b", "c"]
