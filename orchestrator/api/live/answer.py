"""A stream of server-sent events, as HTTP has it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from orchestrator.api.endpoints import EVENTS
from orchestrator.api.live.hub import Hub, Over
from orchestrator.api.live.listener import Listener
from orchestrator.api.live.subjects import Subject
from orchestrator.api.problems import Refused
from orchestrator.errors import OrchestratorError

_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_BEAT = 5.0
"""Seconds after which something is said even if there is nothing to say: proxies close what is silent."""
_FIRST = b"retry: 1000\n\n"
"""After how many milliseconds a browser comes back."""
_SILENCE = b":\n\n"

Admit = Callable[[], Awaitable[object]]
"""Refuses a listener whose key is no longer valid."""


class Listening(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long to listen."""

    seconds: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    """The stream ends after so many; null: when there is nothing more to come."""


class Wanted(NamedTuple):
    """The subject of a stream, and its longest duration."""

    subject: Subject
    seconds: float | None


async def answer(hub: Hub, wanted: Wanted, request: Request, admit: Admit) -> Response:
    """Return the stream of what happens to a subject, from the event on that the listener has got last."""
    if request.method == "HEAD":
        return Response(media_type=EVENTS, headers=_HEADERS)
    try:
        listener = await hub.join(wanted.subject, request.headers.get("Last-Event-ID"))
    except Over:
        return Response(status_code=204)  # by which a browser knows that it need not come back
    return Stream(hub, listener, wanted.seconds, admit)


class Stream(Response):
    """An answer that goes on until there is nothing more to come, or the listener leaves."""

    media_type = EVENTS

    def __init__(self, hub: Hub, listener: Listener, seconds: float | None, admit: Admit) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)
        self._hub = hub
        self._listener = listener
        self._seconds = seconds
        self._admit = admit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        gone = asyncio.create_task(_gone(receive, self._listener))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": _FIRST, "more_body": True})
            async for said in self._said():
                await send({"type": "http.response.body", "body": said, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()
            self._hub.leave(self._listener)

    async def _said(self) -> AsyncIterator[bytes]:
        """Yield what is to be sent; something every few seconds, after a look whether the listener still may listen."""
        listener, admit_at = self._listener, time.monotonic() + _BEAT
        until = math.inf if self._seconds is None else time.monotonic() + self._seconds
        while (left := until - time.monotonic()) > 0:
            said = await listener.take(min(left, _BEAT))
            if not said and listener.is_closed:
                return
            yield said or _SILENCE
            if listener.is_lagging:
                self._hub.refresh(listener)
            if time.monotonic() >= admit_at:
                admit_at = time.monotonic() + _BEAT
                if not await self._may_listen():
                    return

    async def _may_listen(self) -> bool:
        try:
            await self._admit()
        except Refused as error:
            return error.problem.status not in (401, 403, 421)
        except OrchestratorError:
            return True  # it is not known now, and is asked again
        return True


async def _gone(receive: Receive, listener: Listener) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    listener.close()
