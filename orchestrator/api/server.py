"""The process that serves the API."""

from __future__ import annotations

import errno
import signal
import socket
import sys

import uvicorn

from orchestrator.api.access import Doorkeeper
from orchestrator.api.app import create_app
from orchestrator.api.context import Api
from orchestrator.api.guard import check_address
from orchestrator.errors import ConfigurationError
from orchestrator.prerequisites import Prerequisites
from orchestrator.settings import Settings
from orchestrator.store import database
from orchestrator.telemetry import get_logger

log = get_logger("api")

_BACKLOG = 2_048
_LAST_REQUESTS = 10
"""Seconds that requests under way have to end when the server stops."""


def serve(settings: Settings, host: str, port: int, *, or_any: bool = False) -> None:
    """Serve until SIGTERM or Ctrl-C; what is under way is finished. If the port is taken, another may do."""
    if not _wait_for_postgres(settings):
        return
    check_address(host, _asks(settings))
    listener = _listen(host, port, or_any)
    config = uvicorn.Config(
        create_app(settings),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # whom to believe is for the settings to say
        timeout_graceful_shutdown=_LAST_REQUESTS,
    )
    place = f"[{host}]" if ":" in host else host
    log.info("serving http://%s:%d/docs", place, listener.getsockname()[1])
    with listener:
        uvicorn.Server(config).run(sockets=[listener])


def _wait_for_postgres(settings: Settings) -> bool:
    """Wait until Postgres can be used; False if the process was told to stop before."""
    engine = database.engine_for(
        settings.require_database(), autocommit=True, pool_size=1, name="orchestrator api", namespace=settings.namespace
    )
    prerequisites = Prerequisites(log, [database.awaited(engine)])
    try:
        return prerequisites.wait()
    finally:
        engine.dispose()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _end)


def _end(_number: int, _frame: object) -> None:
    """End as one who was asked to, and has: the server raises once more what it was stopped by, when it has stopped."""
    sys.exit(0)


def _asks(settings: Settings) -> bool:
    """Say whether everybody has to show who they are."""
    api = Api(settings)
    try:
        door = Doorkeeper(api)
        door.read_keys()
        return door.asks
    finally:
        api.close()


def _listen(host: str, port: int, or_any: bool) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        if or_any and error.errno == errno.EADDRINUSE:
            return _listen(host, 0, or_any=False)
        raise ConfigurationError(
            f"The API cannot listen at {host}:{port}: {error.strerror or error}. Choose another by --host and --port, "
            f"where 0 takes any that is free."
        ) from error
    return listener
