"""Asks the HTTP API of a cluster or a cloud, asynchronously.

Each request has a connection of its own: there are a few for each execution, and one watch for all of them. The
protocol is that of h11, which is small and refuses what two readers could read differently. Redirects are not followed,
and proxies of the environment are not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import h11
import msgspec

from orchestrator.workers.executors.protocol import Unreachable

_PORTS = {"http": 80, "https": 443}
_PART = 65_536
_AT_ONCE = 64
"""Requests of one API that are under way together; a watch is not among them."""

Token = Callable[[], Awaitable[str]]


class TooLarge(Exception):
    """What came is more than is read."""


@dataclass(frozen=True)
class Answer:
    """What an API has answered."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""

    @property
    def data(self) -> Any:
        """What the body says, as JSON; None if it says nothing that can be read."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None


@dataclass(frozen=True, kw_only=True)
class Api:
    """Where an API is, and how it lets one in."""

    url: str
    tls: ssl.SSLContext | None = None
    """How https is spoken: whom to believe, and who one is."""
    server_name: str | None = None
    """The name that the server's certificate has, where it is not that of the address."""
    token: Token | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    """What every request says besides."""
    timeout: float = 30.0
    """Seconds within which an answer must come."""
    largest: int = 64_000_000
    """Bytes of an answer that are read at most."""
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AT_ONCE), compare=False)

    async def ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        *,
        content_type: str = "application/json",
    ) -> Answer:
        """Send a request, and return the whole answer; Unreachable if none comes."""
        async with self.turns:
            try:
                async with asyncio.timeout(self.timeout):
                    async with self._open(method, path, query, body, content_type) as (answer, parts):
                        read, size = [], 0
                        async for part in parts:
                            read.append(part)
                            size += len(part)
                            if size > self.largest:
                                raise TooLarge(f"{self.url} answered with more than {self.largest:,} bytes")
                        return Answer(answer.status, answer.headers, b"".join(read))
            except TimeoutError as error:
                raise Unreachable(f"{self.url} did not answer within {self.timeout:g} s.") from error

    @asynccontextmanager
    async def lines(
        self, path: str, query: Mapping[str, str] | None = None, *, silence: float
    ) -> AsyncIterator[tuple[Answer, AsyncIterator[bytes]]]:
        """Yield the beginning of an answer, and its lines as they come; silence for so long ends in Unreachable.

        An answer that is no success is read whole, and has no lines.
        """
        async with self._open("GET", path, query, None, "") as (answer, parts):
            if answer.status != 200:
                async with asyncio.timeout(self.timeout):
                    body = b"".join([part async for part in parts])
                yield Answer(answer.status, answer.headers, body), _nothing()
                return
            yield answer, self._lines(parts, silence)

    async def _lines(self, parts: AsyncGenerator[bytes], silence: float) -> AsyncIterator[bytes]:
        rest: list[bytes] = []
        size = 0
        while True:
            try:
                async with asyncio.timeout(silence):
                    part = await anext(parts, None)
            except TimeoutError as error:
                raise Unreachable(f"{self.url} said nothing for {silence:g} s.") from error
            if part is None:
                break
            *whole, last = part.split(b"\n")
            for line in whole:
                yield b"".join([*rest, line])
                rest, size = [], 0
            rest.append(last)
            size += len(last)
            if size > self.largest:
                raise TooLarge(f"{self.url} sent a line of more than {self.largest:,} bytes")
        if last_line := b"".join(rest):
            yield last_line

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, query: Mapping[str, str] | None, body: Any, content_type: str
    ) -> AsyncIterator[tuple[Answer, AsyncGenerator[bytes]]]:
        """Send a request, and yield the head of the answer and the parts of its body."""
        parts = urlsplit(self.url)
        target = parts.path.rstrip("/") + quote(path, safe="/:") + (f"?{urlencode(query)}" if query else "")
        data = body if isinstance(body, bytes) else b"" if body is None else msgspec.json.encode(body)
        headers = [("Host", parts.netloc), ("Accept", "application/json"), ("Connection", "close")]
        headers += self.headers.items()
        if self.token is not None:
            headers.append(("Authorization", f"Bearer {await self.token()}"))
        if data or method in ("POST", "PUT", "PATCH"):
            headers += [("Content-Type", content_type), ("Content-Length", str(len(data)))]
        reader, writer = await self._connect(parts.hostname or "", parts.port or _PORTS[parts.scheme])
        try:
            line = h11.Connection(h11.CLIENT, max_incomplete_event_size=_PART)
            writer.write(line.send(h11.Request(method=method, target=target, headers=headers)) or b"")
            if data:
                writer.write(line.send(h11.Data(data=data)) or b"")
            line.send(h11.EndOfMessage())
            with contextlib.suppress(ConnectionError):  # who has its answer ready may have stopped reading
                await writer.drain()
            received = _events(line, reader)
            head = await anext(received)
            assert isinstance(head, h11.Response)
            said = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
            yield Answer(head.status_code, said), _bodies(received)
        except (OSError, h11.ProtocolError, StopAsyncIteration) as error:
            if isinstance(error, TimeoutError):
                raise
            raise Unreachable(f"{self.url} broke off its answer: {error or type(error).__name__}.") from error
        finally:
            with contextlib.suppress(OSError):
                writer.transport.abort()  # what has not been sent by now is for nobody

    async def _connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        name = (self.server_name or host) if self.tls is not None else None
        try:
            async with asyncio.timeout(self.timeout):
                return await asyncio.open_connection(host, port, ssl=self.tls, server_hostname=name)
        except (OSError, ssl.SSLError) as error:
            why = f"nothing came within {self.timeout:g} s" if isinstance(error, TimeoutError) else str(error)
            raise Unreachable(f"{self.url} cannot be reached: {why}.") from error


def tls_for(url: str) -> ssl.SSLContext | None:
    """Return how https is spoken, where it is."""
    return ssl.create_default_context() if url.startswith("https://") else None


async def _events(line: h11.Connection, reader: asyncio.StreamReader) -> AsyncGenerator[Any]:
    while True:
        event = line.next_event()
        if event is h11.NEED_DATA:
            line.receive_data(await reader.read(_PART))
        elif isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
            return
        elif not isinstance(event, h11.InformationalResponse):
            yield event


async def _bodies(received: AsyncGenerator[Any]) -> AsyncGenerator[bytes]:
    async for event in received:
        yield bytes(event.data)


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""
