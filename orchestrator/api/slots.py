"""Request slots: how many requests are performed at once and wait, and how a call that waits is performed in steps.

A caller has slots of its own within those of the server, and expensive requests have others than cheap ones. So neither
another caller nor one's own expensive requests keep a cheap one waiting. Looking up keys takes none of these slots.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
from anyio import CapacityLimiter
from starlette.requests import ClientDisconnect, Request

from orchestrator.api.access import Caller
from orchestrator.api.problems import Refused, refused
from orchestrator.errors import OrchestratorError, ResultTimeout
from orchestrator.sdk.waiting.steps import Pause, Steps
from orchestrator.time_limits import TimeLimit

_LONGEST_WAIT = 300.0
"""Seconds that a request may wait for an answer of a run or a task."""
_MOST_WAITING = 1_000
"""Requests that may wait for a slot."""
_LOOK_UPS = 2
"""Keys that are looked up at the same time."""


class Client:
    """The client of a request that has been read, watched for disconnecting once that matters."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._gone: asyncio.Task[None] | None = None

    @property
    def gone(self) -> asyncio.Task[None]:
        if self._gone is None:
            self._gone = asyncio.create_task(self._hang_up())
        return self._gone

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        if self._gone is not None:
            self._gone.cancel()

    async def _hang_up(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass


class _Limit:
    """So many at the same time; others wait, first come, first served."""

    def __init__(self, most: int) -> None:
        self._free = self._most = most
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def is_idle(self) -> bool:
        return self._free == self._most

    async def acquire(self, client: Client | None) -> None:
        """Wait until there is room, unless the client disconnects before."""
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            await asyncio.wait((turn,) if client is None else (turn, client.gone), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if not turn.cancel():
                self.release()
            raise
        if turn.cancel():
            raise ClientDisconnect

    def release(self) -> None:
        """Give it to the next one that still waits."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class _Kind:
    """Slots of one kind."""

    def __init__(self, total: int, per_caller: int) -> None:
        self._total = _Limit(total)
        self._per_caller = per_caller
        self._callers: dict[str, _Limit] = {}

    @contextlib.asynccontextmanager
    async def slot(self, caller: str, client: Client | None = None) -> AsyncIterator[None]:
        own = self._callers.setdefault(caller, _Limit(self._per_caller))
        try:
            async with contextlib.AsyncExitStack() as held:
                for limit in (own, self._total):
                    await limit.acquire(client)
                    held.callback(limit.release)
                yield
        finally:
            if own.is_idle:
                self._callers.pop(caller, None)


class Slots:
    """All slots of a server, and how many requests wait for one."""

    def __init__(self) -> None:
        self._waiting = 0
        self._cheap, self._expensive = _Kind(16, 12), _Kind(4, 2)  # threads, each with a connection to Postgres
        self._look_ups = _Kind(_LOOK_UPS, _LOOK_UPS)
        self._large = _Kind(16, 8)

    def large(self, caller: Caller) -> AbstractAsyncContextManager[None]:
        """Have room in memory for the large body of a caller's request while that is read and decoded."""
        return self._large.slot(_name(caller))

    async def look_up(self, call: Callable[[], Any]) -> Any:
        async with self._look_ups.slot(""):
            return await _in_thread(call)

    async def run(
        self, call: Callable[[], Any], caller: Caller, client: Client | None = None, *, is_expensive: bool = False
    ) -> Any:
        """Do something in a thread when there is a slot. An expensive call reads no more when its client has gone."""
        kind = self._expensive if is_expensive else self._cheap
        if is_expensive and client is not None:
            limit = TimeLimit(None)
            client.gone.add_done_callback(limit.end)
            call = partial(_within, limit, call)

        async def work() -> Any:
            async with kind.slot(_name(caller), client):
                return await _in_thread(call)

        return await self.count(work)

    async def count(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Wait for something; this is one more request that waits."""
        if self._waiting >= _MOST_WAITING:
            raise refused(429, "There are too many requests at once", f"{_MOST_WAITING:,} wait already.")
        self._waiting += 1
        try:
            return await call()
        finally:
            self._waiting -= 1

    async def wait_for(self, steps: Steps[Any], caller: Caller, client: Client, *, is_expensive: bool = False) -> Any:
        """Take the steps of a call that waits; none of the slots is held in between.

        It ends when the client disconnects, and when the caller's key was revoked or has expired.
        """
        try:
            with anyio.fail_after(_LONGEST_WAIT):
                while True:
                    step = partial(_step, steps)
                    pause, found = await self.run(step, caller, client, is_expensive=is_expensive)
                    if pause is None:
                        return found
                    waiting = asyncio.create_task(pause.wait_async())
                    await asyncio.wait((waiting, client.gone), return_when=asyncio.FIRST_COMPLETED)
                    if client.gone.done():
                        waiting.cancel()
                        raise ClientDisconnect
                    await _admit_again(caller)
        except ResultTimeout:
            raise  # which says what was waited for
        except TimeoutError:
            detail = f"There was no answer within {_LONGEST_WAIT:g} s."
            raise refused(409, "It was not answered in time", detail) from None
        finally:
            with contextlib.suppress(ValueError):  # a thread still takes a step: the server stops, and waits no longer
                steps.close()


def _name(caller: Caller) -> str:
    return caller.key or " ".join(caller.actor)


async def _in_thread(call: Callable[[], Any]) -> Any:
    """Call in a thread. An error is not left in a future: that and its traceback would keep each other, and the body.

    They would stay in memory until garbage is collected.
    """
    limiter = CapacityLimiter(1)  # the slots are the limit
    result, error = await anyio.to_thread.run_sync(_caught, call, limiter=limiter)
    if error is None:
        return result
    try:
        raise error
    finally:
        del error


def _caught(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001  # it is raised where this was called
        return None, error


def _within(limit: TimeLimit, call: Callable[[], Any]) -> Any:
    with limit:
        return call()


async def _admit_again(caller: Caller) -> None:
    if caller.again is not None:
        try:
            await caller.again()
        except Refused:
            raise
        except OrchestratorError:
            return  # it is not known now, and is asked again after the next pause


def _step(steps: Steps[Any]) -> tuple[Pause | None, Any]:
    try:
        return next(steps), None
    except StopIteration as end:
        return None, end.value
