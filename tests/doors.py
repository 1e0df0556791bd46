"""A TCP proxy that tests can close or freeze, to cut off a remote service that keeps running."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Door:
    """A TCP port that forwards to a Unix socket or to another local port until it is shut."""

    def __init__(self, behind: str | int) -> None:
        self._target = behind
        self.port = 0
        self._connections: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self._is_forwarding = threading.Event()
        self.open()

    def open(self) -> None:
        """Accept connections and forward data."""
        self._is_forwarding.set()
        if self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", self.port))
            self.port = self._listener.getsockname()[1]
            threading.Thread(target=self._listen, args=(self._listener,), daemon=True).start()

    def hang(self) -> None:
        """Accept connections and data, but forward nothing: clients get neither a refusal nor a reply."""
        self._is_forwarding.clear()

    def shut(self) -> None:
        """Refuse new connections and break the existing ones."""
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._connections.clear()
        self._is_forwarding.set()  # wake blocked threads; their sockets are closed

    def _listen(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.socket(socket.AF_INET if isinstance(self._target, int) else socket.AF_UNIX)
                try:
                    far.connect(("127.0.0.1", self._target) if isinstance(self._target, int) else self._target)
                except OSError:  # the service does not listen yet
                    near.close()
                    far.close()
                    continue
                self._connections += [near, far]
                for source, destination in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=(source, destination), daemon=True).start()

    def _forward(self, source: socket.socket, destination: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                self._is_forwarding.wait()
                destination.sendall(data)
        for end in (source, destination):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()
