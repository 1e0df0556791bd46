"""A socket in front of Postgres that can break a connection when a statement is done and nobody has heard of it yet.

It can also hang: then it takes what it is sent, and says nothing.
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
    """Passes bytes on both ways. When armed, it keeps back the answer to the next matching statement, and hangs up."""

    def __init__(self, database_url: str, folder: Path) -> None:
        parts = urlsplit(database_url)
        self._server = str(Path(parse_qs(parts.query)["host"][0]) / _NAME)
        self.url = f"postgresql://{parts.netloc}{parts.path}?host={folder}"
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(folder / _NAME))
        self._listening.listen()
        self._armed = b""
        self._flows = threading.Event()
        self._flows.set()
        self.cuts = 0

    def arm(self, statement: bytes) -> None:
        """Cut at the next statement that holds these bytes."""
        self._armed = statement

    def hang(self) -> None:
        """Pass nothing on from now on."""
        self._flows.clear()

    def go_on(self) -> None:
        """Pass on what was kept back, and what comes."""
        self._flows.set()

    @property
    def is_armed(self) -> bool:
        return bool(self._armed)

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="cutting", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed: the test is over
            while True:
                client, _ = self._listening.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._server)
                both = _Pair(client, server)
                threading.Thread(target=self._forward, args=(both,), daemon=True).start()
                threading.Thread(target=self._back, args=(both,), daemon=True).start()

    def _forward(self, pair: _Pair) -> None:
        for data in pair.read(pair.client):
            if self._armed and self._armed in data:
                self._armed = b""
                pair.is_doomed.set()
            self._flows.wait()
            with contextlib.suppress(OSError):
                pair.server.sendall(data)
        pair.close()

    def _back(self, pair: _Pair) -> None:
        for data in pair.read(pair.server):
            if pair.is_doomed.is_set():
                self.cuts += 1
                break
            self._flows.wait()
            with contextlib.suppress(OSError):
                pair.client.sendall(data)
        pair.close()


class _Pair:
    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.is_doomed = threading.Event()

    def read(self, end: socket.socket) -> Iterator[bytes]:
        with contextlib.suppress(OSError):  # either side hung up
            while data := end.recv(65536):
                yield data

    def close(self) -> None:
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
