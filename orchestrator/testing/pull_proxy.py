"""A proxy between a client that polls for work and the API: it records every exchange, and can break some of them."""

from __future__ import annotations

import http.client
import json
import select
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import urlsplit

Body = dict[str, Any]
_LONGEST = 90.0
"""Seconds that the API may take for an answer."""


class Exchange(NamedTuple):
    """One request and its answer."""

    at: float
    """When the request came, by the monotonic clock."""
    answered_at: float
    what: str
    """The last part of the path: `poll`, `heartbeat`, `complete` or `return`."""
    asked: Body
    status: int
    """0 if the client got no answer."""
    answered: Body


class Fault(NamedTuple):
    """What happens to a request."""

    status: int = 0
    """The answer in place of the API's; 0 closes the connection without one."""
    reaches_api: bool = False
    """The API gets the request, and its answer is lost."""
    retry_after: int = 1


class RecordingProxy:
    """Serves on a port of its own, in threads."""

    def __init__(self, target: str) -> None:
        self.exchanges: list[Exchange] = []
        self.fault: Callable[[str, Body], Fault | None] = lambda _what, _asked: None
        """Decides what happens to a request; None: nothing."""
        proxy, upstream = self, urlsplit(target)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                began, what = time.monotonic(), self.path.rpartition("/")[2]
                data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                asked = _decoded(data)
                fault = proxy.fault(what, asked)
                status, answer = 0, b""
                if fault is None or fault.reaches_api:
                    status, answer = self._forward(data)
                if fault is not None:
                    status, answer = fault.status, b"{}"
                proxy.exchanges.append(Exchange(began, time.monotonic(), what, asked, status, _decoded(answer)))
                if status == 0:
                    self.close_connection = True
                    return
                self.send_response(status)
                if status in (429, 503):
                    self.send_header("Retry-After", str(fault.retry_after if fault else 1))
                self.send_header("Content-Type", "application/json")
                if status != 204:
                    self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def _forward(self, data: bytes) -> tuple[int, bytes]:
                """Return the answer of the API; 0 if there is none, or the client is gone before it comes."""
                upward = http.client.HTTPConnection(upstream.hostname or "", upstream.port, timeout=_LONGEST)
                try:
                    sent = {
                        name: self.headers[name] for name in ("Authorization", "Content-Type") if self.headers[name]
                    }
                    upward.request("POST", self.path, data, sent)
                    assert upward.sock is not None
                    readable, _, _ = select.select([upward.sock, self.connection], [], [], _LONGEST)
                    if upward.sock not in readable and _is_closed(self.connection):
                        return 0, b""
                    answer = upward.getresponse()
                    return answer.status, answer.read()
                except (OSError, http.client.HTTPException):
                    return 0, b""
                finally:
                    upward.close()

            def log_message(self, *_: object) -> None:
                """Nothing: the exchanges are recorded."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                """Nothing: a client that was killed closes its connections."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()


def ask(address: str, body: Body, key: str) -> tuple[int, Body]:
    """Send one request; return the status and the answer."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_LONGEST)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        connection.request("POST", parts.path, json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, _decoded(answer.read())
    finally:
        connection.close()


def _decoded(data: bytes) -> Body:
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except OSError:
        return True
