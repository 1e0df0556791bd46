"""Asynchronous HTTP/1.1 requests, thousands at a time in one process.

All executors that use HTTP send requests through this module. It uses h11, which is small, has no dependencies, and
rejects ambiguous messages. A client with pools, redirects, cookies and proxies would do more than an executor should,
and httpx takes ten times as long to import. Each request has a connection of its own, which is closed after the answer,
so that no later data is taken for another answer. Redirects are not followed, and proxies of the environment are not
used.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import h11
import msgspec

from orchestrator.domain.tasks.destinations import Destinations

_CONNECT_TIMEOUT = 5.0
"""Seconds that connecting may take."""
_READ_SIZE = 65_536
_MAX_HEAD = 65_536
_PORTS = {"http": 80, "https": 443}
_UNQUOTED = "!#$%&'()*+,/:;=?@[]~"
_WITH_BODY = ("POST", "PUT", "PATCH")


class Unanswered(Exception):
    """No answer arrived: the connection failed or broke."""


class Unreadable(Exception):
    """The answer is not valid HTTP."""


class TooLarge(Exception):
    """The answer is too large."""


class Barred(Exception):
    """The worker's operator does not allow this address."""


class Endpoint(NamedTuple):
    """The parts of an address, and its TLS settings."""

    host: str
    port: int
    is_secure: bool
    path: str
    tls: ssl.SSLContext | None = None
    """TLS context with trusted certificates and a client certificate; by default that of the system."""
    server_name: str = ""
    """The name in the server's certificate, if it differs from the host."""

    @classmethod
    def of(cls, url: str, tls: ssl.SSLContext | None = None, server_name: str = "") -> Endpoint:
        """Split an address that has been checked."""
        parts = urlsplit(url)
        path, is_secure = quote(parts.path.rstrip("/"), safe=_UNQUOTED), parts.scheme == "https"
        return cls(parts.hostname or "", parts.port or _PORTS[parts.scheme], is_secure, path, tls, server_name)

    @property
    def authority(self) -> str:
        """The value of the header Host."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS["https" if self.is_secure else "http"] else f"{host}:{self.port}"


class Request(NamedTuple):
    method: str
    path: str
    """The encoded path after the path of the place, with a query if there is one."""
    body: bytes = b""
    headers: Sequence[tuple[str, str]] = ()
    """Headers in addition to those of every request."""
    content_type: str = "application/json"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes = b""

    @property
    def data(self) -> Any:
        """The body as JSON, or None if it cannot be decoded."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None


class Incoming:
    """An answer whose head has arrived. Its body is read in parts as they arrive."""

    def __init__(self, place: Endpoint, protocol: h11.Connection, reader: asyncio.StreamReader) -> None:
        self._place = place
        self._protocol = protocol
        self._reader = reader
        self.head = Answer(0, {})

    async def begin(self) -> None:
        """Read the head."""
        while not isinstance(event := await self._next(), h11.Response):
            if isinstance(event, h11.ConnectionClosed):
                raise Unanswered(f"{self._place.authority} closed the connection without an answer")
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
        self.head = Answer(event.status_code, headers)

    def __aiter__(self) -> Incoming:
        """Iterate over the parts of the body."""
        return self

    async def __anext__(self) -> bytes:
        """Return the next part of the body."""
        event = await self._next()
        if isinstance(event, h11.Data):
            return bytes(event.data)
        raise StopAsyncIteration

    async def read_body(self, max_size: int) -> Answer:
        """Return the whole answer. Raise TooLarge if the body has more than `max_size` bytes."""
        parts, size = list[bytes](), 0
        async for part in self:
            size += len(part)
            if size > max_size:
                raise TooLarge(f"{self._place.authority} answered with more than {max_size:,} bytes")
            parts.append(part)
        return replace(self.head, body=b"".join(parts))

    async def _next(self) -> Any:
        has_ended = False
        while True:
            try:
                event = self._protocol.next_event()
                if event is not h11.NEED_DATA:
                    return event
                data = await self._reader.read(_READ_SIZE)
                has_ended = not data
                self._protocol.receive_data(data)
            except h11.RemoteProtocolError as error:
                if has_ended:
                    raise Unanswered(
                        f"{self._place.authority} closed the connection in the middle of its answer"
                    ) from error
                raise Unreadable(
                    f"{self._place.authority} gave an answer that is not valid HTTP: {_reason(error)}"
                ) from error
            except (OSError, EOFError) as error:
                raise Unanswered(f"the connection to {self._place.authority} broke: {_reason(error)}") from error


async def ask(place: Endpoint, request: Request, *, max_size: int, allowed: Destinations | None = None) -> Answer:
    """Send a request, and return the answer, of at most `max_size` bytes. Cancellation closes the connection."""
    async with open_response(place, request, allowed=allowed) as incoming:
        return await incoming.read_body(max_size)


@asynccontextmanager
async def open_response(
    place: Endpoint, request: Request, *, allowed: Destinations | None = None
) -> AsyncIterator[Incoming]:
    """Send a request, and yield the answer when its head has arrived. The connection is closed afterwards.

    With `allowed`, the host must be one of these destinations.
    """
    addresses = await _resolve(place, allowed)
    reader, writer = await _connect(place, addresses)
    try:
        protocol = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD)
        writer.write(_encode(protocol, place, request))
        # Do not wait until all is sent: a server whose answer is ready may have stopped reading.
        incoming = Incoming(place, protocol, reader)
        await incoming.begin()
        yield incoming
    finally:
        with contextlib.suppress(OSError):
            writer.transport.abort()  # the rest is not sent


def _encode(protocol: h11.Connection, place: Endpoint, request: Request) -> bytes:
    headers = [
        ("Host", place.authority),
        ("Accept", "application/json"),
        ("Connection", "close"),
        *request.headers,
    ]
    if request.body or request.method in _WITH_BODY:
        headers += [("Content-Type", request.content_type), ("Content-Length", str(len(request.body)))]
    head = h11.Request(method=request.method, target=place.path + request.path, headers=headers)
    data = protocol.send(head) or b""
    if request.body:
        data += protocol.send(h11.Data(data=request.body)) or b""
    protocol.send(h11.EndOfMessage())
    return data


async def _resolve(place: Endpoint, allowed: Destinations | None) -> Sequence[str]:
    """Return the addresses of a host that may be reached, in the system's order."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT):
            entries = await loop.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Unanswered(f"{place.host} cannot be resolved: {_reason(error)}") from error
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
    if allowed is None:
        return addresses
    if allowed.mode == "off":
        raise Barred("requests to addresses in tasks are disabled for this worker (setting webhooks)")
    refusals = {address: allowed.refusal(place.host, address) for address in addresses}
    reachable = [address for address, refusal in refusals.items() if refusal is None]
    if not reachable:
        raise Barred("; ".join(filter(None, refusals.values())) or f"{place.host} has no address")
    return reachable


async def _connect(place: Endpoint, addresses: Sequence[str]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the first of these checked addresses that accepts. The name is not resolved again."""
    tls = (place.tls or _tls()) if place.is_secure else None
    name = (place.server_name or place.host) if place.is_secure else None
    last: Exception = OSError("it has no address")
    for address in addresses:
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT):
                return await asyncio.open_connection(address, place.port, ssl=tls, server_hostname=name)
        except (OSError, TimeoutError) as error:
            last = error
    raise Unanswered(f"{place.authority} cannot be reached: {_reason(last)}") from last


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"no connection within {_CONNECT_TIMEOUT:g} s"
    return str(error) or type(error).__name__
