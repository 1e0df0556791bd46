"""The API process."""

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

from orchestrator.api.access import Authenticator, network_of
from orchestrator.api.app import create_app
from orchestrator.api.context import Api
from orchestrator.api.http_protocol import HEAD_TIMEOUT, Connections, TimedProtocol
from orchestrator.api.proxies import Proxies, check_address, is_loopback
from orchestrator.errors import ConfigurationError
from orchestrator.prerequisites import Prerequisites
from orchestrator.settings import Settings
from orchestrator.store import database
from orchestrator.telemetry import adopt_logs, get_logger
from orchestrator.tracing.entry import LAST_SPANS, begin_tracing

log = get_logger("api")

_BACKLOG = 4_096
_GC_THRESHOLDS = (50_000, 20, 20)
"""Thresholds of the garbage collector. Large bodies create many objects at once: with Python's defaults, most of the
time to decode one goes into collections, which hold the GIL."""
_SWITCH_INTERVAL = 0.0005
"""Seconds after which a busy thread releases the GIL. While a large body is decoded, the event loop waits this long
in each step of a request. Python's default of 5 ms adds up to tens of milliseconds."""
_SHUTDOWN_TIMEOUT = 10
"""Seconds that requests in flight have to finish when the server stops."""


class Certificate(NamedTuple):
    """TLS certificate and key: files in PEM format."""

    chain: str
    key: str | None
    """None if the key is in the file of the certificate."""


def serve(
    settings: Settings, host: str, port: int, *, or_any: bool = False, certificate: Certificate | None = None
) -> None:
    """Serve until SIGTERM or Ctrl-C, and finish requests in flight.

    With `or_any`, a taken port is replaced by any other.
    """
    if not _wait_for_postgres(settings):
        return
    _check_certificate(certificate)
    adopt_logs("uvicorn", "asyncio")
    listener = _listen(host, port, or_any, requires_key=_requires_key(settings))
    app = create_app(settings)
    gc.freeze()  # objects loaded by now live as long as the process
    gc.set_threshold(*_GC_THRESHOLDS)
    sys.setswitchinterval(_SWITCH_INTERVAL)
    spans, proxies = begin_tracing("api"), Proxies(settings)
    is_exempt = lambda address: is_loopback(address) or proxies.is_trusted(address)  # noqa: E731
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
        timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT,
    )
    name = f"[{host}]" if ":" in host else host
    address = f"{'https' if certificate else 'http'}://{name}:{listener.getsockname()[1]}"
    with listener:
        try:
            ApiServer(config, address, app.state.close_streams, rate).run(sockets=[listener])
        finally:
            if spans is not None:
                spans.flush(LAST_SPANS)


class ApiServer(uvicorn.Server):
    """Accepts connections without uvicorn, and ends event streams before a shutdown waits for requests to finish."""

    def __init__(
        self, config: uvicorn.Config, address: str, close_streams: Callable[[], None], rate: ConnectionRate
    ) -> None:
        super().__init__(config)
        self._address = address
        self._close_streams = close_streams
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
        self._acceptors = [Acceptor(listener, protocol, self._rate, self.config.ssl) for listener in sockets or []]
        log.info("api.ready docs=%s/docs dashboard=%s/ui", self._address, self._address)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        self._close_streams()
        await super().shutdown(sockets)


def _wait_for_postgres(settings: Settings) -> bool:
    """Wait until Postgres is usable; return False if the process was stopped first."""
    engine = database.engine_for(
        settings.require_database(), autocommit=True, pool_size=1, name="orchestrator api", namespace=settings.namespace
    )
    prerequisites = Prerequisites(log, [database.prerequisite(engine)])
    try:
        return prerequisites.wait()
    finally:
        engine.dispose()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _exit)


def _exit(_number: int, _frame: object) -> None:
    """Exit with 0. After its shutdown, uvicorn raises the signal again that stopped it."""
    sys.exit(0)


def _requires_key(settings: Settings) -> bool:
    """Return whether every caller must authenticate, by a key or through a trusted proxy."""
    api = Api(settings)
    try:
        authenticator = Authenticator(api)
        authenticator.read_keys()
        return authenticator.requires_key
    finally:
        api.close()


def _check_certificate(certificate: Certificate | None) -> None:
    """Raise ConfigurationError for unusable certificate files before anything is served."""
    if certificate is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate.chain, certificate.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"--tls-cert {certificate.chain}: expected a certificate and its key in PEM format, the key in the same "
            f"file or in the file of --tls-key: {error}."
        ) from error


def _listen(host: str, port: int, or_any: bool, *, requires_key: bool) -> socket.socket:
    """Listen at the first address of a host, unless other machines can reach it while no key is needed."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        check_address(host, str(address[0]), requires_key)
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        if or_any and error.errno == errno.EADDRINUSE:
            return _listen(host, 0, or_any=False, requires_key=requires_key)
        raise ConfigurationError(
            f"The API cannot listen at {host}:{port}: {error.strerror or error}. Choose another address with --host "
            f"and --port; --port 0 takes any free port."
        ) from error
    return listener


_ACCEPT_BATCH = 200
"""Connections that are accepted before the event loop runs other tasks."""
_WINDOW = 10.0
"""The window in which new connections are counted, in seconds."""
_ACCEPT_PAUSE = 0.1
"""Seconds before the next accept after the process or system ran out of file descriptors or memory."""
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class ConnectionRate:
    """Limits new connections by client network. Loopback and trusted proxies are exempt."""

    def __init__(self, per_second: float, is_exempt: Callable[[str], bool]) -> None:
        self._max_connections = per_second * _WINDOW
        self._is_exempt = is_exempt
        self._counts: Counter[str] = Counter()
        self._window_ends = 0.0

    def admit(self, address: str, now: float) -> bool:
        """Count a connection, and return whether to serve it."""
        if now >= self._window_ends:
            self._counts.clear()
            self._window_ends = now + _WINDOW
        network = network_of(address)
        self._counts[network] += 1
        return self._counts[network] <= self._max_connections or self._is_exempt(address)


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
        self._handshakes: set[asyncio.Task[None]] = set()
        self._resume_timer: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        if self._resume_timer is not None:
            self._resume_timer.cancel()
        self._loop.remove_reader(self._listener)

    def _resume(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        now = time.monotonic()
        for _ in range(_ACCEPT_BATCH):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    self._pause(error)
                    return
                continue  # the client has disconnected
            if not self._rate.admit(address[0], now) or _is_gone(connection):
                connection.close()
                continue
            task = self._loop.create_task(self._hand_over(connection))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    def _pause(self, error: OSError) -> None:
        log.warning("api.accept_paused error=%s", error.strerror)
        self._loop.remove_reader(self._listener)
        self._resume_timer = self._loop.call_later(_ACCEPT_PAUSE, self._resume)

    async def _hand_over(self, connection: socket.socket) -> None:
        handshake = HEAD_TIMEOUT if self._tls else None
        with contextlib.suppress(OSError, asyncio.TimeoutError):  # the client has disconnected, or speaks no TLS
            await self._loop.connect_accepted_socket(
                self._protocol, connection, ssl=self._tls, ssl_handshake_timeout=handshake
            )


def _is_gone(connection: socket.socket) -> bool:
    """Return whether the client has reset the connection, or closed it without sending anything."""
    try:
        sent = connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return not sent or connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
