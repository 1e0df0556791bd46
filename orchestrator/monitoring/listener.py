"""A small HTTP server for monitoring: /metrics, /healthz and /readyz.

It needs no thread: a worker's parent forks, so it serves from its own event loop. A request is a few hundred bytes, a
response fits the socket buffer, and a slow client is dropped.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from orchestrator.errors import ConfigurationError
from orchestrator.monitoring.exposition import CONTENT_TYPE, Family, render

LOOPBACK = "127.0.0.1"
_MAX_CONNECTIONS = 16
"""Open connections, at most. Further ones wait until one closes."""
_MAX_REQUEST = 16_384
_TIMEOUT = 5.0
"""Seconds for a request to arrive, and for a response to be sent."""
_CHECK_INTERVAL = 0.5
"""Seconds after which a serving thread checks whether to stop."""
_RETRY_INTERVAL = 5.0
"""Seconds until another attempt to bind an address in use: a draining worker may hold it a little longer."""
REASON_HIDDEN = "the log of this process says why"
"""Shown instead of a reason to callers on other machines."""
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


class Observed(Protocol):
    """A process that reports metrics and readiness."""

    def metrics(self) -> Iterable[Family]:
        """Return the current metrics."""

    def obstacles(self) -> Mapping[str, str]:
        """Return what keeps the process from working, by subject; empty if it can work."""


def parse_address(text: str) -> tuple[str, int]:
    """Parse `host:port`, `[::1]:port`, or a port alone, which only this machine can reach."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if colon else LOOPBACK
    if not port.isascii() or not port.isdecimal() or len(port) > 5 or int(port) > 65_535 or not host:
        raise ConfigurationError(
            f"Setting metrics: expected a port, which only this machine can reach, or host:port, found {text!r:.100}."
        )
    return host, int(port)


class Listener:
    """Answers requests one after the other."""

    def __init__(self, address: str, observed: Observed, log: logging.Logger) -> None:
        self._host, self._port = parse_address(address)
        self._observed = observed
        self._log = log
        self._socket: socket.socket | None = None
        self._retry_at = 0.0
        self._connections: dict[socket.socket, tuple[float, bytearray]] = {}
        """Connections with incomplete requests: the time of the connect, and the bytes received."""

    def waits_for(self) -> list[socket.socket]:
        """Return the sockets to wait for. Retry to bind the address if it was in use."""
        now = time.monotonic()
        if self._socket is None and now >= self._retry_at:
            self._listen(now)
        for connection in [peer for peer, (since, _) in self._connections.items() if now - since > _TIMEOUT]:
            self._drop(connection)
        takes_more = self._socket is not None and len(self._connections) < _MAX_CONNECTIONS
        return [*self._connections, *([self._socket] if takes_more and self._socket is not None else [])]

    def serve(self, ready: Iterable[object]) -> None:
        """Read from ready sockets, and answer complete requests."""
        for ready_socket in ready:
            if ready_socket is self._socket and self._socket is not None:
                self._accept(self._socket)
            elif isinstance(ready_socket, socket.socket) and ready_socket in self._connections:
                self._read(ready_socket)

    def start(self) -> None:
        """Serve in a thread for the life of the process."""
        self.waits_for()
        threading.Thread(target=self._run, args=(threading.Event(),), name="metrics", daemon=True).start()

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """Serve in a thread within this block."""
        stopping = threading.Event()
        thread = threading.Thread(target=self._run, args=(stopping,), name="metrics", daemon=True)
        self.waits_for()
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()

    def close(self) -> None:
        """Close all sockets, for example after a fork: a child must not keep the parent's listener."""
        for open_socket in [*self._connections, *([self._socket] if self._socket is not None else [])]:
            open_socket.close()
        self._connections.clear()
        self._socket, self._retry_at = None, float("inf")

    def _run(self, stopping: threading.Event) -> None:
        while not stopping.is_set():
            waits_for = self.waits_for()
            if waits_for:
                self.serve(_ready(waits_for))
            else:
                stopping.wait(_CHECK_INTERVAL)

    def _listen(self, now: float) -> None:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, kind, protocol)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                listener.listen(_MAX_CONNECTIONS)
                listener.setblocking(False)
            except OSError:
                listener.close()
                raise
        except OSError as error:
            if not self._retry_at:
                self._log.error(
                    "metrics.not_served host=%s port=%d error=%s: the process retries",
                    self._host,
                    self._port,
                    error.strerror,
                )
            self._retry_at = now + _RETRY_INTERVAL
            return
        self._socket = listener
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._log.info("metrics.ready host=%s port=%d path=/metrics", host, listener.getsockname()[1])

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # the client has gone
            return
        connection.setblocking(False)
        self._connections[connection] = time.monotonic(), bytearray()

    def _read(self, connection: socket.socket) -> None:
        received = self._connections[connection][1]
        try:
            more = connection.recv(_MAX_REQUEST)
        except BlockingIOError:
            return
        except OSError:
            more = b""
        received += more
        if b"\r\n\r\n" in received:
            self._send(connection, self._answer(bytes(received), _is_local(connection)))
        elif more and len(received) < _MAX_REQUEST:
            return
        self._drop(connection)

    def _send(self, connection: socket.socket, answer: bytes) -> None:
        try:
            connection.settimeout(_TIMEOUT)
            connection.sendall(answer)
            connection.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._log.debug("metrics.client_gone error=%s", error)

    def _drop(self, connection: socket.socket) -> None:
        del self._connections[connection]
        connection.close()

    def _answer(self, request: bytes, is_local: bool) -> bytes:
        words = request.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(words) != 3:
            return _response(400, {"error": "this is not an HTTP request"})
        method, target = words[:2]
        if method not in ("GET", "HEAD"):
            return _response(405, {"error": f"{method[:20]} is not served, only GET"}, allow="GET, HEAD")
        try:
            response = self._route(target.partition("?")[0], is_local)
        except Exception:  # noqa: BLE001  # monitoring must not end what it watches
            self._log.exception("metrics.failed")
            response = _response(503, {"error": "metrics could not be read; the log says why"})
        return response if method == "GET" else response[: response.index(b"\r\n\r\n") + 4]

    def _route(self, path: str, is_local: bool) -> bytes:
        if path == "/metrics":
            return _response(200, render(self._observed.metrics()))
        if path == "/healthz":
            return _response(200, {"status": "ok"})
        if path == "/readyz":
            obstacles = dict(self._observed.obstacles())
            if not is_local:  # the reasons name servers
                obstacles = dict.fromkeys(obstacles, REASON_HIDDEN)
            status = {"status": "not ready" if obstacles else "ready"}
            return _response(503 if obstacles else 200, status | ({"obstacles": obstacles} if obstacles else {}))
        return _response(404, {"error": "not found; paths are /metrics, /healthz and /readyz"})


def _ready(waits_for: Iterable[socket.socket]) -> list[object]:
    with selectors.DefaultSelector() as selector:
        for waiting in waits_for:
            selector.register(waiting, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(_CHECK_INTERVAL)]


def _is_local(connection: socket.socket) -> bool:
    try:
        return ipaddress.ip_address(connection.getpeername()[0].partition("%")[0]).is_loopback
    except (OSError, ValueError, IndexError):  # the connection is gone, or is no IP connection
        return False


def _response(status: int, body: bytes | Mapping[str, object], *, allow: str = "") -> bytes:
    is_text = isinstance(body, bytes)
    data = body if isinstance(body, bytes) else json.dumps(body).encode() + b"\n"
    head = [
        f"HTTP/1.1 {status} {_REASONS[status]}",
        f"Content-Type: {CONTENT_TYPE if is_text else 'application/json'}",
        f"Content-Length: {len(data)}",
        "Cache-Control: no-store",
        "Connection: close",
        *([f"Allow: {allow}"] if allow else []),
    ]
    return "\r\n".join([*head, "", ""]).encode() + data


def serve_metrics(address: str, observed: Observed, log: logging.Logger) -> None:
    """Serve the metrics of a process in a thread, if an address is set."""
    if address:
        Listener(address, observed, log).start()
