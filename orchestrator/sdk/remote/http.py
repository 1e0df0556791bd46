"""A pool of connections to the API, based on `http.client`, without retries.

Compared with httpx, a request takes a fifth of the CPU time (0.2 ms instead of 0.9 ms), and the import a tenth of the
time (38 ms instead of 406 ms). An error tells whether anything was sent, which decides whether to retry.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import socket
import ssl
import time
from collections import deque
from importlib import metadata
from typing import NamedTuple
from urllib.parse import urlsplit

from orchestrator.domain.tasks.headers import HTTP_HEADER, of_start
from orchestrator.errors import ConfigurationError
from orchestrator.sdk.waiting.per_process import PerProcess
from orchestrator.settings import Settings
from orchestrator.terminal_safe import without_password
from orchestrator.trace_context import current_trace

_MAX_IDLE = 16
_MAX_IDLE_TIME = 60.0
"""Seconds after which an idle connection is discarded."""
_CONNECT_TIMEOUT = 10.0

_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")
"""OpenSSL's errors for a server that answers in plain text."""

Connection = http.client.HTTPConnection


class Unreached(Exception):
    """No connection could be opened, so nothing was sent."""


class Broken(Exception):
    """The request was sent, and no answer arrived. The server may have executed the request."""


class Reply(NamedTuple):
    """An HTTP response."""

    status: int
    content_type: str
    retry_after: float | None
    body: bytes


_Idle = deque[tuple[Connection, float]]
"""Idle connections, and the time of their last use."""


class Http:
    """A thread-safe connection pool for one address. A forked process has connections of its own."""

    def __init__(self, settings: Settings) -> None:
        self.url = without_password(settings.api_url.rstrip("/"))
        self.timeout = settings.api_timeout
        parts = urlsplit(settings.api_url)
        try:
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError as error:
            raise ConfigurationError(f"Setting api_url: {error}, found {self.url!r}.") from None
        if not self._host or parts.query or parts.fragment:
            raise ConfigurationError(
                f"Setting api_url: expected an address such as https://orchestrator.example.com, found {self.url!r}."
            )
        self._prefix = parts.path.rstrip("/")
        self._tls = _tls(settings.api_ca_file) if parts.scheme == "https" else None
        self._headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            "User-Agent": f"orchestrator-python/{metadata.version('durable-orchestrator')}",
        }
        self.has_key = bool(settings.api_key)
        if settings.api_key:
            self._headers["Authorization"] = f"Bearer {_as_header(settings.api_key)}"
        self._idle: PerProcess[_Idle] = PerProcess(deque)
        self._is_closed = False
        """Whether the pool is closed. It then keeps no connection after a request."""

    def close(self) -> None:
        """Close idle connections now, and all others after their requests."""
        self._is_closed = True
        _keep(self._idle(), 0)

    def post(self, path: str, body: bytes, timeout: float, under_way: set[Connection] | None = None) -> Reply:
        """Send a request and return the response. Raise Unreached or Broken if there is none.

        During the request, the connection is in `under_way`, so that another thread can `hang_up`.
        """
        idle = self._idle()
        if timeout <= 0:
            raise Unreached("the time limit of the call has passed")
        connection = _take(idle) or self._connect(timeout)
        if under_way is not None:
            under_way.add(connection)
        try:
            assert connection.sock is not None
            connection.sock.settimeout(timeout)
            trace = current_trace()
            headers = self._headers if trace is None else self._headers | {"traceparent": trace}
            if run_headers := of_start.get():
                headers = headers | {HTTP_HEADER: json.dumps(dict(run_headers))}
            connection.request("POST", self._prefix + path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Broken(str(error) or type(error).__name__) from error
        except BaseException:
            connection.close()  # interrupted in the middle of a request
            raise
        finally:
            if under_way is not None:
                under_way.discard(connection)
        if answer.will_close:
            connection.close()
        else:
            idle.append((connection, time.monotonic()))
            _keep(idle, 0 if self._is_closed else _MAX_IDLE)
        return Reply(
            answer.status, answer.headers.get_content_type(), _seconds(answer.headers.get("Retry-After")), data
        )

    def listen(self, path: str, timeout: float) -> tuple[Connection, http.client.HTTPResponse]:
        """Open a stream of server-sent events on a connection of its own, which the caller must close.

        Each read from the stream times out after `timeout` seconds.
        """
        connection = self._connect(_CONNECT_TIMEOUT)
        try:
            assert connection.sock is not None
            connection.sock.settimeout(timeout)
            connection.request("GET", self._prefix + path, headers=self._headers | {"Accept": "text/event-stream"})
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise

    def _connect(self, timeout: float) -> Connection:
        seconds = min(_CONNECT_TIMEOUT, timeout)
        if self._tls is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=seconds)
        else:
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=seconds, context=self._tls)
        try:
            connection.connect()
        except ssl.SSLError as error:
            connection.close()
            if error.reason in _NO_TLS:
                plain = self.url.replace("https://", "http://", 1)
                raise ConfigurationError(
                    f"Setting api_url: the server at {self.url} does not speak TLS ({error.reason}). If that is "
                    f"the API, its address is {plain}."
                ) from error
            raise ConfigurationError(
                f"The API at {self.url} cannot be trusted: {error}. Setting api_ca_file names the certificates "
                "of its certificate authority."
            ) from error
        except OSError as error:
            connection.close()
            raise Unreached(str(error) or type(error).__name__) from error
        return connection


def hang_up(connection: Connection) -> None:
    """Shut a connection down, which ends a request in another thread."""
    with contextlib.suppress(OSError, AttributeError):
        connection.sock.shutdown(socket.SHUT_RDWR)


def _take(idle: _Idle) -> Connection | None:
    """Return the most recently used idle connection that the server has not closed."""
    while True:
        try:
            connection, since = idle.pop()
        except IndexError:
            return None
        if time.monotonic() - since < _MAX_IDLE_TIME and _is_quiet(connection):
            return connection
        connection.close()


def _keep(idle: _Idle, limit: int) -> None:
    """Close the oldest idle connections above the limit. Other threads may do so at the same time."""
    with contextlib.suppress(IndexError):
        while len(idle) > limit:
            idle.popleft()[0].close()


def _tls(ca_file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"Setting api_ca_file: {ca_file!r} cannot be used: {error}.") from error


def _as_header(key: str) -> str:
    if not key.isascii() or not key.isprintable():
        raise ConfigurationError("Setting api_key: expected a key as `orchestrator keys create` shows it, found none.")
    return key


def _is_quiet(connection: Connection) -> bool:
    """Return whether no data has arrived. On an idle connection, data can only be its end."""
    if connection.sock is None:
        return False
    try:
        return not select.select([connection.sock], [], [], 0)[0]
    except (OSError, ValueError):  # closed, or numbered too high for select
        return False


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else max(0.0, float(text))
    except ValueError:
        return None
