"""HTTP/1.1 with limits: one way to read each request, a largest head, and a time within which it must come.

httptools reads requests, in C. What it takes and two readers could take differently is refused here, so that a proxy in
front of this server and the server itself never disagree where a request ends.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from orchestrator.api.access import neighbourhood
from orchestrator.api.problems import MEDIA_TYPE, Problem

LONGEST_HEAD = 10.0
"""Seconds from a connection, or an answer, to the next request being there."""
LONGEST_BODY = 60.0
"""Seconds within which the rest of a request must have come."""
LONGEST_DRAIN = 30.0
"""Seconds for which the rest of a body is read and dropped after its request was answered."""
MOST_DRAINED = 100_000_000
"""Bytes of it. Closing a connection on which something is unread resets it, and the client may lose the answer."""
LARGEST_HEAD = 65_536
"""Bytes of a request before its body, or of what follows a body."""


_MOST_AHEAD = 100
"""Requests that a connection may send before the first of them is answered."""


class _TooManyAhead(Exception):
    """The client does not wait for answers: none of the requests ahead is served, and the connection is closed."""


class Connections:
    """How many connections each address has open; proxies that are trusted have as many as they want."""

    def __init__(self, most: int, is_exempt: Callable[[str], bool]) -> None:
        self._most = most
        self._is_exempt = is_exempt
        self._open: Counter[str] = Counter()

    def open(self, address: str) -> bool:
        """Count a connection, if there is room for it."""
        near = neighbourhood(address)
        if self._open[near] >= self._most and not self._is_exempt(address):
            return False
        self._open[near] += 1
        return True

    def close(self, address: str) -> None:
        near = neighbourhood(address)
        self._open[near] -= 1
        if not self._open[near]:
            del self._open[near]


class _Ambiguous(Exception):
    """Two readers could take the request differently."""


class _Answering:
    """The transport as an answer uses it: a close waits until the client has sent the rest of its request."""

    def __init__(self, protocol: TimedProtocol) -> None:
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing
        self.close = protocol.close


class TimedProtocol(HttpToolsProtocol):
    """HTTP/1.1 as uvicorn speaks it, on a connection that is closed where no request comes of it."""

    _timer: asyncio.TimerHandle | None = None
    _unread = 0
    """Bytes that have come since something could be read: a head, or a part of a body."""
    _is_over = False
    """Nothing more is read, because what came was no request."""
    _has_more = False
    """The head of a request is there, and the rest of it is still to come."""
    _left: int | None = None
    """Bytes that are still dropped before the connection is closed; None as long as requests are read."""

    def __init__(self, *arguments: Any, connections: Connections | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._connections = connections
        self.parser.set_dangerous_leniencies(lenient_data_after_close=False)

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a request, unless its address has too many connections."""
        super().connection_made(transport)
        if self._connections is not None and not self._connections.open(self._address()):
            self._connections = None
            self._is_over = True
            detail = "So many connections of one address are open: close some, or come again."
            self._say(HTTPStatus.TOO_MANY_REQUESTS, "There are too many connections", detail, "retry-after: 10\r\n")
            self.transport.close()
            return
        self._watch()

    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def data_received(self, data: bytes) -> None:
        """Take what was sent, which may be a drop of what is to come."""
        if self._left is not None:
            self._left -= len(data)
            if self._left < 0:
                self.transport.close()
        if self._is_over or self.transport.is_closing():
            return
        self._unread += len(data)
        super().data_received(data)
        if self._unread > LARGEST_HEAD and not self._is_over:
            self.send_400_response(f"The head of a request has at most {LARGEST_HEAD:,} bytes.")
        self._watch()

    def on_headers_complete(self) -> None:
        """Begin to serve a request after its head has come."""
        self._unread = 0
        if len(self.pipeline) >= _MOST_AHEAD:
            raise _TooManyAhead
        _check(self.headers, self.parser.get_http_version())
        self._has_more = True
        super().on_headers_complete()
        self.cycle.transport = cast("asyncio.Transport", _Answering(self))

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread, self._has_more = 0, False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request, or for the rest of one that was answered before it was read."""
        super().on_response_complete()
        if self._left is not None:
            self._unset_keepalive_if_required()
        elif self._is_over and not self.transport.is_closing():
            self.transport.close()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Say what was wrong with what came as everything else is said that goes wrong, and end the connection.

        A request that came whole before it is answered first, and nothing else is: what would be said here would be
        taken for its answer.
        """
        self._is_over = True
        if self.cycle is not None and not self.cycle.response_complete:
            if self.pipeline or not self.cycle.more_body:
                self.pipeline.clear()
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._say(HTTPStatus.BAD_REQUEST, "The request is no HTTP/1.1", msg)
        self._drain(LONGEST_HEAD)

    def close(self) -> None:
        """Close the connection after an answer, and after the rest of its request, up to a limit."""
        if self._has_more and not self.transport.is_closing():
            self._drain(LONGEST_DRAIN)
        else:
            self.transport.close()

    def _drain(self, seconds: float) -> None:
        """Send no more, and close when the client does, or after so long."""
        self._is_over, self._left = True, MOST_DRAINED
        self.pipeline.clear()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self.transport.close)

    def _say(self, status: HTTPStatus, title: str, detail: str, headers: str = "") -> None:
        """Answer without a request."""
        data = msgspec.json.encode(Problem(title=title, status=status, detail=detail))
        head = f"HTTP/1.1 {status} {status.phrase}\r\ncontent-type: {MEDIA_TYPE}\r\ncontent-length: {len(data)}\r\n"
        self.transport.write(f"{head}{headers}connection: close\r\n\r\n".encode() + data)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._connections is not None:
            self._connections.close(self._address())
        self._stop_timer()

    def _waits(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        if self._left is not None:
            return  # it has a time already
        if not self._waits():
            self._stop_timer()
        elif self._timer is None and not self.transport.is_closing():
            seconds = LONGEST_DRAIN if self._has_more else LONGEST_HEAD
            self._timer = self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        self._timer = None
        if self._waits() and not self.transport.is_closing():
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _check(headers: Iterable[tuple[bytes, bytes]], version: str) -> None:
    """Refuse a head that is ambiguous: it repeats a header, or has a form that readers take differently."""
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
