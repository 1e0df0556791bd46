"""What the conformance suite of pull clients runs on: a system, the client as a process, a proxy between."""

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
"""Seconds of a lease, where nothing else is said."""
SOON = 60.0
"""Seconds within which anything happens, on a busy machine too."""


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
        """Return the client, which is started if it does not run."""
        if self._client is None or self._client.poll() is not None:
            self._client = self.start()
        return self._client

    def start(self, **environment: str) -> subprocess.Popen[bytes]:
        given = {
            "ORCHESTRATOR_API_URL": self.proxy.url,
            "ORCHESTRATOR_API_KEY": self.key,
            "CONFORMANCE_CONCURRENCY": "1",
            "CONFORMANCE_DRAIN": "30",
            **environment,
        }
        with self._log.open("ab") as output:
            client = subprocess.Popen(
                self._command, env={**os.environ, **given}, stdout=output, stderr=output, start_new_session=True
            )
        self._started.append(client)
        return client

    def stop(self) -> None:
        """Kill all clients that run."""
        for client in self._started:
            if client.poll() is None:
                kill(client)

    # -- work

    def enqueue(self, do: str, *, lease: float = LEASE, service: str = SERVICE, **more: Any) -> Work:
        """Enqueue work; options of the task begin with `task_`."""
        options = {name.removeprefix("task_"): more.pop(name) for name in list(more) if name.startswith("task_")}
        id = uuid4().hex[:8]
        task = self._work.options(executor=Pull(service=service, lease=lease), **options)
        return Work(self, id, task.enqueue(do=do, id=id, **more))

    def begun(self, do: str, **more: Any) -> Work:
        """Enqueue work; return when the client has it."""
        work = self.enqueue(do, **more)
        work.wait_for("poll")
        return work

    def ask(self, what: str, **body: Any) -> tuple[int, Body]:
        """Send a request to the API itself, as another client does."""
        return ask(f"{self.address}/queue/{what}", body, self.key)

    def stop_api(self) -> None:
        self._api.stop()

    def start_api(self) -> None:
        self._api, _ = self.services.api(urlsplit(self.address).port or 0)

    @contextmanager
    def faults(self, fault: Callable[[str, Body], Fault | None]) -> Iterator[None]:
        """Break some requests for as long as the block lasts."""
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
    """One task that the client is to do."""

    def __init__(self, trial: Trial, id: str, handle: Handle[Any]) -> None:
        self._trial = trial
        self._id = id
        self.handle = handle

    def result(self) -> Any:
        return self.handle.result(SOON)

    def failure(self) -> TaskFailed:
        try:
            found = self.result()
        except TaskFailed as error:
            return error
        raise AssertionError(f"expected a failure, found the result {found!r:.100}")

    def all(self, what: str) -> list[Exchange]:
        exchanges = list(self._trial.proxy.exchanges)
        polls = [one for one in exchanges if one.what == "poll" and self._is_in(one.answered.get("input"))]
        if what == "poll":
            return polls
        ids = {one.answered["queue_id"] for one in polls}
        return [one for one in exchanges if one.what == what and one.asked.get("queue_id") in ids]

    def wait_for(self, what: str, count: int = 1, *, status: int | None = None) -> Exchange:
        """Wait for an exchange, with this status; return the last."""

        def found() -> Exchange | None:
            some = [one for one in self.all(what) if status is None or one.status == status]
            return some[-1] if len(some) >= count else None

        wanted = what if status is None else f"{what} with status {status}"
        return eventually(found, f"{count} times {wanted}", SOON)

    def _is_in(self, given: Any) -> bool:
        return isinstance(given, dict) and given.get("id") == self._id


def kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(SOON)


def expect(found: Any, expected: Any, what: str) -> None:
    if found != expected:
        raise AssertionError(f"{what}: expected {expected!r:.200}, found {found!r:.200}")


def pass_time(seconds: float) -> None:
    """Let time pass, in which nothing is to happen."""
    until = time.monotonic() + seconds
    eventually(lambda: time.monotonic() > until, "time passes", seconds + SOON)


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
