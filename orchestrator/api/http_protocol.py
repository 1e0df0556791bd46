"""HTTP/1.1 with strict parsing, a maximum size of request heads, and timeouts.

httptools parses requests, in C. Requests that it accepts but other parsers may read differently are rejected here, so
that a proxy in front of this server and the server never disagree about where a request ends.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from orchestrator.api.access import network_of
from orchestrator.api.problems import MEDIA_TYPE, Problem

HEAD_TIMEOUT = 10.0
"""Seconds from a new connection, or the previous response, until the next request head must be complete."""
BODY_TIMEOUT = 60.0
"""Seconds within which a request body must arrive."""
DRAIN_TIMEOUT = 30.0
"""Seconds for which the rest of a body is read and dropped after an early response."""
MAX_DRAINED = 100_000_000
"""Bytes of a body that are dropped, at most. Closing a connection with unread data resets it, and the client may
lose the response."""
MAX_HEAD_SIZE = 65_536
"""Bytes of a request head, or of what follows a body, at most."""


_MAX_PIPELINED = 100
"""Requests that a client may pipeline before the first response."""


class _TooManyPipelined(Exception):
    """The client pipelines too many requests. None of them is served, and the connection is closed."""


class Connections:
    """Limits open connections by client network. Trusted proxies are exempt."""

    def __init__(self, maximum: int, is_exempt: Callable[[str], bool]) -> None:
        self._maximum = maximum
        self._is_exempt = is_exempt
        self._open: Counter[str] = Counter()

    def open(self, address: str) -> bool:
        """Count a connection; return False if there is no room for it."""
        network = network_of(address)
        if self._open[network] >= self._maximum and not self._is_exempt(address):
            return False
        self._open[network] += 1
        return True

    def close(self, address: str) -> None:
        network = network_of(address)
        self._open[network] -= 1
        if not self._open[network]:
            del self._open[network]


class _Ambiguous(Exception):
    """Two HTTP parsers could read the request differently."""


class _ResponseTransport:
    """A transport for responses: closing it waits until the client has sent the rest of its request."""

    def __init__(self, protocol: TimedProtocol) -> None:
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing
        self.close = protocol.close


class TimedProtocol(HttpToolsProtocol):
    """Uvicorn's HTTP/1.1 protocol, with timeouts and limits."""

    _timer: asyncio.TimerHandle | None = None
    _unread = 0
    """Bytes received since the last complete head or part of a body."""
    _is_rejecting = False
    """Nothing more is parsed on this connection."""
    _is_body_pending = False
    """The head of a request was read, and its body is incomplete."""
    _drain_remaining: int | None = None
    """Bytes that may still be dropped before the connection is closed; None while requests are parsed."""

    def __init__(self, *arguments: Any, connections: Connections | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._connections = connections
        self.parser.set_dangerous_leniencies(lenient_data_after_close=False)

    def connection_made(self, transport: Any) -> None:
        """Start the timeout of the first request, unless the client has too many connections."""
        super().connection_made(transport)
        if self._connections is not None and not self._connections.open(self._address()):
            self._connections = None
            self._is_rejecting = True
            detail = "This address has too many open connections: close some, or retry later."
            self._reply(HTTPStatus.TOO_MANY_REQUESTS, "There are too many connections", detail, "retry-after: 10\r\n")
            self.transport.close()
            return
        self._update_timer()

    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def data_received(self, data: bytes) -> None:
        """Parse received data, however small its parts."""
        if self._drain_remaining is not None:
            self._drain_remaining -= len(data)
            if self._drain_remaining < 0:
                self.transport.close()
        if self._is_rejecting or self.transport.is_closing():
            return
        self._unread += len(data)
        super().data_received(data)
        if self._unread > MAX_HEAD_SIZE and not self._is_rejecting:
            self.send_400_response(f"The head of a request may have at most {MAX_HEAD_SIZE:,} bytes.")
        self._update_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header of the request's head. Drop trailers: a proxy may pass on those that it removes from heads."""
        if not self._is_body_pending:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Serve a request whose head is complete."""
        self._unread = 0
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise _TooManyPipelined
        _check(self.headers, self.parser.get_http_version())
        self._is_body_pending = True
        super().on_headers_complete()
        self.cycle.transport = cast("asyncio.Transport", _ResponseTransport(self))

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread, self._is_body_pending = 0, False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the timeout of the next request, or of the rest of a request that was answered early."""
        super().on_response_complete()
        if self._drain_remaining is not None:
            self._unset_keepalive_if_required()
        elif self._is_rejecting and not self.transport.is_closing():
            self.transport.close()
        self._update_timer()

    def send_400_response(self, msg: str) -> None:
        """Respond 400 with problem details, and close the connection.

        If an earlier, complete request is still being served, it is answered and this response is omitted: the client
        would take the response for the answer to that request.
        """
        self._is_rejecting = True
        if self.cycle is not None and not self.cycle.response_complete:
            if self.pipeline or not self.cycle.more_body:
                self.pipeline.clear()
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._reply(HTTPStatus.BAD_REQUEST, "The request is not valid HTTP/1.1", msg)
        self._drain(HEAD_TIMEOUT)

    def close(self) -> None:
        """Close the connection after a response. First read and drop the rest of the request, up to a limit."""
        if self._is_body_pending and not self.transport.is_closing():
            self._drain(DRAIN_TIMEOUT)
        else:
            self.transport.close()

    def _drain(self, seconds: float) -> None:
        """Send nothing more, and close when the client does or after some seconds."""
        self._is_rejecting, self._drain_remaining = True, MAX_DRAINED
        self.pipeline.clear()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self.transport.close)

    def _reply(self, status: HTTPStatus, title: str, detail: str, headers: str = "") -> None:
        """Send a problem that answers no particular request."""
        data = msgspec.json.encode(Problem(title=title, status=status, detail=detail))
        head = f"HTTP/1.1 {status} {status.phrase}\r\ncontent-type: {MEDIA_TYPE}\r\ncontent-length: {len(data)}\r\n"
        self.transport.write(f"{head}{headers}connection: close\r\n\r\n".encode() + data)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._connections is not None:
            self._connections.close(self._address())
        self._stop_timer()

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _update_timer(self) -> None:
        if self._drain_remaining is not None:
            return  # the drain has a timeout of its own
        if not self._is_idle():
            self._stop_timer()
        elif self._timer is None and not self.transport.is_closing():
            seconds = DRAIN_TIMEOUT if self._is_body_pending else HEAD_TIMEOUT
            self._timer = self.loop.call_later(seconds, self._time_out)

    def _time_out(self) -> None:
        self._timer = None
        if self._is_idle() and not self.transport.is_closing():
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _check(headers: Iterable[tuple[bytes, bytes]], version: str) -> None:
    """Reject an ambiguous head: one that repeats a header, or has a form that parsers read differently."""
    hosts = lengths = codings = 0
    for name, value in headers:
        if name == b"host":
            hosts += 1
        elif name == b"content-length":
            lengths += 1
            if not value.isdigit():
                raise _Ambiguous
        elif name == b"transfer-encoding":
            codings += 1
            if value.lower() != b"chunked":
                raise _Ambiguous
    if hosts > 1 or lengths + codings > 1:
        raise _Ambiguous
    if version == "1.1" and hosts == 1:
        return
    if version != "1.0" or codings:
        raise _Ambiguous
