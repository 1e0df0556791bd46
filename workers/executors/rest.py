"""The HTTP API of a cluster or a cloud: its address, credentials and timeouts.

There are a few requests for each execution, and one watch for all of them. `asking.py` has what all HTTP needs; here,
every failure on the way is Unreachable, and is tried again.
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
    Incoming,
    Place,
    Request,
    TooLarge,
    Unanswered,
    Unreadable,
    opened,
)
from orchestrator.workers.executors.protocol import Unreachable

TIMEOUT = 30.0
"""Seconds within which an API must answer, where nothing else is set."""
_AT_ONCE = 64
"""Requests of one API that are under way together; a watch is not among them."""


class Token(Protocol):
    """Credentials, as long as they are valid."""

    async def __call__(self) -> str:
        """Return it."""

    def forget(self, refused: str) -> bool:
        """Take it that one was refused, whatever time it had left; return whether another may be had at once."""


@dataclass(frozen=True, kw_only=True)
class Api:
    """Where an API is, and how it lets one in."""

    url: str
    tls: ssl.SSLContext | None = None
    """TLS: certificates to trust and the client's own; by default those of the system."""
    server_name: str | None = None
    """The name that the server's certificate has, where it is not that of the address."""
    token: Token | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of every request."""
    timeout: float = TIMEOUT
    """Seconds within which an answer must come, or begin to come where it is read line by line."""
    largest: int = 64_000_000
    """Bytes of an answer, or of a line, that are read at most."""
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
            with self._reaching():
                async with asyncio.timeout(self.timeout):
                    token = await self._token()
                    answer = await self._answer(self._request(method, path, query, token, body, content_type))
                    if self._may_ask_again(answer, token):
                        token = await self._token()
                        answer = await self._answer(self._request(method, path, query, token, body, content_type))
                    return answer

    async def _answer(self, request: Request) -> Answer:
        async with opened(self._place, request) as incoming:
            return await incoming.whole(self.largest)

    def _may_ask_again(self, answer: Answer, token: str) -> bool:
        """Say whether a request was refused for its token, so that nothing was done, and there may be a better one."""
        return answer.status == 401 and self.token is not None and self.token.forget(token)

    @asynccontextmanager
    async def lines(
        self, path: str, query: Mapping[str, str] | None = None, *, silence: float
    ) -> AsyncIterator[tuple[Answer, AsyncIterator[bytes]]]:
        """Yield the beginning of an answer, and its lines as they come; silence for so long ends in Unreachable.

        An answer that is no success is read whole, and has no lines.
        """
        async with AsyncExitStack() as stack:
            with self._reaching():
                async with asyncio.timeout(self.timeout):
                    token = await self._token()
                    request = self._request("GET", path, query, token)
                    incoming = await stack.enter_async_context(opened(self._place, request))
                    refusal = None if incoming.head.status == 200 else await incoming.whole(self.largest)
                    if refusal is not None:
                        self._may_ask_again(refusal, token)  # a reader of lines comes again
            if refusal is None:
                yield incoming.head, self._lines(incoming, silence)
            else:
                yield refusal, _nothing()

    async def _lines(self, incoming: Incoming, silence: float) -> AsyncIterator[bytes]:
        rest: list[bytes] = []
        size = 0
        while True:
            try:
                async with asyncio.timeout(silence):
                    part = await anext(incoming, None)
            except TimeoutError as error:
                raise Unreachable(f"{self.url} said nothing for {silence:g} s.") from error
            except (Unanswered, Unreadable) as error:
                raise Unreachable(f"{self.url}: {error}.") from error
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

    @property
    def _place(self) -> Place:
        return Place.of(self.url, self.tls, self.server_name or "")

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
    def _reaching(self) -> Iterator[None]:
        """Say of whatever breaks on the way that the API cannot be reached."""
        try:
            yield
        except (Unanswered, Unreadable) as error:
            raise Unreachable(f"{self.url}: {error}.") from error
        except TimeoutError as error:
            raise Unreachable(f"{self.url} did not answer within {self.timeout:g} s.") from error


def refusal(answer: Answer, what: str, said: str, may_pass: Collection[int]) -> Exception:
    """Return what to raise where an API refuses something: to try again if that may pass, and else to give up."""
    text = f"{what}: status {answer.status}{f', {said}' if said else ''}"
    return Unreachable(text) if answer.status in may_pass or answer.status >= 500 else GiveUp(f"{text}.")


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""
