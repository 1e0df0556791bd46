"""Request slots: how many of a caller's requests run at once, and what happens when a client disconnects."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from orchestrator import time_limits
from orchestrator.api.access import Caller
from orchestrator.api.slots import Client, Slots
from orchestrator.sdk.acting import Actor

ADA, BOB = (Caller(Actor(name, "127.0.0.1"), key=name) for name in ("ada", "bob"))


class Work:
    """Calls that hold their threads until the test releases them."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.most = 0
        self.may_end = threading.Event()

    def call(self, name: str) -> Callable[[], str]:
        def work() -> str:
            self.running.append(name)
            self.may_end.wait(30)
            return name

        return work


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():
            await asyncio.sleep(0.001)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def test_expensive_requests_block_neither_cheap_requests_nor_other_callers() -> None:
    async def main() -> None:
        slots, work = Slots(), Work()
        held = [asyncio.create_task(slots.run(work.call("ada's expensive"), ADA, is_expensive=True)) for _ in range(40)]
        held += [asyncio.create_task(slots.run(work.call("ada's cheap"), ADA)) for _ in range(40)]
        await until(lambda: len(work.running) == 14)
        assert (work.running.count("ada's expensive"), work.running.count("ada's cheap")) == (2, 12)
        assert await slots.run(lambda: "at once", BOB, is_expensive=True) == "at once"
        assert await slots.run(lambda: "at once", BOB) == "at once"
        assert await slots.run_lookup(lambda: "at once") == "at once"
        work.may_end.set()
        await asyncio.gather(*held)
        assert len(work.running) == 80
        assert not slots._cheap._callers
        assert not slots._expensive._callers

    run(main())


def client(disconnected: asyncio.Event) -> Client:
    async def receive() -> dict[str, Any]:
        await disconnected.wait()
        return {"type": "http.disconnect"}

    return Client(Request({"type": "http"}, receive))


def test_a_waiting_request_is_dropped_when_its_client_disconnects() -> None:
    async def main() -> None:
        slots, work, disconnected = Slots(), Work(), asyncio.Event()
        held = [asyncio.create_task(slots.run(work.call("held"), ADA, is_expensive=True)) for _ in range(2)]
        await until(lambda: len(work.running) == 2)
        with client(disconnected) as gone:
            waiting = asyncio.create_task(slots.run(work.call("dropped"), ADA, gone, is_expensive=True))
            await asyncio.sleep(0)
            disconnected.set()
            with pytest.raises(ClientDisconnect):
                await waiting
        later = asyncio.create_task(slots.run(work.call("later"), ADA, is_expensive=True))
        work.may_end.set()
        await asyncio.gather(*held, later)
        assert work.running == ["held", "held", "later"]

    run(main())


def test_an_expensive_request_stops_when_its_client_disconnects() -> None:
    async def main() -> None:
        slots, disconnected, seen, may_look = Slots(), asyncio.Event(), [], threading.Event()

        def work() -> None:
            seen.append(time_limits.is_over())
            may_look.wait(30)
            seen.append(time_limits.is_over())

        with client(disconnected) as gone:
            running = asyncio.create_task(slots.run(work, ADA, gone, is_expensive=True))
            await until(lambda: bool(seen))
            disconnected.set()
            await gone.gone
            await asyncio.sleep(0)
            may_look.set()
            await running
        assert seen == [False, True]

    run(main())


def test_a_cancelled_request_releases_its_slot() -> None:
    async def main() -> None:
        slots, work = Slots(), Work()
        held = [asyncio.create_task(slots.run(work.call("held"), ADA, is_expensive=True)) for _ in range(2)]
        await until(lambda: len(work.running) == 2)
        waiting = [asyncio.create_task(slots.run(work.call("never"), ADA, is_expensive=True)) for _ in range(3)]
        await asyncio.sleep(0)
        for one in waiting[:2]:
            one.cancel()
        work.may_end.set()
        await asyncio.gather(*held, *waiting, return_exceptions=True)
        assert await slots.run(lambda: "free", ADA, is_expensive=True) == "free"
        assert slots._expensive._total.is_idle
        assert work.running == ["held", "held", "never"]

    run(main())
