"""Ports that can be shut: a remote side that goes away and comes back, while what it does goes on."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Door:
    """A port that leads to a socket, until it is shut."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.port = 0
        self._talks: list[socket.socket] = []
        self.open()

    def open(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._listen, args=(self._listener,), daemon=True).start()

    def shut(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for talk in self._talks:
            with suppress(OSError):
                talk.shutdown(socket.SHUT_RDWR)
        self._talks.clear()

    def _listen(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.socket(socket.AF_UNIX)
                try:
                    far.connect(self._path)
                except OSError:  # nobody is behind it yet
                    near.close()
                    far.close()
                    continue
                self._talks += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=_pass_on, args=(one, other), daemon=True).start()


def _pass_on(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(65_536):
            other.sendall(data)
    for end in (one, other):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    one.close()
