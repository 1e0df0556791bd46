"""One request over HTTP/1.1 and its answer, asynchronously: thousands can be under way in one process.

The protocol is that of h11, which is small, has no dependencies, and refuses what two readers could read differently;
a client with pools, redirects, cookies and proxies would do more than an executor should. Each request has a connection
of its own, which is closed behind the answer: what follows it there is nobody's.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple
from urllib.parse import quote, urlsplit

import h11

from orchestrator.domain.tasks.destinations import Destinations

_CONNECTING = 5.0
"""Seconds that a connection may take."""
_PART = 65_536
_LARGEST_HEAD = 65_536
_PORTS = {"http": 80, "https": 443}
_AS_IT_IS = "!#$%&'()*+,/:;=?@[]~"


class Unanswered(Exception):
    """No answer came: there is no connection, or it broke."""


class Unreadable(Exception):
    """What came is no answer that HTTP knows."""


class TooLarge(Exception):
    """What came is more than is read."""


class Barred(Exception):
    """The worker's operator lets nobody ask there."""


class Reply(NamedTuple):
    """What came back."""

    status: int
    body: bytes


class Place(NamedTuple):
    """An address, taken apart."""

    host: str
    port: int
    is_secure: bool
    path: str

    @classmethod
    def of(cls, url: str) -> Place:
        """Take an address apart that has been checked."""
        parts = urlsplit(url)
        path = quote(parts.path.rstrip("/"), safe=_AS_IT_IS)
        return cls(parts.hostname or "", parts.port or _PORTS[parts.scheme], parts.scheme == "https", path)

    @property
    def authority(self) -> str:
        """What the header Host says."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS["https" if self.is_secure else "http"] else f"{host}:{self.port}"


async def ask(
    place: Place,
    method: str,
    path: str,
    body: bytes,
    *,
    largest: int,
    allowed: Destinations | None = None,
    key: str = "",
) -> Reply:
    """Send a request, and return the answer, of up to so many bytes.

    With `allowed`, the host may only be one that this lets be reached. Cancelled, it closes the connection.
    """
    addresses = await _resolve(place, allowed)
    reader, writer = await _connect(place, addresses)
    try:
        return await _exchange(place, method, path, body, reader, writer, largest, key)
    except (OSError, EOFError) as error:
        raise Unanswered(f"the connection to {place.authority} broke: {_said(error)}") from error
    finally:
        transport = writer.transport
        with contextlib.suppress(OSError):
            transport.abort()  # what has not been sent by now is for nobody


async def _resolve(place: Place, allowed: Destinations | None) -> Sequence[str]:
    """Return the addresses of a host, in the system's order, that may be reached."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_CONNECTING):
            found = await loop.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Unanswered(f"{place.host} cannot be resolved: {_said(error)}") from error
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    if allowed is None:
        return addresses
    if allowed.mode == "off":
        raise Barred("requests to addresses that tasks give are turned off for this worker (setting webhooks)")
    refusals = {address: allowed.refusal(place.host, address) for address in addresses}
    reachable = [address for address, refusal in refusals.items() if refusal is None]
    if not reachable:
        raise Barred("; ".join(filter(None, refusals.values())) or f"{place.host} has no address")
    return reachable


async def _connect(place: Place, addresses: Sequence[str]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the first of some addresses that answers, and not to what the name is resolved to by then."""
    last: Exception = OSError("it has no address")
    for address in addresses:
        try:
            async with asyncio.timeout(_CONNECTING):
                return await asyncio.open_connection(
                    address,
                    place.port,
                    ssl=_tls() if place.is_secure else None,
                    server_hostname=place.host if place.is_secure else None,
                )
        except (OSError, TimeoutError) as error:
            last = error
    raise Unanswered(f"{place.authority} cannot be reached: {_said(last)}") from last


async def _exchange(
    place: Place,
    method: str,
    path: str,
    body: bytes,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    largest: int,
    key: str,
) -> Reply:
    line = h11.Connection(h11.CLIENT, max_incomplete_event_size=_LARGEST_HEAD)
    headers = [
        ("Host", place.authority),
        ("Content-Type", "application/json"),
        ("Accept", "application/json"),
        ("Content-Length", str(len(body))),
        ("Connection", "close"),
    ]
    if key:
        headers.append(("Authorization", f"Bearer {key}"))
    request = h11.Request(method=method, target=place.path + path, headers=headers)
    writer.write((line.send(request) or b"") + (line.send(h11.Data(data=body)) or b"" if body else b""))
    line.send(h11.EndOfMessage())
    # Nothing waits for all of it to be sent: whoever has its answer ready may have stopped reading.
    status, parts, size, has_ended = 0, list[bytes](), 0, False
    while True:
        try:
            event = line.next_event()
            if event is h11.NEED_DATA:
                data = await reader.read(_PART)
                has_ended = not data
                line.receive_data(data)
                continue
        except h11.RemoteProtocolError as error:
            if has_ended:
                raise Unanswered(f"{place.authority} closed the connection within its answer") from error
            raise Unreadable(f"{place.authority} answered in no way that HTTP knows: {_said(error)}") from error
        if isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            size += len(event.data)
            if size > largest:
                raise TooLarge(f"{place.authority} answered with more than {largest:,} bytes")
            parts.append(bytes(event.data))
        elif isinstance(event, h11.EndOfMessage):
            return Reply(status, b"".join(parts))
        elif isinstance(event, h11.ConnectionClosed):
            raise Unanswered(f"{place.authority} closed the connection without an answer")


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _said(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"nothing came within {_CONNECTING:g} s"
    return str(error) or type(error).__name__
