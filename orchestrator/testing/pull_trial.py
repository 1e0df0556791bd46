"""The environment of the pull client conformance suite: a system, the client as a process, and a proxy between them."""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from uuid import uuid4

from orchestrator.domain.executors.builtin import Pull
from orchestrator.errors import TaskFailed
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.tasks.handle import Handle
from orchestrator.testing.executor_stage import LocalServices, eventually
from orchestrator.testing.executor_tasks import APP, declare

SERVICE = "conformance"
LEASE = 3.0
"""The default lease in seconds."""
SOON = 60.0
"""Seconds within which anything happens, even on a busy machine."""


class Trial:
    """A client under test, and the system that it works for."""

    def __init__(self, services: LocalServices, command: Sequence[str], folder: Path) -> None:
        self.services = services
        self._command = command
        self._log = folder / "client.log"
        self._app = Orchestrator(services.settings)
        self._work, _ = declare(self._app)
        services.scheduler()
        services.worker("--app", APP)
        self.key = services.run("keys", "create", "conformance", "--scope", "operate")
        self._api, self.address = services.api()
        self.proxy = RecordingProxy(self.address)
        self._client: subprocess.Popen[bytes] | None = None
        self._started: list[subprocess.Popen[bytes]] = []

    # -- the client

    def client(self) -> subprocess.Popen[bytes]:
        """Return the client; start it if it is not running."""
        if self._client is None or self._client.poll() is not None:
            self._client = self.start()
        return self._client

    def start(self, **environment: str) -> subprocess.Popen[bytes]:
        variables = {
            "ORCHESTRATOR_API_URL": self.proxy.url,
            "ORCHESTRATOR_API_KEY": self.key,
            "CONFORMANCE_CONCURRENCY": "1",
            "CONFORMANCE_DRAIN": "30",
            **environment,
        }
        with self._log.open("ab") as output:
            client = subprocess.Popen(
                self._command, env={**os.environ, **variables}, stdout=output, stderr=output, start_new_session=True
            )
        self._started.append(client)
        return client

    def stop(self) -> None:
        """Kill all running clients."""
        for client in self._started:
            if client.poll() is None:
                kill(client)

    # -- work

    def enqueue(self, do: str, *, lease: float = LEASE, service: str = SERVICE, **more: Any) -> Work:
        """Enqueue work. Arguments that begin with `task_` are options of the task."""
        options = {name.removeprefix("task_"): more.pop(name) for name in list(more) if name.startswith("task_")}
        id = uuid4().hex[:8]
        task = self._work.options(executor=Pull(service=service, lease=lease), **options)
        return Work(self, id, task.enqueue(do=do, id=id, **more))

    def enqueue_and_start(self, do: str, **more: Any) -> Work:
        """Enqueue work; return when the client has polled it."""
        work = self.enqueue(do, **more)
        work.wait_for("poll")
        return work

    def ask(self, action: str, **body: Any) -> tuple[int, Body]:
        """Send a request directly to the API, as another client would."""
        return ask(f"{self.address}/queue/{action}", body, self.key)

    def stop_api(self) -> None:
        self._api.stop()

    def start_api(self) -> None:
        self._api, _ = self.services.api(urlsplit(self.address).port or 0)

    @contextmanager
    def faults(self, fault: Callable[[str, Body], Fault | None]) -> Iterator[None]:
        """Inject faults into requests during the block."""
        before, self.proxy.fault = self.proxy.fault, fault
        try:
            yield
        finally:
            self.proxy.fault = before

    def log_end(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-2_000:] if self._log.exists() else ""

    def close(self) -> None:
        self.stop()
        self.proxy.close()
        self._app.close()


class Work:
    """A task for the client."""

    def __init__(self, trial: Trial, id: str, handle: Handle[Any]) -> None:
        self._trial = trial
        self._id = id
        self.handle = handle

    def result(self) -> Any:
        return self.handle.result(SOON)

    def failure(self) -> TaskFailed:
        try:
            result = self.result()
        except TaskFailed as error:
            return error
        raise AssertionError(f"expected a failure, found the result {result!r:.100}")

    def all(self, action: str) -> list[Exchange]:
        exchanges = list(self._trial.proxy.exchanges)
        polls = [call for call in exchanges if call.action == "poll" and self._is_in(call.response.get("input"))]
        if action == "poll":
            return polls
        ids = {call.response["queue_id"] for call in polls}
        return [call for call in exchanges if call.action == action and call.request.get("queue_id") in ids]

    def wait_for(self, action: str, count: int = 1, *, status: int | None = None) -> Exchange:
        """Wait for `count` exchanges of an operation, with this status if given; return the last."""

        def found() -> Exchange | None:
            matches = [call for call in self.all(action) if status is None or call.status == status]
            return matches[-1] if len(matches) >= count else None

        description = action if status is None else f"{action} with status {status}"
        return eventually(found, f"{count} times {description}", SOON)

    def _is_in(self, input: Any) -> bool:
        return isinstance(input, dict) and input.get("id") == self._id


def kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(SOON)


def expect(found: Any, expected: Any, what: str) -> None:
    if found != expected:
        raise AssertionError(f"{what}: expected {expected!r:.200}, found {found!r:.200}")


def pass_time(seconds: float) -> None:
    """Wait."""
    until = time.monotonic() + seconds
    eventually(lambda: time.monotonic() > until, "time passes", seconds + SOON)


Body = dict[str, Any]
_API_TIMEOUT = 90.0
"""The timeout of requests to the API, in seconds."""


class Exchange(NamedTuple):
    """A request and its response."""

    at: float
    """The time of the request, by the monotonic clock."""
    answered_at: float
    action: str
    """The last part of the path: `poll`, `heartbeat`, `complete` or `return`."""
    request: Body
    status: int
    """0 if the client got no response."""
    response: Body


class Fault(NamedTuple):
    """A fault injected into a request."""

    status: int = 0
    """The status of the response in place of the API's; 0 closes the connection without one."""
    reaches_api: bool = False
    """The API gets the request, but its response is lost."""
    retry_after: int = 1


class RecordingProxy:
    """Forwards requests to the API and records them. Serves on its own port, in threads."""

    def __init__(self, target: str) -> None:
        self.exchanges: list[Exchange] = []
        self.fault: Callable[[str, Body], Fault | None] = lambda _what, _asked: None
        """Decides on the fault of a request; None means no fault."""
        proxy, upstream = self, urlsplit(target)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                began, action = time.monotonic(), self.path.rpartition("/")[2]
                data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                request = _decoded(data)
                fault = proxy.fault(action, request)
                status, answer = 0, b""
                if fault is None or fault.reaches_api:
                    status, answer = self._forward(data)
                if fault is not None:
                    status, answer = fault.status, b"{}"
                proxy.exchanges.append(Exchange(began, time.monotonic(), action, request, status, _decoded(answer)))
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
                """Return the API's response; status 0 if there is none, or the client disconnects first."""
                api = http.client.HTTPConnection(upstream.hostname or "", upstream.port, timeout=_API_TIMEOUT)
                try:
                    headers = {
                        name: self.headers[name] for name in ("Authorization", "Content-Type") if self.headers[name]
                    }
                    api.request("POST", self.path, data, headers)
                    assert api.sock is not None
                    readable, _, _ = select.select([api.sock, self.connection], [], [], _API_TIMEOUT)
                    if api.sock not in readable and _is_closed(self.connection):
                        return 0, b""
                    answer = api.getresponse()
                    return answer.status, answer.read()
                except (OSError, http.client.HTTPException):
                    return 0, b""
                finally:
                    api.close()

            def log_message(self, *_: object) -> None:
                """Do nothing: the exchanges are recorded."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                """Do nothing: killed clients close their connections."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def ask(address: str, body: Body, key: str) -> tuple[int, Body]:
    """Send one request; return the status and the response."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_API_TIMEOUT)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        connection.request("POST", parts.path, json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, _decoded(answer.read())
    finally:
        connection.close()


def _decoded(data: bytes) -> Body:
    try:
        value = json.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except OSError:
        return True
