"""The HTTP API of a cluster or cloud: its address, credentials and timeouts.

An executor sends a few requests for each execution, and watches all executions with one request. Connection failures
are raised as Unreachable, which the driver retries.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import quote, urlencode

import msgspec

from orchestrator.errors import GiveUp
from orchestrator.workers.executors.asking import (
    Answer,
    Endpoint,
    Incoming,
    Request,
    TooLarge,
    Unanswered,
    Unreadable,
    open_response,
)
from orchestrator.workers.executors.protocol import Unreachable

TIMEOUT = 30.0
"""Default timeout of a request in seconds."""
_MAX_CONCURRENT = 64
"""Concurrent requests to an API, not counting a watch."""


class Token(Protocol):
    """Credentials that are renewed when they expire."""

    async def __call__(self) -> str:
        """Return a valid token."""

    def forget(self, refused: str) -> bool:
        """Discard a token that was refused before it expired. Return whether a new one may be available at once."""


@dataclass(frozen=True, kw_only=True)
class Api:
    """The address of an API, and the credentials for it."""

    url: str
    tls: ssl.SSLContext | None = None
    """TLS context with trusted certificates and a client certificate; by default that of the system."""
    server_name: str | None = None
    """The name in the server's certificate, if it differs from the host."""
    token: Token | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of every request."""
    timeout: float = TIMEOUT
    """Seconds within which the answer must arrive, or its beginning if it is read line by line."""
    max_size: int = 64_000_000
    """Bytes of an answer, or of one line, at most."""
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_CONCURRENT), compare=False)

    async def ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        *,
        content_type: str = "application/json",
    ) -> Answer:
        """Send a request, and return the whole answer. Raise Unreachable if none arrives."""
        async with self.turns:
            with self._as_unreachable():
                async with asyncio.timeout(self.timeout):
                    token = await self._token()
                    answer = await self._answer(self._request(method, path, query, token, body, content_type))
                    if self._may_retry(answer, token):
                        token = await self._token()
                        answer = await self._answer(self._request(method, path, query, token, body, content_type))
                    return answer

    async def _answer(self, request: Request) -> Answer:
        async with open_response(self._place, request) as incoming:
            return await incoming.read_body(self.max_size)

    def _may_retry(self, answer: Answer, token: str) -> bool:
        """Return whether a request was refused because of its token, and another token may be available."""
        return answer.status == 401 and self.token is not None and self.token.forget(token)

    @asynccontextmanager
    async def lines(
        self, path: str, query: Mapping[str, str] | None = None, *, silence: float
    ) -> AsyncIterator[tuple[Answer, AsyncIterator[bytes]]]:
        """Yield the head of an answer, and its lines as they arrive. Raise Unreachable after `silence` idle seconds.

        The answer to a failed request is read whole, and has no lines.
        """
        async with AsyncExitStack() as stack:
            with self._as_unreachable():
                async with asyncio.timeout(self.timeout):
                    token = await self._token()
                    request = self._request("GET", path, query, token)
                    incoming = await stack.enter_async_context(open_response(self._place, request))
                    refusal = None if incoming.head.status == 200 else await incoming.read_body(self.max_size)
                    if refusal is not None:
                        self._may_retry(refusal, token)  # readers of lines connect again
            if refusal is None:
                yield incoming.head, self._lines(incoming, silence)
            else:
                yield refusal, _no_lines()

    async def _lines(self, incoming: Incoming, silence: float) -> AsyncIterator[bytes]:
        line_parts: list[bytes] = []
        size = 0
        while True:
            try:
                async with asyncio.timeout(silence):
                    part = await anext(incoming, None)
            except TimeoutError as error:
                raise Unreachable(f"{self.url} sent nothing for {silence:g} s.") from error
            except (Unanswered, Unreadable) as error:
                raise Unreachable(f"{self.url}: {error}.") from error
            if part is None:
                break
            *complete, last = part.split(b"\n")
            for line in complete:
                yield b"".join([*line_parts, line])
                line_parts, size = [], 0
            line_parts.append(last)
            size += len(last)
            if size > self.max_size:
                raise TooLarge(f"{self.url} sent a line of more than {self.max_size:,} bytes")
        if last_line := b"".join(line_parts):
            yield last_line

    @property
    def _place(self) -> Endpoint:
        return Endpoint.of(self.url, self.tls, self.server_name or "")

    async def _token(self) -> str:
        return "" if self.token is None else await self.token()

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        token: str,
        body: Any = None,
        content_type: str = "application/json",
    ) -> Request:
        target = quote(path, safe="/:") + (f"?{urlencode(query)}" if query else "")
        data = body if isinstance(body, bytes) else b"" if body is None else msgspec.json.encode(body)
        headers = [*self.headers.items()]
        if self.token is not None:
            headers.append(("Authorization", f"Bearer {token}"))
        return Request(method, target, data, headers, content_type)

    @contextmanager
    def _as_unreachable(self) -> Iterator[None]:
        """Convert connection errors into Unreachable."""
        try:
            yield
        except (Unanswered, Unreadable) as error:
            raise Unreachable(f"{self.url}: {error}.") from error
        except TimeoutError as error:
            raise Unreachable(f"{self.url} did not answer within {self.timeout:g} s.") from error


def refusal(answer: Answer, action: str, detail: str, temporary: Collection[int]) -> Exception:
    """Return the error for a refused request: Unreachable if the status may be temporary, else GiveUp."""
    text = f"{action}: status {answer.status}{f', {detail}' if detail else ''}"
    return Unreachable(text) if answer.status in temporary or answer.status >= 500 else GiveUp(f"{text}.")


async def _no_lines() -> AsyncIterator[bytes]:
    return
    yield b""
