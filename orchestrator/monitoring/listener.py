"""A small HTTP server for monitoring: /metrics, /healthz and /readyz, and nothing else.

It needs no thread of its own: a worker's parent forks, so it serves from the loop in which it waits for everything. A
request is a few hundred bytes, an answer fits a socket's buffer, and a slow client is dropped.
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
_MOST_OPEN = 16
"""Connections at a time; later ones wait for one to be closed."""
_LONGEST_REQUEST = 16_384
_TIMEOUT = 5.0
"""Seconds that a request may take to arrive, and an answer to leave."""
_TURN = 0.5
"""Seconds after which a thread that serves looks whether it is wanted any longer."""
_TRY_AGAIN = 5.0
"""Seconds until an address that was taken is tried again: a worker that drains may have it a little longer."""
ELSEWHERE = "the log of this process says why"
"""Said instead of a reason to callers on other machines."""
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


class Observed(Protocol):
    """A process that is asked how it is."""

    def metrics(self) -> Iterable[Family]:
        """Return what is measured."""

    def obstacles(self) -> Mapping[str, str]:
        """Return what keeps the process from its work, by what it is about; nothing where it can work."""


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of `host:port`, `[::1]:port`, or a port alone, which only this machine can reach."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if colon else LOOPBACK
    if not port.isascii() or not port.isdecimal() or int(port) > 65_535 or not host:
        raise ConfigurationError(
            f"Setting metrics: expected a port, which only this machine can reach, or host:port, found {text!r:.100}."
        )
    return host, int(port)


class Listener:
    """Answers one request after the other."""

    def __init__(self, address: str, observed: Observed, log: logging.Logger) -> None:
        self._host, self._port = parse_address(address)
        self._observed = observed
        self._log = log
        self._socket: socket.socket | None = None
        self._open_at = 0.0
        self._open: dict[socket.socket, tuple[float, bytearray]] = {}
        """Connections that have not said all yet: since when, and what they have said."""

    def waits_for(self) -> list[socket.socket]:
        """Return what to wait for; where the address was taken, it is tried again now and then."""
        now = time.monotonic()
        if self._socket is None and now >= self._open_at:
            self._listen(now)
        for connection in [one for one, (since, _) in self._open.items() if now - since > _TIMEOUT]:
            self._drop(connection)
        takes_more = self._socket is not None and len(self._open) < _MOST_OPEN
        return [*self._open, *([self._socket] if takes_more and self._socket is not None else [])]

    def serve(self, ready: Iterable[object]) -> None:
        """Take in what has come, and answer what is complete."""
        for one in ready:
            if one is self._socket and self._socket is not None:
                self._accept(self._socket)
            elif isinstance(one, socket.socket) and one in self._open:
                self._read(one)

    def start(self) -> None:
        """Serve in a thread, as long as the process lives."""
        self.waits_for()
        threading.Thread(target=self._run, args=(threading.Event(),), name="metrics", daemon=True).start()

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """Serve in a thread for a while."""
        over = threading.Event()
        thread = threading.Thread(target=self._run, args=(over,), name="metrics", daemon=True)
        self.waits_for()
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def close(self) -> None:
        """Close everything; a fork must not keep what its parent listens to."""
        for one in [*self._open, *([self._socket] if self._socket is not None else [])]:
            one.close()
        self._open.clear()
        self._socket, self._open_at = None, float("inf")

    def _run(self, over: threading.Event) -> None:
        while not over.is_set():
            waits_for = self.waits_for()
            if waits_for:
                self.serve(_ready(waits_for))
            else:
                over.wait(_TURN)

    def _listen(self, now: float) -> None:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, kind, protocol)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                listener.listen(_MOST_OPEN)
                listener.setblocking(False)
            except OSError:
                listener.close()
                raise
        except OSError as error:
            if not self._open_at:
                self._log.error(
                    "metrics.not_served host=%s port=%d error=%s: the process tries again",
                    self._host,
                    self._port,
                    error.strerror,
                )
            self._open_at = now + _TRY_AGAIN
            return
        self._socket = listener
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._log.info("metrics.ready host=%s port=%d path=/metrics", host, listener.getsockname()[1])

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # it has gone again
            return
        connection.setblocking(False)
        self._open[connection] = time.monotonic(), bytearray()

    def _read(self, connection: socket.socket) -> None:
        said = self._open[connection][1]
        try:
            more = connection.recv(_LONGEST_REQUEST)
        except BlockingIOError:
            return
        except OSError:
            more = b""
        said += more
        if b"\r\n\r\n" in said:
            self._send(connection, self._answer(bytes(said), _is_near(connection)))
        elif more and len(said) < _LONGEST_REQUEST:
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
        del self._open[connection]
        connection.close()

    def _answer(self, request: bytes, is_near: bool) -> bytes:
        words = request.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(words) != 3:
            return _response(400, {"error": "this is no HTTP request"})
        method, target = words[:2]
        if method not in ("GET", "HEAD"):
            return _response(405, {"error": f"{method[:20]} is not served, only GET"}, allow="GET, HEAD")
        try:
            found = self._found(target.partition("?")[0], is_near)
        except Exception:  # noqa: BLE001  # monitoring must not end what it watches
            self._log.exception("metrics.failed")
            found = _response(503, {"error": "metrics could not be told; the log says why"})
        return found if method == "GET" else found[: found.index(b"\r\n\r\n") + 4]

    def _found(self, path: str, is_near: bool) -> bytes:
        if path == "/metrics":
            return _response(200, render(self._observed.metrics()))
        if path == "/healthz":
            return _response(200, {"status": "ok"})
        if path == "/readyz":
            obstacles = dict(self._observed.obstacles())
            if not is_near:  # the reasons name servers
                obstacles = dict.fromkeys(obstacles, ELSEWHERE)
            status = {"status": "not ready" if obstacles else "ready"}
            return _response(503 if obstacles else 200, status | ({"obstacles": obstacles} if obstacles else {}))
        return _response(404, {"error": "served are /metrics, /healthz and /readyz"})


def _ready(waits_for: Iterable[socket.socket]) -> list[object]:
    """Wait a while for any of these; return which are ready."""
    with selectors.DefaultSelector() as selector:
        for one in waits_for:
            selector.register(one, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(_TURN)]


def _is_near(connection: socket.socket) -> bool:
    """Say whether the caller is on this machine."""
    try:
        return ipaddress.ip_address(connection.getpeername()[0].partition("%")[0]).is_loopback
    except (OSError, ValueError, IndexError):  # gone, or of another kind
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
    """Serve the metrics of a process, in a thread, if it was given an address."""
    if address:
        Listener(address, observed, log).start()
