"""Ports that can be shut: a remote side that goes away and comes back, while what it does goes on."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Door:
    """A port that leads to a socket, or to another port of this machine, until it is shut."""

    def __init__(self, behind: str | int) -> None:
        self._behind = behind
        self.port = 0
        self._talks: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self._lets_pass = threading.Event()
        self.open()

    def open(self) -> None:
        """Let everybody through."""
        self._lets_pass.set()
        if self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", self.port))
            self.port = self._listener.getsockname()[1]
            threading.Thread(target=self._listen, args=(self._listener,), daemon=True).start()

    def hang(self) -> None:
        """Take whatever comes, and pass on nothing: nobody is refused, and nobody is answered."""
        self._lets_pass.clear()

    def shut(self) -> None:
        """Refuse everybody, and break off what is under way."""
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        for talk in self._talks:
            with suppress(OSError):
                talk.shutdown(socket.SHUT_RDWR)
        self._talks.clear()
        self._lets_pass.set()  # what was held back finds that there is nobody any more

    def _listen(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.socket(socket.AF_INET if isinstance(self._behind, int) else socket.AF_UNIX)
                try:
                    far.connect(("127.0.0.1", self._behind) if isinstance(self._behind, int) else self._behind)
                except OSError:  # nobody is behind it yet
                    near.close()
                    far.close()
                    continue
                self._talks += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(65_536):
                self._lets_pass.wait()
                other.sendall(data)
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        one.close()
