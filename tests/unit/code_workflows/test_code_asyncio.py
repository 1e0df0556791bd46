"""Plain asyncio inside a workflow, on the deterministic event loop."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from orchestrator import NotDeterministic, Orchestrator, RunFailed, TaskFailed, WorkflowContext
from orchestrator.sdk.code import loop
from orchestrator.testing import After, TestedRun, WorkflowTest
from orchestrator.testing.workflows import Mocks
from tests.unit.code_workflows.playing import played, started

app = Orchestrator()


@app.task(name="work")
def work(label: str) -> str: ...


ECHO: Mocks = {work: lambda label: label}


def events(run: TestedRun[Any]) -> list[str]:
    return [type(event.what).__name__ for event in run.history.events]


@app.workflow(name="gathers")
async def gathers(ctx: WorkflowContext) -> list[str]:
    return await asyncio.gather(*(work.schedule(label) for label in "abc"))


def test_gather_schedules_all_at_once() -> None:
    async def look(run: TestedRun[Any], _: WorkflowTest) -> None:
        assert await run.result() == ["a", "b", "c"]
        assert events(run)[:5] == ["RunStarted", "ActivationApplied", *["TaskScheduled"] * 3]

    started(gathers, look, mocks=ECHO)


@app.workflow(name="first_of")
async def first_of(ctx: WorkflowContext) -> str:
    slow, quick = asyncio.create_task(asyncio.sleep(60, "slow")), asyncio.create_task(asyncio.sleep(5, "quick"))
    done, pending = await asyncio.wait({slow, quick}, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.wait(pending)
    return f"{[task.result() for task in done]} after {ctx.now() - ctx.info.started_at}, {slow.cancelled()}"


def test_wait_returns_the_first_of_several_tasks() -> None:
    assert played(first_of) == "['quick'] after 0:00:05, True"


@app.workflow(name="in_time")
async def in_time(ctx: WorkflowContext, seconds: float) -> str:
    try:
        return await asyncio.wait_for(work.schedule("slow"), seconds)
    except TimeoutError:
        return "too late"


def test_wait_for_cancels_the_task_that_was_too_slow() -> None:
    async def look(run: TestedRun[Any], test: WorkflowTest) -> None:
        assert await run.result() == "too late"
        assert [name for name in events(run) if "Cancel" in name or "Fired" in name] == [
            *("TimerFired", "TaskCancelRequested")
        ]

    started(in_time, look, 5, mocks={work: After(6, "late")})


def test_wait_for_cancels_its_timer_when_the_task_is_in_time() -> None:
    async def look(run: TestedRun[Any], _: WorkflowTest) -> None:
        assert await run.result() == "slow"
        assert [name for name in events(run) if "Timer" in name] == ["TimerStarted", "TimerCancelled"]

    started(in_time, look, 5, mocks=ECHO)


@app.workflow(name="no_wait")
async def no_wait(ctx: WorkflowContext) -> str:
    async with asyncio.timeout(5):
        return await ctx.run("instant", lambda: "now")


def test_a_timer_cancelled_in_the_turn_that_creates_it_is_never_started() -> None:
    async def look(run: TestedRun[Any], _: WorkflowTest) -> None:
        assert await run.result() == "now"
        assert not [name for name in events(run) if "Timer" in name]

    started(no_wait, look)


@app.workflow(name="times_out")
async def times_out(ctx: WorkflowContext) -> list[str]:
    seen = []
    try:
        async with asyncio.timeout(10):
            try:
                await asyncio.sleep(60)
            finally:
                seen.append("cleaned up")
    except TimeoutError:
        seen.append(str(ctx.now() - ctx.info.started_at))
    return seen


def test_a_timeout_cancels_the_block_and_raises() -> None:
    assert played(times_out) == ["cleaned up", "0:00:10"]


@app.workflow(name="grouped")
async def grouped(ctx: WorkflowContext) -> list[str]:
    seen = []

    async def one(label: str) -> None:
        try:
            seen.append(await work.schedule(label))
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append(f"{label} cancelled")
            raise

    try:
        async with asyncio.TaskGroup() as group:
            for label in ("a", "bad", "c"):
                group.create_task(one(label))
    except* TaskFailed as failed:
        seen.append(str(len(failed.exceptions)))
    return seen


def test_a_task_group_cancels_the_rest_when_one_fails() -> None:
    def mock(label: str) -> str:
        if label == "bad":
            raise ValueError("no")
        return label

    assert played(grouped, mocks={work: mock}) == ["a", "a cancelled", "c cancelled", "1"]


@app.workflow(name="completions")
async def completions(ctx: WorkflowContext) -> list[str]:
    async def later(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return str(seconds)

    return [await one for one in asyncio.as_completed([later(3), later(1), later(2)])]


def test_as_completed_yields_results_in_order_of_completion() -> None:
    assert played(completions) == ["1", "2", "3"]


@app.workflow(name="primitives")
async def primitives(ctx: WorkflowContext) -> list[str]:
    seen: list[str] = []
    lock, event, queue, slots = asyncio.Lock(), asyncio.Event(), asyncio.Queue[str](1), asyncio.Semaphore(2)

    async def producer() -> None:
        for label in "xyz":
            await queue.put(label)
        event.set()

    async def consumer(name: str) -> None:
        async with slots, lock:
            seen.append(f"{name}{await queue.get()}")
            await asyncio.sleep(1)

    await asyncio.gather(producer(), *(consumer(name) for name in "123"))
    await event.wait()
    return seen


def test_locks_events_queues_and_semaphores_work_in_a_workflow() -> None:
    assert played(primitives) == ["1x", "2y", "3z"]


@app.workflow(name="generates")
async def generates(ctx: WorkflowContext) -> list[str]:
    async def numbers() -> AsyncIterator[str]:
        for number in range(10):
            await asyncio.sleep(1)
            yield str(number)

    seen = []
    async for number in numbers():
        seen.append(number)
        if number == "2":
            break
    return seen


def test_asynchronous_generators_work_in_a_workflow() -> None:
    assert played(generates) == ["0", "1", "2"]


@app.workflow(name="shielded")
async def shielded(ctx: WorkflowContext) -> str:
    scheduled = work.schedule("kept")
    try:
        await asyncio.wait_for(asyncio.shield(scheduled), 0)
    except TimeoutError:
        return await scheduled
    return "?"


def test_shield_keeps_a_task_running_after_a_timeout() -> None:
    assert played(shielded, mocks=ECHO) == "kept"


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        ("to_thread", "Make it a task"),
        ("open_connection", "schedule that"),
        ("create_subprocess_exec", "schedule that"),
        ("spin", "never ends"),
    ],
)
def test_unsupported_asyncio_calls_name_an_alternative(
    call: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_MAX_IDLE_CALLBACKS", 1000)
    calls: dict[str, Any] = {
        "to_thread": lambda: asyncio.to_thread(print),
        "open_connection": lambda: asyncio.open_connection("localhost", 1),
        "create_subprocess_exec": lambda: asyncio.create_subprocess_exec("true"),
        "spin": spin,
    }
    app = Orchestrator()

    @app.workflow(name="forbidden")
    async def forbidden(ctx: WorkflowContext) -> None:
        await calls[call]()

    with pytest.raises(NotDeterministic, match=instead):
        played(forbidden)


async def spin() -> None:
    while True:
        await asyncio.sleep(0)


@app.workflow(name="forgets")
async def forgets(ctx: WorkflowContext) -> None:
    async def fail() -> None:
        raise ValueError("nobody looked")

    asyncio.create_task(fail())  # noqa: RUF006
    await asyncio.sleep(1)
    gc.collect()
    await asyncio.sleep(1)


def test_an_unretrieved_error_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        played(forgets)
    assert [record.message for record in caplog.records if "never retrieved" in record.message]


@app.workflow(name="exits")
async def exits(ctx: WorkflowContext) -> None:
    raise SystemExit("out")


def test_a_workflow_that_raises_system_exit_fails() -> None:
    with pytest.raises(RunFailed, match="SystemExit: out"):
        played(exits)


def test_a_future_created_without_the_loop_is_rejected() -> None:
    own = Orchestrator()

    @own.workflow(name="by_hand")
    async def by_hand(ctx: WorkflowContext) -> None:
        await asyncio.wait([asyncio.Future(), asyncio.Future()])

    async def look(run: TestedRun[Any], _: WorkflowTest) -> None:
        with pytest.raises(NotDeterministic, match="get_running_loop\\(\\).create_future"):
            await run.result()

    started(by_hand, look)


LABELS = "abcdefghijklmnopqrst"


async def branch(label: str) -> str:
    return await work.schedule(label)


@app.workflow(name="branches")
async def branches(ctx: WorkflowContext, way: str) -> list[str]:
    if way == "as completed":
        return [await one for one in asyncio.as_completed([branch(label) for label in LABELS])]
    done, _ = await asyncio.wait([asyncio.gather(work.schedule(label)) for label in LABELS])
    return [label for one in done for label in one.result()]


@pytest.mark.parametrize("way", ["wait for gathered", "as completed"])
def test_sets_that_asyncio_returns_have_the_order_of_creation(way: str) -> None:
    """By address, the order would differ between processes, and a replay would give results to other branches."""

    async def play() -> list[str]:
        gathering, here = asyncio.tasks._GatheringFuture, asyncio.get_running_loop()  # type: ignore[attr-defined]
        litter = [gathering([], loop=here) for _ in range(500)]
        coroutines = [branch("") for _ in range(500)]
        for some in (litter, coroutines):
            random.Random(1).shuffle(some)
        for coroutine in coroutines:
            coroutine.close()
        del litter[:400], coroutines[:400]  # so that the next objects of that size get addresses in random order
        async with WorkflowTest() as test:
            return await test.run(branches, way, mocks=ECHO)

    assert asyncio.run(play()) == list(LABELS)


def test_futures_outside_of_workflows_are_unchanged() -> None:
    async def outside() -> int:
        first, second = asyncio.gather(asyncio.sleep(0, 1)), asyncio.Future[int]()
        second.set_result(2)
        both: list[asyncio.Future[Any]] = [first, second]
        done, _ = await asyncio.wait(both)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return len({*done, first, second})

    assert asyncio.run(outside()) == 2
