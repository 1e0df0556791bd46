"""Whose turn it is: how many requests are worked on and wait, and how a call that waits is taken step by step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
from starlette.requests import ClientDisconnect, Request

from orchestrator.api.access import Caller
from orchestrator.api.context import Api
from orchestrator.api.endpoints import Endpoint
from orchestrator.api.patience import LONGEST_BODY
from orchestrator.api.problems import Problem, Refused, refused
from orchestrator.domain.access import Reach
from orchestrator.errors import OrchestratorError, ResultTimeout
from orchestrator.sdk.waiting.steps import Pause, Steps

LARGEST_BODY = 32_000_000
"""Bytes of one request."""
_LONGEST_WAIT = 300.0
"""Seconds that a request may wait for an answer of somebody else's."""
_AT_ONCE = 16
"""Requests that are worked on at the same time: each holds a connection to Postgres."""
_MOST_WAITING = 1_000
"""Requests that may wait for their turn."""


class Turns:
    """Who is worked on, and how many wait."""

    def __init__(self) -> None:
        self._waiting = 0
        self._free: anyio.CapacityLimiter | None = None

    async def run(self, call: Callable[[], Any]) -> Any:
        """Do something in a thread when its turn comes."""
        if self._free is None:
            self._free = anyio.CapacityLimiter(_AT_ONCE)
        return await self.count(partial(anyio.to_thread.run_sync, call, limiter=self._free))

    async def count(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Wait for something that holds no thread; this is one more who waits."""
        if self._waiting >= _MOST_WAITING:
            raise refused(429, "There are too many requests at once", f"{_MOST_WAITING:,} wait already.")
        self._waiting += 1
        try:
            return await call()
        finally:
            self._waiting -= 1


def perform(api: Api, endpoint: Endpoint, given: dict[str, Any], reach: Reach) -> Any:
    """Do what was asked for, unless it is out of the caller's reach."""
    if reach.is_bound:
        endpoint.about.check(api, reach, given)
    if endpoint.takes_reach:
        given["reach"] = reach
    return endpoint.call(api, **given)


async def wait_for(turns: Turns, steps: Steps[Any], request: Request, caller: Caller) -> Any:
    """Take the steps of a call that waits; none of the threads is held in between.

    It ends where nobody is there any more to be answered, and where the caller's key was revoked or has expired.
    """
    gone = asyncio.create_task(_hang_up(request))
    try:
        with anyio.fail_after(_LONGEST_WAIT):
            while True:
                pause, found = await turns.run(partial(_step, steps))
                if pause is None:
                    return found
                waiting = asyncio.create_task(pause.wait_async())
                await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    waiting.cancel()
                    raise ClientDisconnect
                await _admit_again(caller)
    except ResultTimeout:
        raise  # which says what was waited for
    except TimeoutError:
        raise refused(409, "It was not answered in time", f"There was no answer within {_LONGEST_WAIT:g} s.") from None
    finally:
        gone.cancel()
        steps.close()


async def _admit_again(caller: Caller) -> None:
    if caller.again is not None:
        try:
            await caller.again()
        except Refused:
            raise
        except OrchestratorError:
            return  # it is not known now, and is asked again after the next pause


async def _hang_up(request: Request) -> None:
    """Return when the client has left; its request has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _step(steps: Steps[Any]) -> tuple[Pause | None, Any]:
    try:
        return next(steps), None
    except StopIteration as end:
        return None, end.value


async def read_body(request: Request) -> bytes:
    """Read what was sent, but no more than anybody needs to send."""
    parts: list[bytes] = []
    size = 0
    if request.headers.get("Content-Encoding", "").strip().lower() not in ("", "identity"):
        raise _encoded(request.headers["Content-Encoding"])
    if int(request.headers.get("Content-Length", "0")) > LARGEST_BODY:  # who waits to be told to go on need not send it
        raise _too_large()
    try:
        async with asyncio.timeout(LONGEST_BODY):
            async for part in request.stream():
                size += len(part)
                if size > LARGEST_BODY:
                    raise _too_large()
                parts.append(part)
    except TimeoutError:
        raise _closing(408, "The body is late", f"It has to be here within {LONGEST_BODY:g} seconds.") from None
    return b"".join(parts)


def _too_large() -> Refused:
    return _closing(413, "The body is too large", f"At most {LARGEST_BODY:,} bytes are read.")


def _encoded(found: str) -> Refused:
    problem = Problem(
        title="The body is encoded",
        status=415,
        detail=f"Content-Encoding: expected none, found {found!r:.100}. Send the body as it is, without compression.",
    )
    return Refused(problem, {"Connection": "close", "Accept-Encoding": "identity"})


def _closing(status: int, title: str, detail: str) -> Refused:
    """Return a refusal after which nothing more is read on the connection."""
    return Refused(Problem(title=title, status=status, detail=detail), {"Connection": "close"})
