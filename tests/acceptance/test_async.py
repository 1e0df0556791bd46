"""A program on an event loop: every call that waits for Postgres or for an end, without blocking the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import project
import pytest

from orchestrator import Handle, NotFound, ResultTimeout, RunFailed, TaskCancelled, TaskFailed, agather, as_completed
from tests.acceptance.conftest import fresh_stack
from tests.acceptance.stack import Stack
from tests.acceptance.ways import Way, both_ways, take  # noqa: F401

T = TypeVar("T")


@pytest.fixture(scope="module")
def running(way: Way, database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with fresh_stack(database_url, redis_url, tmp_path_factory.mktemp("stack")) as stack:
        stack.scheduler()
        stack.worker()
        take(way, stack, project.app)
        yield stack


@asynccontextmanager
async def free_loop() -> AsyncIterator[None]:
    """Fail if the event loop stood still for long while a thread beside it went on: a machine may stop both."""
    turns, longest, is_over = 0, 0, threading.Event()

    def turn() -> None:
        nonlocal turns
        while not is_over.wait(0.01):
            turns += 1

    async def beat() -> None:
        nonlocal longest
        while True:
            before = turns
            await asyncio.sleep(0.01)
            longest = max(longest, turns - before)

    beside = threading.Thread(target=turn)
    beside.start()
    beating = asyncio.create_task(beat())
    await asyncio.sleep(0)  # it begins
    try:
        yield
    finally:
        await asyncio.sleep(0.02)  # after its next beat, which says how long the last one took
        beating.cancel()
        is_over.set()
        beside.join()
    assert longest < 100, f"the event loop was blocked for {longest / 100:g} s"


def on_a_loop(main: Callable[[], Awaitable[T]]) -> T:
    async def watched() -> T:
        async with free_loop():
            return await main()

    return asyncio.run(watched())


def test_tasks(running: Stack, tmp_path: Path) -> None:
    async def main() -> None:
        handles = await project.app.aenqueue_many(project.add, [(number, 1) for number in range(300)])
        assert await agather(handles, 60) == [number + 1 for number in range(300)]
        assert {handle async for handle in as_completed(handles, 60)} == set(handles)
        assert await (await project.add.adelay(1, 2)).aresult(60) == 3
        assert await (await project.app.aenqueue("project.add", 1, b=2)).aresult(60) == 3

        waits = await project.held.aenqueue(str(tmp_path / "started"), str(tmp_path / "go"))
        with pytest.raises(ResultTimeout):
            await waits.aresult(0.2)
        with pytest.raises(ResultTimeout, match="1 tasks had not ended after"):
            await agather([*handles, waits], 0.2)
        assert await waits.astatus() in ("pending", "dispatched", "running")
        await waits.acancel()
        with pytest.raises(TaskCancelled):
            await waits.aresult(60)

        fails = await project.broken.aenqueue("no")
        first, second = await agather([fails, handles[0]], 60, return_exceptions=True)
        assert (type(first), second) == (TaskFailed, 1)
        with pytest.raises(TaskFailed):
            await agather([fails, handles[0]], 60)
        await fails.aretry()
        with pytest.raises(NotFound):
            await project.app.handle("0" * 32).astatus()
        child = await (await project.parent_by_context.aenqueue()).aresult(60)
        assert await project.app.handle(child).aresult(60) == 3
        nobody: list[Handle[int]] = []
        assert await agather(nobody) == [one async for one in as_completed(nobody)] == []

    on_a_loop(main)


def test_many_who_wait_hold_no_threads(running: Stack, tmp_path: Path) -> None:
    async def main() -> None:
        held = [await project.held.aenqueue(str(tmp_path / "started"), str(tmp_path / "go")) for _ in range(3)]
        waiting = [asyncio.create_task(handle.aresult(60)) for handle in held for _ in range(300)]
        assert await (await project.add.aenqueue(1, 2)).astatus()
        assert sum(thread.name.startswith("orchestrator-client") for thread in threading.enumerate()) <= 16
        (tmp_path / "go").touch()
        assert len(set(await asyncio.gather(*waiting))) == 1

    on_a_loop(main)


def test_runs_and_queues(running: Stack) -> None:
    async def main() -> None:
        run = await project.app.astart_many(project.add, [(number, 1) for number in range(500)])
        assert await run.await_ended(60) == "success"
        assert await run.aresults() == [one async for one in run.aiter_results()] == list(range(1, 501))
        assert (await run.aprogress()).fraction == 1.0
        assert await run.aoutputs() == {}
        failed = await project.app.astart_many(project.broken, ["a"])
        with pytest.raises(RunFailed, match="ended as failed"):
            await failed.aresults(60)
        with pytest.raises(RunFailed, match="ended as failed"):
            await anext(failed.aiter_results(60))

        queue = project.app.queue("elsewhere")
        await queue.apause()
        waits = await project.noop.options(queue="elsewhere").aenqueue()
        assert await queue.aopen() == 1
        with pytest.raises(ResultTimeout, match="still holds 1 tasks"):
            await queue.adrain(0.1)
        await queue.apurge()
        await queue.adrain(60)
        await queue.aresume()
        with pytest.raises(TaskCancelled):
            await waits.aresult(60)

    on_a_loop(main)


def test_workflows_and_schedules(running: Stack, tmp_path: Path) -> None:
    file = tmp_path / "sums.yaml"
    file.write_text("name: sums\nschedule: {cron: 30 2 * * *}\ntasks: {sum: {task: project.add, input: {a: 1, b: 2}}}")

    async def main() -> None:
        assert await project.app.workflows.aapply(file) == 1
        assert "sums" in await project.app.workflows.anames()
        assert "sums" in project.app.workflows
        assert "products" not in project.app.workflows
        assert (await project.app.workflows["sums"].adefinition()).name == "sums"
        run = await project.app.workflows["sums"].astart()
        assert await run.aoutputs(60) == {"sum": 3}
        assert await (await run.arerun()).await_ended(60) == "success"

        nightly = project.app.schedules["sums"]
        assert await project.app.schedules.anames() == ["sums/default"]
        assert "sums" in project.app.schedules
        assert "products" not in project.app.schedules
        assert len(await nightly.anext(3)) == 3
        await nightly.apause()
        assert (await nightly.astatus()).paused
        await nightly.aresume()
        assert await (await nightly.atrigger()).await_ended(60) == "success"
        backfill = await nightly.abackfill("2026-01-01", "2026-01-04")
        assert (await backfill.await_ended(60)).done == (await backfill.aprogress()).total == 3
        await nightly.adelete()

    on_a_loop(main)


def test_runs_of_code(running: Stack) -> None:
    async def main() -> None:
        basket = await project.basket.starting(id="basket-1", on_conflict="return").astart()
        await basket.asignal("add", "apple")
        assert await basket.aquery("items", timeout=60) == ["apple"]
        assert await basket.aupdate("rename", 0, "pear", timeout=60) == "apple"
        assert await basket.astatus() == "running"
        assert len((await basket.ahistory()).events) > 1
        await basket.aterminate()
        with pytest.raises(RunFailed):
            await basket.aresult(60)

        approval, refusal = await project.approval.astart(60), await project.approval.astart(60)
        await asyncio.gather(approval.aresolve("approval", "yes"), refusal.areject("approval", "no"))
        assert await approval.aresult(60) == "yes"
        assert "rejected: " in await refusal.aresult(60)
        both = await project.both.astart(1, 2)
        assert await both.aresult(60) == [2, 3]
        assert await (await both.areset(to=1, reason="again")).aresult(60) == [2, 3]

    on_a_loop(main)
