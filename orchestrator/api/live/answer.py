"""HTTP responses that stream server-sent events."""

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
from orchestrator.api.live.hub import AlreadyEnded, Hub
from orchestrator.api.live.listener import Listener
from orchestrator.api.live.subjects import Subject
from orchestrator.api.problems import Refused
from orchestrator.errors import OrchestratorError

_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_HEARTBEAT = 5.0
"""Seconds after which an idle stream sends an empty comment, because proxies close silent connections."""
_RETRY_DELAY = b"retry: 1000\n\n"
"""The delay in milliseconds before a browser reconnects."""
_KEEPALIVE = b":\n\n"

Admit = Callable[[], Awaitable[object]]
"""Raises if the listener's key is no longer valid."""


class Listening(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long to listen."""

    seconds: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    """Seconds after which the stream ends; null: when the subject has ended."""


class StreamRequest(NamedTuple):
    """The subject of a stream, and its maximum duration."""

    subject: Subject
    seconds: float | None


async def answer(hub: Hub, stream: StreamRequest, request: Request, admit: Admit) -> Response:
    """Return the event stream of a subject. It resumes after the event that `Last-Event-ID` names."""
    if request.method == "HEAD":
        return Response(media_type=EVENTS, headers=_HEADERS)
    try:
        listener = await hub.join(stream.subject, request.headers.get("Last-Event-ID"))
    except AlreadyEnded:
        return Response(status_code=204)  # a browser does not reconnect after a 204
    return Stream(hub, listener, stream.seconds, admit)


class Stream(Response):
    """A response that streams events until the subject has ended or the client disconnects."""

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
        disconnected = asyncio.create_task(_watch_disconnect(receive, self._listener))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": _RETRY_DELAY, "more_body": True})
            async for events in self._events():
                await send({"type": "http.response.body", "body": events, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            disconnected.cancel()
            self._hub.leave(self._listener)

    async def _events(self) -> AsyncIterator[bytes]:
        """Yield events, or an empty comment every few seconds. Check the listener's key at the same interval."""
        listener, admit_at = self._listener, time.monotonic() + _HEARTBEAT
        until = math.inf if self._seconds is None else time.monotonic() + self._seconds
        while (remaining := until - time.monotonic()) > 0:
            events = await listener.next_chunk(min(remaining, _HEARTBEAT))
            if not events and listener.is_closed:
                return
            yield events or _KEEPALIVE
            if listener.is_lagging:
                self._hub.refresh(listener)
            if time.monotonic() >= admit_at:
                admit_at = time.monotonic() + _HEARTBEAT
                if not await self._may_listen():
                    return

    async def _may_listen(self) -> bool:
        try:
            await self._admit()
        except Refused as error:
            return error.problem.status not in (401, 403, 421)
        except OrchestratorError:
            return True  # Postgres is down: the next check decides
        return True


async def _watch_disconnect(receive: Receive, listener: Listener) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    listener.close()
