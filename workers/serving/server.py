"""The process that serves an application's tasks over HTTP, registers them as services and sends heartbeats."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
import secrets
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any
from urllib.parse import quote, unquote

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orchestrator.errors import ConfigurationError, OrchestratorError, did_you_mean
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.remote.http import Broken, Http, Reply, Unreached
from orchestrator.sdk.tasks.task import Task
from orchestrator.secret_keys import service_keys
from orchestrator.settings import Settings
from orchestrator.telemetry import get_logger
from orchestrator.workers.serving.executions import Busy, Executions, ServiceRequest

MAX_REQUEST = 32_000_000
"""Maximum size of a request in bytes, as in the HTTP API; a larger `max_payload` raises it."""


class Services:
    """The tasks that are served, and the routes for their requests."""

    def __init__(
        self, tasks: Mapping[str, Task[..., Any]], concurrency: int, largest: int, keys: Sequence[str] = ()
    ) -> None:
        self.tasks = tasks
        self._concurrency = concurrency
        self._max_payload = largest
        self._keys = [f"Bearer {key}".encode() for key in keys]
        self._executions: Executions | None = None

    @property
    def load(self) -> int:
        """The number of requests that run or wait."""
        return 0 if self._executions is None else self._executions.load

    def application(self) -> Starlette:
        """Return the ASGI application."""

        @asynccontextmanager
        async def alive(_: Starlette) -> AsyncIterator[None]:
            self._executions = Executions(self._concurrency, self._max_payload)
            yield
            await self._executions.finish()

        routes = [
            Route("/exec/{service:path}", self._serve, methods=["POST"]),
            Route("/exec/{service:path}/{request_id}", self._cancel, methods=["DELETE"]),
            Route("/healthz", _healthy, methods=["GET"]),
        ]
        return Starlette(routes=routes, lifespan=alive)

    async def _serve(self, request: Request) -> Response:
        name = request.path_params["service"]
        task = self.tasks.get(name)
        if (refusal := self._refusal(request)) is not None:
            return refusal
        if task is None:
            return _error(404, f"There is no service {name!r:.200} here.{did_you_mean(name, self.tasks)}")
        body = await _read(request, max(MAX_REQUEST, 2 * self._max_payload))
        if isinstance(body, Response):
            return body
        try:
            service_request = msgspec.json.decode(body, type=ServiceRequest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return _error(400, f"Expected an object with `input` and `params` in JSON: {error}.")
        assert self._executions is not None
        try:
            answer = await self._executions.run(task, service_request)
        except Busy:
            return _error(503, f"{self.load} requests are already running or waiting here.")
        return Response(answer.body, answer.status, media_type="application/json")

    async def _cancel(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        assert self._executions is not None
        service, _, request_id = _path(request).removeprefix("/exec/").rpartition("/")
        is_cancelled = self._executions.cancel(unquote(service), unquote(request_id))
        return Response(msgspec.json.encode({"cancelled": is_cancelled}), media_type="application/json")

    def _refusal(self, request: Request) -> Response | None:
        """Return the error response for a request without a valid key. All keys are compared in constant time."""
        if "origin" in request.headers:
            return _error(403, "This request comes from a web page, but services are only for programs.")
        if not self._keys:
            return None
        provided = request.headers.get("authorization", "").encode("latin-1")
        if any([compare_digest(provided, key) for key in self._keys]):  # noqa: C419
            return None
        response = _error(401, "This service requires a key: Authorization: Bearer KEY (setting service_keys).")
        response.headers["WWW-Authenticate"] = "Bearer"
        return response


async def _read(request: Request, limit: int) -> bytes | Response:
    """Read the body of a request to its end. Return an error response if it is too large.

    A response sent before the end of the body might not reach the client.
    """
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= limit:
            parts.append(part)
        else:
            parts.clear()
    return b"".join(parts) if size <= limit else _error(413, f"At most {limit:,} bytes are accepted, found {size:,}.")


def _path(request: Request) -> str:
    """Return the path as it was sent, in which a slash inside a name is `%2F`."""
    raw: bytes | None = request.scope.get("raw_path")
    return quote(request.url.path) if raw is None else raw.partition(b"?")[0].decode("latin-1")


async def _healthy(_: Request) -> Response:
    return Response(b'{"ok":true}', media_type="application/json")


def _error(status: int, message: str) -> Response:
    data = msgspec.json.encode({"result": None, "error": message, "retryable": status >= 500})
    return Response(data, status, media_type="application/json")


log = get_logger("service")

_SHUTDOWN_TIMEOUT = 30
"""Seconds that running requests have to end when the process stops."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    host: str
    port: int
    registry: str
    """The address of the HTTP API; if empty, the services are not registered."""
    advertise: str
    """The address under which others reach this process, if it differs from host and port."""
    services: tuple[str, ...]
    """The tasks to serve; all if empty."""
    concurrency: int


def serve(app: Orchestrator, serving: Serving) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish running requests."""
    tasks = _tasks_to_serve(app, serving.services)
    settings = app.settings
    keys = service_keys(settings.service_keys, settings.service_keys_file)
    services = Services(tasks, serving.concurrency, settings.max_payload, keys)
    listener = _listen(serving.host, serving.port, has_keys=bool(keys))
    port = listener.getsockname()[1]
    url = serving.advertise or f"http://{_public_host(serving.host)}:{port}"
    config = uvicorn.Config(
        services.application(),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT,
    )
    log.info("service.ready tasks=%s url=%s", ",".join(sorted(tasks)), url)
    registration = None
    if serving.registry:
        settings = dataclasses.replace(settings, api_url=serving.registry)
        id = f"{socket.gethostname()}-{port}-{secrets.token_hex(3)}"
        registration = Registration(settings, id, url, sorted(tasks), lambda: services.load)
        registration.begin()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    with listener:
        try:
            uvicorn.Server(config).run(sockets=[listener])
        finally:
            if registration is not None:
                registration.end()


def _tasks_to_serve(app: Orchestrator, services: tuple[str, ...]) -> dict[str, Task[..., Any]]:
    """Return the tasks to serve, by name, without those that have an executor: their functions are never run."""
    executors = {name: task._call_options.executor_call for name, task in app.tasks.items()}
    for name in services:
        app.find_task(name)  # raises an error that suggests similar names
        if (call := executors[name]) is not None:
            raise ConfigurationError(
                f"Task {name!r} cannot be served: the executor {call.name} runs it, and its function is never called. "
                f"Serve a task without an executor."
            )
    skipped = [] if services else sorted(name for name, call in executors.items() if call is not None)
    tasks = {
        name: task for name, task in app.tasks.items() if (not services or name in services) and executors[name] is None
    }
    if not tasks:
        raise ConfigurationError("The application has no tasks to serve: there are none without an executor.")
    if skipped:
        log.info("service.tasks_left_out tasks=%s: their executors run them", ",".join(skipped))
    return tasks


def _end(_number: int, _frame: object) -> None:
    """Exit cleanly after a signal: uvicorn raises the signal again when it has stopped."""
    sys.exit(0)


def _public_host(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def _listen(host: str, port: int, *, has_keys: bool) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if not has_keys and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
            raise ConfigurationError(
                f"There is no key, but other machines can reach {host!r} ({address[0]}). Set service_keys, here and "
                f"for the workers that send tasks to services (openssl rand -hex 32 creates a key), or serve only this "
                f"machine, at 127.0.0.1."
            )
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2_048)
    except OSError as error:
        raise ConfigurationError(
            f"Services cannot be served at {host}:{port}: {error.strerror or error}. Choose a different address with "
            f"--host and --port; port 0 takes any free port."
        ) from error
    return listener


log = get_logger("service")

_HEARTBEAT_INTERVAL = 5.0
"""Seconds between two heartbeats. The registry tolerates three lost ones."""
_TIMEOUT = 5.0
_SIMPLE_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,200}")
"""Names that the registry of every release accepts."""


class Registration:
    """Registers the services in a thread of its own, and again if the registry has forgotten them."""

    def __init__(
        self, settings: Settings, id: str, url: str, services: Sequence[str], load: Callable[[], float]
    ) -> None:
        self._http = Http(settings)
        self._id = id
        self._url = url
        self._services = list(services)
        self._load = load
        self._stopped = threading.Event()
        self._is_registered = False
        self._has_failed = False
        self._is_refused = False
        """Whether the registry rejected the last message as invalid."""
        self._thread = threading.Thread(target=self._run, name="registering", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Deregister, so that no more requests are sent here."""
        self._stopped.set()
        self._thread.join(2 * _TIMEOUT)
        if self._is_registered:
            self._ask("register", services=[])
        self._http.close()

    def _run(self) -> None:
        while not self._stopped.is_set():
            if self._is_registered:
                self._is_registered = self._ask("heartbeat")
            if not self._is_registered and not self._stopped.is_set():
                self._is_registered = self._register()
            self._stopped.wait(_HEARTBEAT_INTERVAL)

    def _register(self) -> bool:
        """Register the services. If an older registry rejects some names, register only the others."""
        if self._ask("register", services=self._services):
            return True
        simple = [name for name in self._services if _SIMPLE_NAME.fullmatch(name)]
        if not self._is_refused or simple == self._services:
            return False
        log.warning("service.registered_in_part tasks=%d names=%s", len(simple), ",".join(simple))
        return self._ask("register", services=simple)

    def _post(self, path: str, body: bytes) -> Reply:
        """Send a message. Retry over a new connection if the registry has closed an idle one."""
        try:
            return self._http.post(path, body, _TIMEOUT)
        except Broken:
            return self._http.post(path, body, _TIMEOUT)  # repeating it is harmless

    def _ask(self, call: str, **fields: Any) -> bool:
        """Send a message. Return False if it was refused. Only the first of several failures is logged."""
        body = {"id": self._id, "url": self._url, "load": self._load(), **fields}
        try:
            reply = self._post(f"/workers/{call}", msgspec.json.encode(body))
            problem = "" if reply.status == 200 else f"{reply.status}: {reply.body[:300].decode('utf-8', 'replace')}"
            is_forgotten = reply.status == 404
            self._is_refused = reply.status == 422
        except (Unreached, Broken, OrchestratorError) as error:
            problem, is_forgotten = str(error), False
        if problem and not is_forgotten and not self._has_failed:
            log.warning("service.not_registered url=%s call=%s error=%s: it is retried", self._http.url, call, problem)
        elif not problem and (self._has_failed or (call == "register" and self._services == fields.get("services"))):
            log.info("service.registered url=%s id=%s", self._http.url, self._id)
        self._has_failed = bool(problem) and not is_forgotten
        if problem and not is_forgotten and call == "heartbeat":
            return True  # assume that the registration still exists
        return not problem
