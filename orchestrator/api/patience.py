"""How long a sender may take for a request, and between two of them: nobody holds a connection by drops."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from orchestrator.api.problems import MEDIA_TYPE, Problem

LONGEST_HEAD = 10.0
"""Seconds from a connection, or an answer, to the next request being there."""
LONGEST_BODY = 60.0
"""Seconds within which the rest of a request must have come."""


class PatientProtocol(H11Protocol):
    """HTTP/1.1 as uvicorn speaks it, on a connection that is closed where no request comes of it."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take what was sent, which may be a drop of what is to come."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request, or for the rest of one that was answered before it was read."""
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Say what was wrong with what came as everything else is said that goes wrong."""
        problem = Problem(title="The request is no HTTP/1.1", status=400, detail=msg)
        data = msgspec.json.encode(problem)
        headers = [
            (b"content-type", MEDIA_TYPE.encode()),
            (b"content-length", str(len(data)).encode()),
            (b"connection", b"close"),
        ]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=data), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        super().connection_lost(exc)
        self._stop_timer()

    def _waits(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        if not self._waits():
            self._stop_timer()
        elif self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(LONGEST_HEAD, self._give_up)

    def _give_up(self) -> None:
        self._timer = None
        if self._waits() and not self.transport.is_closing():
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
