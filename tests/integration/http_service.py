"""An HTTP service for tests that replies, fails, hangs, sends invalid data or is unreachable, as the test decides."""

from __future__ import annotations

import http.server
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Answer = bytes | tuple[int, Any]
"""The raw bytes of a response, or a status and a JSON body."""


class Service(http.server.ThreadingHTTPServer):
    """A server that counts requests by their ids."""

    daemon_threads = True

    def __init__(self, answer: Callable[[str, Any], Answer] | None = None, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.answer = answer or (lambda _, body: (200, {"result": body["input"], "error": ""}))
        self.requests: Counter[str] = Counter()
        self.bodies: list[Any] = []
        self.paths: list[str] = []
        self.cancelled: list[str] = []
        self.has_begun = threading.Event()
        self.go_on = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: Any) -> None:
        """Ignore clients that have disconnected."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.paths.append(self.path)
        self.server.bodies.append(body)
        self.server.requests[body.get("request_id", "")] += 1
        self.server.has_begun.set()
        reply = self.server.answer(self.path.removeprefix("/exec/"), body)
        if isinstance(reply, bytes):
            self.wfile.write(reply)
            self.close_connection = True
            return
        self._answer(*reply)

    def do_DELETE(self) -> None:
        self.server.cancelled.append(self.path)
        self._answer(200, {})

    def _answer(self, status: int, reply: Any) -> None:
        data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None: ...


@contextmanager
def serving(answer: Callable[[str, Any], Answer] | None = None, port: int = 0) -> Iterator[Service]:
    """Run the service within the block; its port is closed afterwards."""
    with Service(answer, port) as service:
        thread = threading.Thread(target=service.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield service
        finally:
            service.go_on.set()
            service.shutdown()
            thread.join()
