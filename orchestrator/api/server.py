"""The process that serves the API."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import signal
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import uvicorn

from orchestrator.api.access import Doorkeeper, neighbourhood
from orchestrator.api.app import create_app
from orchestrator.api.context import Api
from orchestrator.api.http_protocol import LONGEST_HEAD, Connections, TimedProtocol
from orchestrator.api.proxies import Proxies, check_address, is_loopback
from orchestrator.errors import ConfigurationError
from orchestrator.prerequisites import Prerequisites
from orchestrator.settings import Settings
from orchestrator.store import database
from orchestrator.telemetry import adopt_logs, get_logger
from orchestrator.tracing.entry import LAST_SPANS, begin_tracing

log = get_logger("api")

_BACKLOG = 4_096
_COLLECTIONS = (50_000, 20, 20)
"""Objects, and collections of the younger ones, after which garbage is looked for. Large bodies make many objects at
once: with Python's own numbers, most of the time of decoding one would go into looking at them, under its lock."""
_SWITCH = 0.0005
"""Seconds after which a thread that computes lets another one have Python's lock. The event loop waits for that in each
step of a request while a large body is worked on. Python's own 5 ms add up to tens of milliseconds."""
_LAST_REQUESTS = 10
"""Seconds that requests under way have to end when the server stops."""


class Certificate(NamedTuple):
    """Certificate and key for TLS: files in PEM format."""

    chain: str
    key: str | None
    """None if it stands in the same file."""


def serve(
    settings: Settings, host: str, port: int, *, or_any: bool = False, certificate: Certificate | None = None
) -> None:
    """Serve until SIGTERM or Ctrl-C; what is under way is finished. If the port is taken, another may do."""
    if not _wait_for_postgres(settings):
        return
    _check_certificate(certificate)
    adopt_logs("uvicorn", "asyncio")
    listener = _listen(host, port, or_any, asks=_asks(settings))
    app = create_app(settings)
    gc.freeze()  # what lives as long as the process is not looked at again and again
    gc.set_threshold(*_COLLECTIONS)
    sys.setswitchinterval(_SWITCH)
    spans, proxies = begin_tracing("api"), Proxies(settings)
    is_exempt = lambda one: is_loopback(one) or proxies.is_ours(one)  # noqa: E731
    connections = Connections(settings.api_connections, is_exempt)
    rate = ConnectionRate(settings.api_connection_rate, is_exempt)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # the settings name the trusted proxies
        http=cast("Any", partial(TimedProtocol, connections=connections)),
        ws="none",
        ssl_certfile=certificate and certificate.chain,
        ssl_keyfile=certificate and certificate.key,
        timeout_graceful_shutdown=_LAST_REQUESTS,
    )
    name = f"[{host}]" if ":" in host else host
    address = f"{'https' if certificate else 'http'}://{name}:{listener.getsockname()[1]}"
    with listener:
        try:
            ApiServer(config, address, app.state.let_go, rate).run(sockets=[listener])
        finally:
            if spans is not None:
                spans.flush(LAST_SPANS)


class ApiServer(uvicorn.Server):
    """Accepts connections by itself, and ends event streams before it waits for requests to end: these would not."""

    def __init__(self, config: uvicorn.Config, address: str, let_go: Callable[[], None], rate: ConnectionRate) -> None:
        super().__init__(config)
        self._address = address
        self._let_go = let_go
        self._rate = rate
        self._acceptors: list[Acceptor] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        protocol = partial(
            cast("Callable[..., asyncio.Protocol]", self.config.http_protocol_class),
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        self._acceptors = [Acceptor(one, protocol, self._rate, self.config.ssl) for one in sockets or []]
        log.info("api.ready docs=%s/docs dashboard=%s/ui", self._address, self._address)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        self._let_go()
        await super().shutdown(sockets)


def _wait_for_postgres(settings: Settings) -> bool:
    """Wait until Postgres can be used; False if the process was stopped before."""
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
    """Exit with 0: when the server has stopped, it raises the signal once more that stopped it."""
    sys.exit(0)


def _asks(settings: Settings) -> bool:
    """Say whether every caller needs a key or a proxy's word."""
    api = Api(settings)
    try:
        door = Doorkeeper(api)
        door.read_keys()
        return door.asks
    finally:
        api.close()


def _check_certificate(certificate: Certificate | None) -> None:
    """Say what is wrong with the files before anything is served."""
    if certificate is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate.chain, certificate.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"--tls-cert {certificate.chain}: expected a certificate and its key in PEM format, the key in the same "
            f"file or in that of --tls-key: {error}."
        ) from error


def _listen(host: str, port: int, or_any: bool, *, asks: bool) -> socket.socket:
    """Listen at the first address of a name, unless other machines can reach it while no key is needed."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        check_address(host, str(address[0]), asks)
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        if or_any and error.errno == errno.EADDRINUSE:
            return _listen(host, 0, or_any=False, asks=asks)
        raise ConfigurationError(
            f"The API cannot listen at {host}:{port}: {error.strerror or error}. Choose another by --host and --port, "
            f"where 0 takes any that is free."
        ) from error
    return listener


_AT_ONCE = 200
"""Connections that are accepted before something else is done."""
_WINDOW = 10.0
"""Seconds over which new connections are counted."""
_PAUSE = 0.1
"""Seconds before the next try where the process or the system has no room for a connection."""
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class ConnectionRate:
    """New connections of each address; loopback and trusted proxies are exempt."""

    def __init__(self, per_second: float, is_exempt: Callable[[str], bool]) -> None:
        self._most = per_second * _WINDOW
        self._is_exempt = is_exempt
        self._counts: Counter[str] = Counter()
        self._ends = 0.0

    def admit(self, address: str, now: float) -> bool:
        """Count a connection, and say whether it is served."""
        if now >= self._ends:
            self._counts.clear()
            self._ends = now + _WINDOW
        near = neighbourhood(address)
        self._counts[near] += 1
        return self._counts[near] <= self._most or self._is_exempt(address)


class Acceptor:
    """Accepts the connections of one listening socket."""

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        rate: ConnectionRate,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._listener = listener
        self._protocol = protocol
        self._rate = rate
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._beginning: set[asyncio.Task[None]] = set()
        self._resumes: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        if self._resumes is not None:
            self._resumes.cancel()
        self._loop.remove_reader(self._listener)

    def _resume(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        now = time.monotonic()
        for _ in range(_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _SCARCE:
                    self._rest(error)
                    return
                continue  # the client has left
            if not self._rate.admit(address[0], now) or _is_gone(connection):
                connection.close()
                continue
            task = self._loop.create_task(self._begin(connection))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    def _rest(self, error: OSError) -> None:
        log.warning("api.accept_paused error=%s", error.strerror)
        self._loop.remove_reader(self._listener)
        self._resumes = self._loop.call_later(_PAUSE, self._resume)

    async def _begin(self, connection: socket.socket) -> None:
        handshake = LONGEST_HEAD if self._tls else None
        with contextlib.suppress(OSError, asyncio.TimeoutError):  # the client has left, or speaks no TLS
            await self._loop.connect_accepted_socket(
                self._protocol, connection, ssl=self._tls, ssl_handshake_timeout=handshake
            )


def _is_gone(connection: socket.socket) -> bool:
    """Say whether the client has reset the connection, or has closed it and sent nothing before."""
    try:
        sent = connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return not sent or connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
