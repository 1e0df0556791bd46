"""Request slots: limits on concurrent and waiting requests, and the steps of calls that wait.

Each caller has slots of its own within those of the server, and expensive requests have other slots than cheap ones. So
a cheap request waits neither for other callers nor for expensive requests. Key lookups take none of these slots.
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

_MAX_WAIT = 300.0
"""Seconds that a request may wait for the result of a run or task."""
_MAX_WAITING = 1_000
"""Requests that may wait for a slot."""
_LOOKUPS = 2


class Client:
    """The client of a request whose body was read. Its connection is watched once `gone` is used."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._gone: asyncio.Task[None] | None = None

    @property
    def gone(self) -> asyncio.Task[None]:
        if self._gone is None:
            self._gone = asyncio.create_task(self._wait_for_disconnect())
        return self._gone

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        if self._gone is not None:
            self._gone.cancel()

    async def _wait_for_disconnect(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass


class _Limit:
    """A semaphore that serves waiters in their order."""

    def __init__(self, capacity: int) -> None:
        self._free = self._capacity = capacity
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def is_idle(self) -> bool:
        return self._free == self._capacity

    async def acquire(self, client: Client | None) -> None:
        """Wait for a slot. Raise ClientDisconnect if the client disconnects first."""
        if self._free:
            self._free -= 1
            return
        slot = asyncio.get_running_loop().create_future()
        self._queue.append(slot)
        try:
            await asyncio.wait((slot,) if client is None else (slot, client.gone), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if not slot.cancel():
                self.release()
            raise
        if slot.cancel():
            raise ClientDisconnect

    def release(self) -> None:
        """Pass the slot to the next waiter."""
        while self._queue:
            slot = self._queue.popleft()
            if not slot.done():
                slot.set_result(None)
                return
        self._free += 1


class _SlotPool:
    """Slots of one kind, with a limit for each caller."""

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
    """All slots of a server, and the number of waiting requests."""

    def __init__(self) -> None:
        self._waiting = 0
        self._cheap, self._expensive = _SlotPool(16, 12), _SlotPool(4, 2)  # threads with a Postgres connection each
        self._lookups = _SlotPool(_LOOKUPS, _LOOKUPS)
        self._large = _SlotPool(16, 8)

    def large_body(self, caller: Caller) -> AbstractAsyncContextManager[None]:
        """Hold a slot for a large body while it is read and decoded, which limits memory."""
        return self._large.slot(_name(caller))

    async def run_lookup(self, call: Callable[[], Any]) -> Any:
        async with self._lookups.slot(""):
            return await _in_thread(call)

    async def run(
        self, call: Callable[[], Any], caller: Caller, client: Client | None = None, *, is_expensive: bool = False
    ) -> Any:
        """Run a call in a thread once a slot is free. An expensive call stops reading if the client disconnects."""
        pool = self._expensive if is_expensive else self._cheap
        if is_expensive and client is not None:
            limit = TimeLimit(None)
            client.gone.add_done_callback(limit.end)
            call = partial(_within, limit, call)

        async def work() -> Any:
            async with pool.slot(_name(caller), client):
                return await _in_thread(call)

        return await self.queued(work)

    async def queued(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Await a call as one more waiting request; refuse it if too many wait."""
        if self._waiting >= _MAX_WAITING:
            raise refused(429, "There are too many requests at once", f"{_MAX_WAITING:,} are waiting already.")
        self._waiting += 1
        try:
            return await call()
        finally:
            self._waiting -= 1

    async def wait_for(self, steps: Steps[Any], caller: Caller, client: Client, *, is_expensive: bool = False) -> Any:
        """Run the steps of a call that waits. It holds no slot between two steps.

        It ends when the client disconnects, and when the caller's key was revoked or has expired.
        """
        try:
            with anyio.fail_after(_MAX_WAIT):
                while True:
                    step = partial(_step, steps)
                    pause, result = await self.run(step, caller, client, is_expensive=is_expensive)
                    if pause is None:
                        return result
                    waiting = asyncio.create_task(pause.wait_async())
                    await asyncio.wait((waiting, client.gone), return_when=asyncio.FIRST_COMPLETED)
                    if client.gone.done():
                        waiting.cancel()
                        raise ClientDisconnect
                    await _check_key_again(caller)
        except ResultTimeout:
            raise  # its message names the task or run
        except TimeoutError:
            detail = f"There was no answer within {_MAX_WAIT:g} s."
            raise refused(409, "There was no answer in time", detail) from None
        finally:
            with contextlib.suppress(ValueError):  # a thread still runs a step: the server is stopping
                steps.close()


def _name(caller: Caller) -> str:
    return caller.key or " ".join(caller.actor)


async def _in_thread(call: Callable[[], Any]) -> Any:
    """Run a call in a thread. Errors are returned, not stored in a future.

    A future, its error and the traceback would form a cycle, which keeps the body in memory until a garbage collection.
    """
    limiter = CapacityLimiter(1)  # slots limit the number of threads
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
    except Exception as error:  # noqa: BLE001  # raised by the caller
        return None, error


def _within(limit: TimeLimit, call: Callable[[], Any]) -> Any:
    with limit:
        return call()


async def _check_key_again(caller: Caller) -> None:
    if caller.recheck is not None:
        try:
            await caller.recheck()
        except Refused:
            raise
        except OrchestratorError:
            return  # Postgres is down: checked again after the next pause


def _step(steps: Steps[Any]) -> tuple[Pause | None, Any]:
    try:
        return next(steps), None
    except StopIteration as end:
        return None, end.value
