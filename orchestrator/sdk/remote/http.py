"""A pool of connections to an API, on `http.client`; each request is made once.

Measured beside httpx: a request takes a fifth of its CPU time (0.2 ms instead of 0.9 ms), and loading it a tenth
(38 ms instead of 406 ms). An error says whether anything was sent, by which a call is repeated or not.
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

_MOST_IDLE = 16
_LONGEST_IDLE = 60.0
"""Seconds after which an idle connection is not used again."""
_CONNECTING = 10.0
"""Seconds that it may take to connect."""

_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")
"""OpenSSL's messages about an answer in plain text."""

Connection = http.client.HTTPConnection


class Unreached(Exception):
    """Nothing was sent: there is no connection."""


class Broken(Exception):
    """Something was sent, and no answer came: it may have been done or not."""


class Reply(NamedTuple):
    """An answer."""

    status: int
    content_type: str
    retry_after: float | None
    body: bytes


_Idle = deque[tuple[Connection, float]]
"""Idle connections, and since when."""


class Http:
    """A few connections to one address. Any thread may ask, and a fork has connections of its own."""

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
        self._is_over = False
        """Connections that are opened now are not kept."""

    def close(self) -> None:
        """Close what is open; what is in use is closed after it."""
        self._is_over = True
        _keep(self._idle(), 0)

    def post(self, path: str, body: bytes, timeout: float, under_way: set[Connection] | None = None) -> Reply:
        """Send a request and return what comes back; Unreached or Broken if nothing does.

        Meanwhile the connection stands in `under_way`, so that another thread can `hang_up`.
        """
        idle = self._idle()
        if timeout <= 0:
            raise Unreached("the time of the call is over")
        connection = _take(idle) or self._connect(timeout)
        if under_way is not None:
            under_way.add(connection)
        try:
            assert connection.sock is not None
            connection.sock.settimeout(timeout)
            trace = current_trace()
            headers = self._headers if trace is None else self._headers | {"traceparent": trace}
            if carried := of_start.get():
                headers = headers | {HTTP_HEADER: json.dumps(dict(carried))}
            connection.request("POST", self._prefix + path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Broken(str(error) or type(error).__name__) from error
        except BaseException:
            connection.close()  # it was interrupted half-way
            raise
        finally:
            if under_way is not None:
                under_way.discard(connection)
        if answer.will_close:
            connection.close()
        else:
            idle.append((connection, time.monotonic()))
            _keep(idle, 0 if self._is_over else _MOST_IDLE)
        return Reply(
            answer.status, answer.headers.get_content_type(), _seconds(answer.headers.get("Retry-After")), data
        )

    def listen(self, path: str, timeout: float) -> tuple[Connection, http.client.HTTPResponse]:
        """Ask for a stream of events, on a connection of its own, which is the caller's to close.

        What is read of it may take so many seconds.
        """
        connection = self._connect(_CONNECTING)
        try:
            assert connection.sock is not None
            connection.sock.settimeout(timeout)
            connection.request("GET", self._prefix + path, headers=self._headers | {"Accept": "text/event-stream"})
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise

    def _connect(self, most: float) -> Connection:
        seconds = min(_CONNECTING, most)
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
                    f"Setting api_url: what answers at {self.url} does not speak TLS ({error.reason}). If that is the "
                    f"API, its address is {plain}."
                ) from error
            raise ConfigurationError(
                f"The API at {self.url} cannot be trusted: {error}. Setting api_ca_file names certificates of those "
                f"who vouch for it."
            ) from error
        except OSError as error:
            connection.close()
            raise Unreached(str(error) or type(error).__name__) from error
        return connection


def hang_up(connection: Connection) -> None:
    """End what another thread waits for."""
    with contextlib.suppress(OSError, AttributeError):
        connection.sock.shutdown(socket.SHUT_RDWR)


def _take(idle: _Idle) -> Connection | None:
    """Return a connection that the server has not closed meanwhile, the one that was used last."""
    while True:
        try:
            connection, since = idle.pop()
        except IndexError:
            return None
        if time.monotonic() - since < _LONGEST_IDLE and _is_quiet(connection):
            return connection
        connection.close()


def _keep(idle: _Idle, most: int) -> None:
    """Close the oldest of those that are too many; other threads may do the same."""
    with contextlib.suppress(IndexError):
        while len(idle) > most:
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
    """Say whether nothing has come meanwhile: on an idle connection, that can only be its end."""
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
