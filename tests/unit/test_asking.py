"""The HTTP client of the executors: what it rejects, how long it waits, and how much it reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import pytest

from orchestrator.domain.tasks.destinations import parse_destinations
from orchestrator.workers.executors.asking import (
    Answer,
    Barred,
    Endpoint,
    Request,
    TooLarge,
    Unanswered,
    Unreadable,
    ask,
)
from orchestrator.workers.executors.protocol import Unreachable
from orchestrator.workers.executors.rest import Api

T = TypeVar("T")


def with_server(said: bytes, steps: Callable[[str], Awaitable[T]], *, stays: bool = False) -> tuple[T, bytes]:
    """Run `steps` against a server that answers `said`, and then closes the connection unless it stays."""
    heard: list[bytes] = []
    talks: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talks.add(asyncio.current_task())
        with suppress(OSError, EOFError):  # clients may close the connection early
            heard.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(said)
            await writer.drain()
            if stays:
                await reader.read()
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    async def go() -> T:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            try:
                async with asyncio.timeout(60):
                    return await steps(f"http://127.0.0.1:{port}/base")
            finally:
                await asyncio.gather(*filter(None, talks))

    return asyncio.run(go()), heard[0] if heard else b""


def asked(said: bytes, **more: Any) -> tuple[Answer, bytes]:
    request = Request("POST", "/x?a=1", b"{}", [("Authorization", "Bearer k")])
    return with_server(said, lambda url: ask(Endpoint.of(url), request, **{"max_size": 100, **more}))


def test_a_request_is_sent_and_its_answer_is_parsed() -> None:
    answer, heard = asked(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-A: b\r\n\r\n[]")
    assert (answer.status, answer.data, answer.headers["x-a"]) == (200, [], "b")
    assert heard.startswith(b"POST /base/x?a=1 HTTP/1.1\r\n")
    assert b"Authorization: Bearer k" in heard


def test_a_redirect_is_returned_and_not_followed() -> None:
    answer, _ = asked(b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n")
    assert answer.status == 302


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"", Unanswered),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n[", Unanswered),
        (b"\x00\xff no HTTP at all\r\n\r\n", Unreadable),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n[]", Unreadable),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n" + b"x" * 101, TooLarge),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000, Unreadable),
    ],
    ids=["nothing", "a part", "garbage", "two lengths", "too much", "a head without end"],
)
def test_invalid_answers_raise_an_error(said: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        asked(said)


def test_destinations_that_are_not_allowed_are_rejected() -> None:
    with pytest.raises(Barred):
        asked(b"", allowed=parse_destinations("public", ""))
    with pytest.raises(Barred, match="webhooks"):
        asked(b"", allowed=parse_destinations("off", ""))


def test_a_server_that_accepts_but_never_answers_is_unreachable() -> None:
    async def whole(url: str) -> None:
        await Api(url=url, timeout=0.2).ask("GET", "/jobs")

    async def lines(url: str) -> None:
        async with Api(url=url, timeout=0.2).lines("/jobs", silence=60):
            raise AssertionError("it has not answered")

    async def silent(url: str) -> None:
        async with Api(url=url).lines("/jobs", silence=0.2) as (answer, parts):
            assert (answer.status, await anext(aiter(parts))) == (200, b"one")
            await anext(aiter(parts))

    for steps in (whole, lines):
        with pytest.raises(Unreachable, match="did not answer within 0.2 s"):
            with_server(b"", steps, stays=True)
    with pytest.raises(Unreachable, match="sent nothing for 0.2 s"):
        with_server(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\none\ntw", silent, stays=True)


def test_an_error_response_is_read_up_to_a_limit() -> None:
    async def steps(url: str) -> None:
        async with Api(url=url, max_size=10).lines("/jobs", silence=60):
            raise AssertionError("it is no success")

    with pytest.raises(TooLarge):
        with_server(b"HTTP/1.1 500 No\r\nContent-Length: 99\r\n\r\n" + b"x" * 99, steps)
