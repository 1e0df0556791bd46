"""Accepts connections, and drops at little cost those that no request can come of.

The servers of the event loop make a transport and a protocol for each connection before anything is known of it.
Clients that connect and leave in a tight loop are faster than that: the kernel's queue fills, and others wait in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable

from orchestrator.api.http_protocol import LONGEST_HEAD
from orchestrator.api.login_limits import neighbourhood
from orchestrator.telemetry import get_logger

log = get_logger("api")

_AT_ONCE = 200
"""Connections that are accepted before something else is done."""
_WINDOW = 10.0
"""Seconds over which new connections are counted."""
_PAUSE = 0.1
"""Seconds before the next try where the process or the system has no room for a connection."""
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class ConnectionRate:
    """New connections of each address; loopback and trusted proxies are exempt."""

    def __init__(self, per_second: float, is_exempt: Callable[[str], bool]) -> None:
        self._most = per_second * _WINDOW
        self._is_exempt = is_exempt
        self._counts: Counter[str] = Counter()
        self._ends = 0.0

    def admit(self, address: str, now: float) -> bool:
        """Count a connection, and say whether it is served."""
        if now >= self._ends:
            self._counts.clear()
            self._ends = now + _WINDOW
        near = neighbourhood(address)
        self._counts[near] += 1
        return self._counts[near] <= self._most or self._is_exempt(address)


class Acceptor:
    """Accepts the connections of one listening socket."""

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        rate: ConnectionRate,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._listener = listener
        self._protocol = protocol
        self._rate = rate
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._beginning: set[asyncio.Task[None]] = set()
        self._resumes: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accept no more."""
        if self._resumes is not None:
            self._resumes.cancel()
        self._loop.remove_reader(self._listener)

    def _resume(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        now = time.monotonic()
        for _ in range(_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _SCARCE:
                    self._rest(error)
                    return
                continue  # the client has left
            if not self._rate.admit(address[0], now) or _is_gone(connection):
                connection.close()
                continue
            task = self._loop.create_task(self._begin(connection))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    def _rest(self, error: OSError) -> None:
        log.warning("api.accept_paused error=%s", error.strerror)
        self._loop.remove_reader(self._listener)
        self._resumes = self._loop.call_later(_PAUSE, self._resume)

    async def _begin(self, connection: socket.socket) -> None:
        handshake = LONGEST_HEAD if self._tls else None
        with contextlib.suppress(OSError, asyncio.TimeoutError):  # the client has left, or speaks no TLS
            await self._loop.connect_accepted_socket(
                self._protocol, connection, ssl=self._tls, ssl_handshake_timeout=handshake
            )


def _is_gone(connection: socket.socket) -> bool:
    """Say whether the client has reset the connection, or has closed it and sent nothing before."""
    try:
        sent = connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return not sent or connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
