"""A proxy in front of Postgres that can break a connection after a statement's execution, before its response arrives.

It can also hang: then it accepts data, but forwards nothing.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self
from urllib.parse import parse_qs, urlsplit

_NAME = ".s.PGSQL.5432"


class Cutting:
    """Forwards data both ways. When armed, drops the response to the next matching statement and disconnects."""

    def __init__(self, database_url: str, folder: Path) -> None:
        parts = urlsplit(database_url)
        self._server = str(Path(parse_qs(parts.query)["host"][0]) / _NAME)
        self.url = f"postgresql://{parts.netloc}{parts.path}?host={folder}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / _NAME))
        self._listener.listen()
        self._armed = b""
        self._is_forwarding = threading.Event()
        self._is_forwarding.set()
        self.cuts = 0

    def arm(self, statement: bytes) -> None:
        """Disconnect after the next statement that contains these bytes."""
        self._armed = statement

    def hang(self) -> None:
        self._is_forwarding.clear()

    def go_on(self) -> None:
        self._is_forwarding.set()

    @property
    def is_armed(self) -> bool:
        return bool(self._armed)

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="cutting", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed at the end of the test
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._server)
                pair = _Pair(client, server)
                threading.Thread(target=self._forward_statements, args=(pair,), daemon=True).start()
                threading.Thread(target=self._forward_responses, args=(pair,), daemon=True).start()

    def _forward_statements(self, pair: _Pair) -> None:
        for data in pair.read(pair.client):
            if self._armed and self._armed in data:
                self._armed = b""
                pair.is_doomed.set()
            self._is_forwarding.wait()
            with contextlib.suppress(OSError):
                pair.server.sendall(data)
        pair.close()

    def _forward_responses(self, pair: _Pair) -> None:
        for data in pair.read(pair.server):
            if pair.is_doomed.is_set():
                self.cuts += 1
                break
            self._is_forwarding.wait()
            with contextlib.suppress(OSError):
                pair.client.sendall(data)
        pair.close()


class _Pair:
    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.is_doomed = threading.Event()

    def read(self, end: socket.socket) -> Iterator[bytes]:
        with contextlib.suppress(OSError):  # either side disconnected
            while data := end.recv(65536):
                yield data

    def close(self) -> None:
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
