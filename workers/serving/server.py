"""The process that serves an application's tasks, registers its services and sends heartbeats with its load."""

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

LARGEST_REQUEST = 32_000_000
"""Bytes of a request that are read, as by the HTTP API, or more where `max_payload` asks for it."""


class Services:
    """The tasks that are served, and their requests."""

    def __init__(
        self, tasks: Mapping[str, Task[..., Any]], concurrency: int, largest: int, keys: Sequence[str] = ()
    ) -> None:
        self.tasks = tasks
        self._concurrency = concurrency
        self._largest = largest
        self._keys = [f"Bearer {key}".encode() for key in keys]
        self._executions: Executions | None = None

    @property
    def load(self) -> int:
        """How many requests are worked on, or wait."""
        return 0 if self._executions is None else self._executions.load

    def application(self) -> Starlette:
        """Return what any ASGI server takes."""

        @asynccontextmanager
        async def alive(_: Starlette) -> AsyncIterator[None]:
            self._executions = Executions(self._concurrency, self._largest)
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
        body = await _read(request, max(LARGEST_REQUEST, 2 * self._largest))
        if isinstance(body, Response):
            return body
        try:
            wanted = msgspec.json.decode(body, type=ServiceRequest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return _error(400, f"Expected an object with `input` and `params` in JSON: {error}.")
        assert self._executions is not None
        try:
            said = await self._executions.do(task, wanted)
        except Busy:
            return _error(503, f"{self.load} requests are worked on or wait here already.")
        return Response(said.body, said.status, media_type="application/json")

    async def _cancel(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        assert self._executions is not None
        service, _, request_id = _path(request).removeprefix("/exec/").rpartition("/")
        is_cancelled = self._executions.cancel(unquote(service), unquote(request_id))
        return Response(msgspec.json.encode({"cancelled": is_cancelled}), media_type="application/json")

    def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a request without a valid key; all keys are compared in constant time."""
        if "origin" in request.headers:
            return _error(403, "A page in a browser has sent this, and services are for programs.")
        if not self._keys:
            return None
        given = request.headers.get("authorization", "").encode("latin-1")
        if any([compare_digest(given, key) for key in self._keys]):  # noqa: C419
            return None
        response = _error(401, "This service asks for a key: Authorization: Bearer KEY (setting service_keys).")
        response.headers["WWW-Authenticate"] = "Bearer"
        return response


async def _read(request: Request, most: int) -> bytes | Response:
    """Return the body of a request, or the answer to one that is too large, once all of it was sent.

    A client that is answered while it sends may find its connection broken, and no answer.
    """
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= most:
            parts.append(part)
        else:
            parts.clear()
    return b"".join(parts) if size <= most else _error(413, f"At most {most:,} bytes are read, found {size:,}.")


def _path(request: Request) -> str:
    """Return the path as it was sent, in which the slash of a name is `%2F`."""
    raw: bytes | None = request.scope.get("raw_path")
    return quote(request.url.path) if raw is None else raw.partition(b"?")[0].decode("latin-1")


async def _healthy(_: Request) -> Response:
    return Response(b'{"ok":true}', media_type="application/json")


def _error(status: int, words: str) -> Response:
    data = msgspec.json.encode({"result": None, "error": words, "retryable": status >= 500})
    return Response(data, status, media_type="application/json")


log = get_logger("service")

_LAST_REQUESTS = 30
"""Seconds that requests under way have to end when the process stops."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    host: str
    port: int
    registry: str
    """The address of the HTTP API; empty to register nowhere."""
    advertise: str
    """The address that others reach it by, if it is another."""
    services: tuple[str, ...]
    """Which tasks; all if it is empty."""
    concurrency: int


def serve(app: Orchestrator, serving: Serving) -> None:
    """Serve until SIGTERM or Ctrl-C; what is under way is finished."""
    tasks = _served(app, serving.services)
    settings = app.settings
    keys = service_keys(settings.service_keys, settings.service_keys_file)
    services = Services(tasks, serving.concurrency, settings.max_payload, keys)
    listener = _listen(serving.host, serving.port, asks=bool(keys))
    port = listener.getsockname()[1]
    url = serving.advertise or f"http://{_place(serving.host)}:{port}"
    config = uvicorn.Config(
        services.application(),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        timeout_graceful_shutdown=_LAST_REQUESTS,
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


def _served(app: Orchestrator, services: tuple[str, ...]) -> dict[str, Task[..., Any]]:
    """Return the tasks to serve, by name: those whose functions do the work, and none that an executor does."""
    elsewhere = {name: task._call_options.executor_call for name, task in app.tasks.items()}
    for name in services:
        app.find_task(name)  # or say which is near
        if (call := elsewhere[name]) is not None:
            raise ConfigurationError(
                f"Task {name!r} cannot be served: the executor {call.name} does it, and its function is never run. "
                f"Serve a task without an executor."
            )
    left_out = [] if services else sorted(name for name, call in elsewhere.items() if call is not None)
    tasks = {
        name: task for name, task in app.tasks.items() if (not services or name in services) and elsewhere[name] is None
    }
    if not tasks:
        raise ConfigurationError("The application has no tasks to serve, but such that have an executor at most.")
    if left_out:
        log.info("service.tasks_left_out tasks=%s: their executors run them", ",".join(left_out))
    return tasks


def _end(_number: int, _frame: object) -> None:
    """Exit cleanly after a signal: the server raises it once more when it has stopped."""
    sys.exit(0)


def _place(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def _listen(host: str, port: int, *, asks: bool) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if not asks and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
            raise ConfigurationError(
                f"There is no key, and others can reach {host!r} ({address[0]}). Set service_keys, here and for the "
                f"workers that send tasks to services (openssl rand -hex 32 makes one), or serve this machine only, at "
                f"127.0.0.1."
            )
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2_048)
    except OSError as error:
        raise ConfigurationError(
            f"Services cannot be served at {host}:{port}: {error.strerror or error}. Choose another place by --host "
            f"and --port, where 0 takes any port that is free."
        ) from error
    return listener


log = get_logger("service")

_EVERY = 5.0
"""Seconds between two heartbeats; three of them may be lost."""
_TIMEOUT = 5.0
_PLAIN = re.compile(r"[A-Za-z0-9_.:-]{1,200}")
"""Names that every release of the registry takes."""


class Registration:
    """Registers in a thread of its own, and again whenever the registry has forgotten."""

    def __init__(
        self, settings: Settings, id: str, url: str, services: Sequence[str], load: Callable[[], float]
    ) -> None:
        self._http = Http(settings)
        self._id = id
        self._url = url
        self._services = list(services)
        self._load = load
        self._over = threading.Event()
        self._is_known = False
        self._has_failed = False
        self._is_refused = False
        """The registry did not understand the last message."""
        self._thread = threading.Thread(target=self._run, name="registering", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Leave: nothing more is asked for here."""
        self._over.set()
        self._thread.join(2 * _TIMEOUT)
        if self._is_known:
            self._ask("register", services=[])
        self._http.close()

    def _run(self) -> None:
        while not self._over.is_set():
            if self._is_known:
                self._is_known = self._ask("heartbeat")
            if not self._is_known and not self._over.is_set():
                self._is_known = self._register()
            self._over.wait(_EVERY)

    def _register(self) -> bool:
        """Register what is served; one name that a registry of an earlier release refuses keeps no other out."""
        if self._ask("register", services=self._services):
            return True
        plain = [name for name in self._services if _PLAIN.fullmatch(name)]
        if not self._is_refused or plain == self._services:
            return False
        log.warning("service.registered_in_part tasks=%d names=%s", len(plain), ",".join(plain))
        return self._ask("register", services=plain)

    def _post(self, path: str, body: bytes) -> Reply:
        """Send something, once more over a new connection where the registry has closed one that was idle."""
        try:
            return self._http.post(path, body, _TIMEOUT)
        except Broken:
            return self._http.post(path, body, _TIMEOUT)  # to say it twice changes nothing

    def _ask(self, what: str, **more: Any) -> bool:
        """Send a message; False if it was not taken. The first of several failures is logged."""
        body = {"id": self._id, "url": self._url, "load": self._load(), **more}
        try:
            reply = self._post(f"/workers/{what}", msgspec.json.encode(body))
            problem = "" if reply.status == 200 else f"{reply.status}: {reply.body[:300].decode('utf-8', 'replace')}"
            is_forgotten = reply.status == 404
            self._is_refused = reply.status == 422
        except (Unreached, Broken, OrchestratorError) as error:
            problem, is_forgotten = str(error), False
        if problem and not is_forgotten and not self._has_failed:
            log.warning(
                "service.not_registered url=%s call=%s error=%s: it is tried again", self._http.url, what, problem
            )
        elif not problem and (self._has_failed or (what == "register" and self._services == more.get("services"))):
            log.info("service.registered url=%s id=%s", self._http.url, self._id)
        self._has_failed = bool(problem) and not is_forgotten
        if problem and not is_forgotten and what == "heartbeat":
            return True  # it is known there, for all we know
        return not problem
