"""Blocking calls and their async variants, from one source."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from orchestrator import NotDeterministic, NotFound, Orchestrator, Settings, WorkflowContext, agather, as_completed
from orchestrator.domain.code import history
from orchestrator.sdk.client import Client
from orchestrator.sdk.waiting.async_variants import async_variant, blocking
from orchestrator.sdk.waiting.steps import Pause, Steps, Stream, complete, iterate
from orchestrator.sdk.waiting.threads import Threads
from orchestrator.testing import WorkflowTest


class Door:
    """Blocking methods and their async variants."""

    def __init__(self) -> None:
        self._client = Client(Settings(), {}, {})
        self.bell = Pause(60)
        self.seen: list[str] = []
        self.threads: set[str] = set()

    def knock(self, times: int = 1) -> str:
        self.threads.add(threading.current_thread().name)
        return "knock" * times

    aknock = async_variant(knock)

    @blocking
    def wait(self, value: int = 1) -> Steps[int]:
        self.threads.add(threading.current_thread().name)
        try:
            yield self.bell
            return value
        finally:
            self.seen.append("closed")

    await_ = async_variant(wait)

    def each(self, count: int) -> Iterator[int]:
        return iterate(self._each(count))

    def _each(self, count: int) -> Stream[int]:
        try:
            for number in range(count):
                if number % 150 == 0:
                    yield Pause(0)
                yield number
        finally:
            self.seen.append("closed")

    def aeach(self, count: int) -> AsyncIterator[int]:
        return self._client.threads.iterate(self._each(count))


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door()
    yield made
    made._client.close()


def test_blocking_calls_and_async_variants_do_the_same(door: Door) -> None:
    async def main() -> list[int]:
        assert await door.aknock(times=2) == "knockknock"
        asyncio.get_running_loop().call_later(0.01, door.bell.ring)
        assert await door.await_(5) == 5
        return [number async for number in door.aeach(1000)]

    assert asyncio.run(main()) == list(door.each(1000)) == list(range(1000))
    assert {name.rsplit("_", 1)[0] for name in door.threads} == {"orchestrator-client"}
    threading.Timer(0.01, door.bell.ring).start()
    assert door.wait(6) == 6
    door.bell.ring()  # before any call waits
    assert door.wait(7) == 7


@pytest.mark.slow
def test_waiting_calls_hold_no_threads() -> None:
    threads = Threads()
    bells = [Pause(60) for _ in range(5_000)]

    def steps(bell: Pause) -> Steps[Pause]:
        yield bell
        return bell

    async def main() -> None:
        waiting = [asyncio.create_task(threads.complete(steps(bell))) for bell in bells]
        assert await threads.run(lambda: "somebody else") == "somebody else"
        assert sum(thread.name.startswith("orchestrator-client") for thread in threading.enumerate()) <= 16
        for bell in bells:
            bell.ring()
        assert await asyncio.gather(*waiting) == bells

    asyncio.run(main())
    threads.close()


def test_a_cancelled_wait_is_cleaned_up_at_any_step(door: Door) -> None:
    started, go_on = threading.Event(), threading.Event()

    def slow() -> Steps[None]:
        try:
            started.set()
            go_on.wait(60)
            yield Pause(60)
        finally:
            door.seen.append("slow closed")

    async def main() -> None:
        pausing = asyncio.create_task(door.await_())
        stepping = asyncio.create_task(door._client.threads.complete(slow()))
        await asyncio.to_thread(started.wait, 60)
        while not door.threads:
            await asyncio.sleep(0.001)
        for task in (pausing, stepping):
            task.cancel()
        await asyncio.wait([pausing, stepping])
        go_on.set()
        async for number in door.aeach(10_000):
            if number == 3:
                break
        deadline = time.monotonic() + 60
        while len(door.seen) < 3 and time.monotonic() < deadline:
            await asyncio.sleep(0.001)

    asyncio.run(main())
    assert sorted(door.seen) == ["closed", "closed", "slow closed"]


def test_exceptions_reach_the_caller(door: Door) -> None:
    def fails() -> Steps[None]:
        yield Pause(0)
        raise LookupError("nothing")

    with pytest.raises(LookupError, match="nothing"):
        complete(fails())
    with pytest.raises(LookupError, match="nothing"):
        asyncio.run(door._client.threads.complete(fails()))
    with pytest.raises(TypeError, match="unexpected keyword argument 'tims'"):
        asyncio.run(door.aknock(tims=2))  # type: ignore[call-arg]


def test_async_variants_in_a_workflow_behave_like_their_methods() -> None:
    app = Orchestrator(Settings())

    @app.workflow
    async def asks(ctx: WorkflowContext) -> list[str]:
        found = []
        one, run = app.handle("0" * 32), app.run("0" * 32)
        calls = (one.aresult(), app.workflow_run("0" * 32).astatus(), app.queue("q").apause(), agather([one]))
        for call in (*calls, anext(run.aiter_results()), anext(aiter(as_completed([one])))):
            with pytest.raises(NotDeterministic) as refused:
                await call
            found.append(str(refused.value))
        with pytest.raises(NotFound):
            await app.workflow_run("0" * 32).asignal("hello", 1)
        return found

    async def main() -> None:
        async with WorkflowTest() as test:
            run = await test.start(asks)
            assert all("cannot call the orchestrator directly" in text for text in await run.result())
            assert sum(isinstance(event.what, history.SignalSent) for event in run.history.events) == 1

    asyncio.run(main())


def test_an_application_closes_at_the_end_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Client] = []
    monkeypatch.setattr(Client, "close", lambda self: closed.append(self))
    with Orchestrator(Settings()) as app:
        assert closed == []
    assert closed == [app._client]

    async def main() -> Orchestrator:
        async with Orchestrator(Settings()) as other:
            assert len(closed) == 1
        return other

    assert asyncio.run(main())._client is closed[1]


def test_many_calls_share_few_threads_and_end_independently() -> None:
    door = Door()

    def knock(number: int) -> int:
        door.threads.add(threading.current_thread().name)
        if number % 100 == 7:
            raise KeyError(number)
        if number == 50:
            raise StopIteration
        return number

    async def main() -> list[int | BaseException]:
        calls = (door._client.threads.run(knock, number) for number in range(1_000))
        return await asyncio.gather(*calls, return_exceptions=True)

    for _ in range(3):
        found = asyncio.run(main())
        assert [one for one in found if isinstance(one, int)] == [n for n in range(1_000) if n % 100 != 7 and n != 50]
        assert isinstance(found[107], KeyError)
        assert isinstance(found[50], RuntimeError)
    assert len(door.threads) <= 16


def test_a_call_that_is_cancelled_while_queued_is_not_made() -> None:
    threads = Threads()
    go_on = threading.Event()
    made: list[int] = []

    async def main() -> None:
        stuck = [asyncio.create_task(threads.run(go_on.wait, 60)) for _ in range(16)]
        late = [asyncio.create_task(threads.run(made.append, number)) for number in range(4)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        late[1].cancel()
        go_on.set()
        await asyncio.gather(*stuck, *late, return_exceptions=True)

    asyncio.run(main())
    assert sorted(made) == [0, 2, 3]


def test_closed_event_loops_are_forgotten() -> None:
    threads = Threads()
    for _ in range(5):
        asyncio.run(threads.run(int))
    assert len(threads._thread_pool._values()) == 1
