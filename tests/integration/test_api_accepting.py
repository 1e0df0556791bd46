"""Connections that cannot bring a request are dropped before a protocol is made for them."""

from __future__ import annotations

import errno
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, cast

import pytest
import uvicorn

from orchestrator.api.app import create_app
from orchestrator.api.http_protocol import TimedProtocol
from orchestrator.api.server import ApiServer, ConnectionRate
from orchestrator.settings import Settings, load_settings
from tests.waiting import eventually

_RESET = struct.pack("ii", 1, 0)


@pytest.fixture(scope="module")
def settings(database_url: str, redis_url: str) -> Settings:
    return load_settings(environ={}, database_url=database_url, redis_url=redis_url)


class CreatedProtocols(list[TimedProtocol]):
    """All protocols created."""

    def __call__(self, **options: Any) -> TimedProtocol:
        self.append(TimedProtocol(**options))
        return self[-1]


@contextmanager
def serving(
    settings: Settings, made: CreatedProtocols, listener: socket.socket, rate: ConnectionRate
) -> Iterator[None]:
    app = create_app(settings)
    config = uvicorn.Config(app, log_config=None, http=cast("Any", made), ws="none")
    server = ApiServer(config, "http://here", app.state.close_streams, rate)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(40)


def _connect(listener: socket.socket, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(listener.getsockname(), timeout=60)
    connection.sendall(sent)
    return connection


def _health_status(listener: socket.socket) -> bytes:
    with _connect(listener, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n") as connection:
        try:
            return connection.recv(12)
        except ConnectionResetError:
            return b""


def test_disconnected_clients_cost_no_protocol(settings: Settings) -> None:
    made = CreatedProtocols()
    with closing(socket.create_server(("127.0.0.1", 0), backlog=2_000)) as listener:
        for sent, option in ((b"", None), (b"", _RESET), (b"POST /api/v1/tasks HTTP/1.1\r\nHo", _RESET)):
            for _ in range(200):
                with _connect(listener, sent) as connection:
                    if option is not None:
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)
        half_closed = _connect(listener, b"GET /healthz HTTP/1.0\r\n\r\n")
        half_closed.shutdown(socket.SHUT_WR)
        with serving(settings, made, listener, ConnectionRate(1, lambda _: True)), half_closed:
            assert _health_status(listener) == b"HTTP/1.1 200"
            assert half_closed.recv(12) == b"HTTP/1.1 200"
    assert len(made) == 2


def test_the_rate_of_new_connections_per_address_is_limited(settings: Settings) -> None:
    made = CreatedProtocols()
    listener = socket.create_server(("127.0.0.1", 0))
    with closing(listener), serving(settings, made, listener, ConnectionRate(0.3, lambda _: False)):
        found = [_health_status(listener) for _ in range(5)]
    assert found[:3] == [b"HTTP/1.1 200"] * 3
    assert (found[3:], len(made)) == ([b"", b""], 3)


def test_the_connection_rate_is_counted_per_address_over_ten_seconds() -> None:
    rate = ConnectionRate(0.2, lambda address: address == "10.0.0.1")

    def admit(now: float, *addresses: str) -> list[bool]:
        return [rate.admit(address, now) for address in addresses]

    assert admit(100.0, *["203.0.113.9"] * 3, "203.0.113.8") == [True, True, False, True]
    assert admit(100.0, *["10.0.0.1"] * 9) == [True] * 9
    assert admit(109.9, "203.0.113.9") == [False]
    assert admit(110.0, *["203.0.113.9"] * 3) == [True, True, False]
    one_host = ("2001:db8::1", "2001:db8::2", "2001:db8::3", "2001:db8:0:1::1")
    assert admit(111.0, *one_host) == [True, True, False, True]
    assert admit(112.0, *(f"::ffff:198.51.100.{number}" for number in range(5))) == [True] * 5


def test_accepting_resumes_after_the_server_ran_out_of_file_descriptors(settings: Settings) -> None:
    class Full(socket.socket):
        is_full = True

        def accept(self) -> Any:
            if self.is_full:
                seen.set()
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    seen = threading.Event()
    with closing(Full()) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with serving(settings, CreatedProtocols(), listener, ConnectionRate(9, lambda _: False)):
            asked: list[bytes] = []
            client = threading.Thread(target=lambda: asked.append(_health_status(listener)))
            client.start()
            assert seen.wait(60)
            listener.is_full = False
            eventually(lambda: asked == [b"HTTP/1.1 200"], "it accepts again")
            client.join()
