"""A client that sends its whole body before it reads still receives the response that rejects the body."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from orchestrator.api import http_protocol
from orchestrator.api.bodies import MAX_SMALL_REQUEST
from orchestrator.api.http_protocol import TimedProtocol
from orchestrator.settings import load_settings
from tests.integration.serving import serving

_SENT = 20 * MAX_SMALL_REQUEST
"""More than the buffers of a connection hold."""


@pytest.fixture(scope="module")
def port(database_url: str, redis_url: str) -> Iterator[int]:
    settings = load_settings(environ={}, database_url=database_url, redis_url=redis_url)
    with serving(settings, http=TimedProtocol) as address:
        yield urlsplit(address).port or 0


def _send(port: int, head: bytes, body: bytes) -> bytes:
    """Send everything, then read until the server closes the connection."""
    got = b""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as link:
        link.sendall(head + b"Host: localhost\r\n")
        link.sendall(body)
        while more := link.recv(65_536):
            got += more
    return got


_HEAD = b"POST /api/v1/workflows/validate HTTP/1.1\r\n"


@pytest.mark.parametrize(
    "body",
    [
        b"Content-Length: %d\r\n\r\n" % _SENT + b" " * _SENT,
        b"Transfer-Encoding: chunked\r\n\r\n" + b"%x\r\n" % _SENT + b" " * _SENT + b"\r\n0\r\n\r\n",
    ],
    ids=["announced", "chunked"],
)
def test_a_client_that_sends_before_reading_receives_the_rejection(port: int, body: bytes) -> None:
    got = _send(port, _HEAD, body)
    assert got.startswith(b"HTTP/1.1 413"), got[:100]
    assert (got.count(b"HTTP/1.1 "), b"connection: close" in got) == (1, True)


def test_an_oversized_head_is_drained_before_the_connection_closes(port: int) -> None:
    assert _send(port, b"GET / HTTP/1.1\r\nX: " + b"a" * _SENT + b"\r\n", b"\r\n").startswith(b"HTTP/1.1 400")


def test_requests_after_a_rejected_request_are_not_served(port: int) -> None:
    length = b"Content-Length: %d\r\n\r\n" % _SENT
    got = _send(port, _HEAD, length + b" " * _SENT + b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (got[:12], got.count(b"HTTP/1.1 ")) == (b"HTTP/1.1 413", 1)


def test_draining_an_endless_body_stops_at_a_limit(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "MAX_DRAINED", MAX_SMALL_REQUEST)
    with pytest.raises(ConnectionError):
        _send(port, _HEAD, b"Transfer-Encoding: chunked\r\n\r\n" + b"1000000\r\n" + b" " * _SENT)


def test_a_client_that_stops_sending_is_disconnected(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "DRAIN_TIMEOUT", 0.1)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as link:
        link.sendall(_HEAD + b"Host: localhost\r\nContent-Length: %d\r\n\r\n" % _SENT)
        while link.recv(65_536):
            pass
        with pytest.raises(ConnectionError):  # fully closed, not half-closed
            while True:
                link.sendall(b" " * 1_000)
