"""A service over HTTP that does as it is told: answers, fails, is slow, talks nonsense, or is away."""

from __future__ import annotations

import http.server
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Answer = bytes | tuple[int, Any]
"""Bytes as they stand on the line, or a status and what is sent as JSON."""


class Service(http.server.ThreadingHTTPServer):
    """Counts requests by their ids."""

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
        """Nobody is there any more to be answered."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.paths.append(self.path)
        self.server.bodies.append(body)
        self.server.requests[body.get("request_id", "")] += 1
        self.server.has_begun.set()
        said = self.server.answer(self.path.removeprefix("/exec/"), body)
        if isinstance(said, bytes):
            self.wfile.write(said)
            self.close_connection = True
            return
        self._answer(*said)

    def do_DELETE(self) -> None:
        self.server.cancelled.append(self.path)
        self._answer(200, {})

    def _answer(self, status: int, said: Any) -> None:
        data = said if isinstance(said, bytes) else json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None: ...


@contextmanager
def serving(answer: Callable[[str, Any], Answer] | None = None, port: int = 0) -> Iterator[Service]:
    """Serve until the end of the block; then nobody listens there."""
    with Service(answer, port) as service:
        thread = threading.Thread(target=service.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield service
        finally:
            service.go_on.set()
            service.shutdown()
            thread.join()
