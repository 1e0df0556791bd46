"""The process that serves an application's tasks."""

from __future__ import annotations

import dataclasses
import ipaddress
import secrets
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any

import uvicorn

from orchestrator.errors import ConfigurationError
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.tasks.task import Task
from orchestrator.secret_keys import service_keys
from orchestrator.telemetry import get_logger
from orchestrator.workers.serving.application import Services
from orchestrator.workers.serving.registering import Registration

log = get_logger("service")

_LAST_REQUESTS = 30
"""Seconds that requests under way have to end when the process stops."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Where and how to serve."""

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
