"""Redis connections with one configuration, and the errors that mean an outage."""

from __future__ import annotations

import functools
import hashlib
import re
import select
import socket
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from hiredis import pack_command
from redis import Connection, ConnectionPool, Redis, SSLConnection, UnixDomainSocketConnection
from redis._parsers.hiredis import NOT_ENOUGH_DATA
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    InvalidResponse,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)
from redis.retry import Retry

from orchestrator.errors import ConfigurationError
from orchestrator.prerequisites import Prerequisite
from orchestrator.settings import Settings
from orchestrator.telemetry import first_line
from orchestrator.terminal_safe import without_password, without_password_of
from orchestrator.transport.discovery import Following, discovery_of


class WritesRefused(ResponseError):
    """Redis answers but refuses writes: its disk is full, a save failed, or too few replicas follow it."""


FULL = OutOfMemoryError
"""Redis is out of memory. Commands that free memory still work."""

REFUSED = (WritesRefused, OutOfMemoryError, ReadOnlyError)
"""Redis serves reads and commands that free memory. Other writes must wait."""

UNAVAILABLE = (ConnectionError, TimeoutError, OSError, ResponseError)
"""Redis is down, full or refuses a command: log it, wait and retry. Every other exception is a defect."""

OLDEST_SUPPORTED = (6, 2)
_READ_SIZE = 65_536

# The driver has no class for these errors. Before Redis 7, a refused write in a script is recognizable by its text
# only.
_REFUSAL = re.compile(r"^(?:MISCONF|NOREPLICAS|BUSY) .*|-(?:OOM|MISCONF|READONLY|NOREPLICAS) .*", re.DOTALL)


class _RefusalErrors:
    """Raises a refused write as `WritesRefused` or `OutOfMemoryError`."""

    def read_response(self, *arguments: Any, **options: Any) -> Any:
        try:
            if not (arguments or options):
                return self._read()
            return super().read_response(*arguments, **options)  # type: ignore[misc]
        except ResponseError as error:
            if isinstance(error, REFUSED) or not (match := _REFUSAL.search(str(error))):
                raise
            message = match[0].removeprefix("-")
            raise (OutOfMemoryError if message.startswith("OOM") else WritesRefused)(message) from error

    def _read(self) -> Any:
        """Read one reply without the driver's dozen function calls: each task waits for six replies."""
        connection: Any = self
        reader, sock = connection._parser._reader, connection._sock
        try:
            while (answer := NOT_ENOUGH_DATA if reader is None else reader.gets()) is NOT_ENOUGH_DATA:
                if not (data := b"" if sock is None else sock.recv(_READ_SIZE)):
                    raise ConnectionError("Connection closed by server.")
                reader.feed(data)
        except OSError as error:
            connection.disconnect()
            kind = TimeoutError if isinstance(error, socket.timeout) else ConnectionError
            raise kind(f"Error while reading from Redis: {error}") from error
        except BaseException:
            connection.disconnect()
            raise
        if isinstance(answer, Exception):
            raise answer
        return answer


class _OverTcp(_RefusalErrors, Connection): ...


class _OverTls(_RefusalErrors, SSLConnection): ...


class _OverSocket(_RefusalErrors, UnixDomainSocketConnection): ...


class _FollowingOverTcp(Following, _OverTcp): ...


class _FollowingOverTls(Following, _OverTls): ...


_CONNECTIONS = {"redis": _OverTcp, "rediss": _OverTls, "unix": _OverSocket}
_FOLLOWING = {"redis": _FollowingOverTcp, "rediss": _FollowingOverTls}


def connect(url: str, *, timeout: float = 10.0) -> Redis:
    """Return a client that never retries a command: a push that was sent twice would run a task twice."""
    if problem := _invalid_url_reason(url):
        raise ConfigurationError(
            f"Setting redis_url: expected a URL such as redis://host:6379/0, rediss://host:6379/0, "
            f"unix:///path/to/socket, redis+sentinel://host1,host2/mymaster/0 or redis+cluster://host1,host2, found "
            f"{without_password(url)!r:.300}: {without_password_of(url, problem)}."
        )
    discovered = discovery_of(url)
    url = discovered.url if discovered else url
    scheme = url.partition(":")[0]
    over_network: dict[str, Any] = {"socket_connect_timeout": min(timeout, 5.0), "socket_keepalive": True}
    if scheme == "rediss" and "ssl_cert_reqs=none" not in url.lower():
        over_network["ssl_check_hostname"] = True  # redis-py before version 6 does not check by default
    options: dict[str, Any] = {"connection_class": _CONNECTIONS[scheme]}
    if discovered:
        options = {"connection_class": _FOLLOWING[scheme], "locate": discovered.locate}
    return Redis.from_url(
        url,
        **options,
        protocol=2,
        socket_timeout=timeout,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=0,
        **({} if scheme == "unix" else over_network),
    )


def connect_shared(settings: Settings, redis: Redis, *, timeout: float = 10.0) -> Redis:
    """Return a client for the keys that all shards share. In a cluster, the server of shard 0 holds them."""
    url = settings.of_shard(0).require_redis()
    return redis if url == settings.require_redis() else connect(url, timeout=timeout)


@functools.lru_cache(maxsize=16)
def _invalid_url_reason(url: str) -> str | None:
    """Return why a URL is invalid, or None. The server need not be reachable."""
    pool = None
    try:
        discovered = discovery_of(url)
        pool = ConnectionPool.from_url(discovered.url if discovered else url)
        pool.connection_class(**pool.connection_kwargs)
    except (RedisError, ValueError, TypeError, AttributeError) as error:
        return str(error)
    finally:
        if pool is not None:
            pool.disconnect()
    return None


def describe(error: BaseException) -> str:
    """Describe a Redis error in one line for the log."""
    text = first_line(error)
    return (
        f"{text} Another program has overwritten one of our keys; `orchestrator status` shows which."
        if "WRONGTYPE" in text
        else text
    )


def prerequisite(redis: Redis) -> Prerequisite:
    """Return Redis as a prerequisite that a process waits for when it starts."""
    return Prerequisite("Redis", lambda: check_server(redis), _outage_of)


def _outage_of(error: Exception) -> str | None:
    """Return the message of an outage, or None if the user must correct a setting first."""
    is_refusal = isinstance(error, ResponseError) and not isinstance(error, REFUSED)  # unknown database, no permission
    is_mistake = is_refusal or isinstance(error, (AuthenticationError, InvalidResponse))
    if is_mistake or "CERTIFICATE_VERIFY_FAILED" in str(error):
        return None
    return describe(error) if isinstance(error, UNAVAILABLE) else None


def check_server(redis: Redis) -> None:
    """Raise `ConfigurationError` if the server is too old, may evict keys, or is a cluster node in a plain URL."""
    info = redis.info()
    is_cluster = info.get("redis_mode") == "cluster" or info.get("cluster_enabled")
    if is_cluster and not issubclass(redis.connection_pool.connection_class, Following):
        raise ConfigurationError(
            "Setting redis_url: this is a node of a Redis Cluster. Use redis+cluster://host1:6379,host2:6379, with "
            "some of its nodes."
        )
    version = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
    if version < OLDEST_SUPPORTED:
        raise ConfigurationError(f"Redis 6.2 or newer is needed; this server is {info['redis_version']}.")
    policy = info.get("maxmemory_policy", "noeviction")
    if info.get("maxmemory", 0) and policy != "noeviction":
        raise ConfigurationError(
            f"Redis has maxmemory-policy {policy!r}: when full it would silently drop messages. "
            f"Set it with `CONFIG SET maxmemory-policy noeviction`."
        )


# -- raw connections: each belongs to one thread.
#
# The driver's client takes a connection from its pool for each command, wraps the command for retries and metrics, and
# guesses how to parse the reply. That takes twice as long as Redis itself. Hot paths therefore send commands and read
# replies on the connection directly.

Argument = str | bytes | int | float

Entry = tuple[bytes, list[bytes] | None]
"""The id and fields of a stream entry, names and values alternating. The fields are None if the entry was deleted."""


def open_connection(redis: Redis) -> Any:
    """Return a connection with the options of a client's pool, outside of the pool. It connects on first use."""
    pool = redis.connection_pool
    return pool.connection_class(**pool.connection_kwargs)


def packed(command: tuple[Argument, ...]) -> list[bytes]:
    """Encode a command. The driver would inspect each argument first, which takes three times as long."""
    return [pack_command(command)]  # type: ignore[arg-type]  # its stub declares a single word


_RUN_ID = re.compile(rb"^run_id:(\w+)", re.MULTILINE)


def connect_to_server(connection: Any, server: str) -> None:
    """Connect unless connected. Refuse a server that restarted after its streams were created (see the key `server`).

    Such a server restarted, or was a replica until now. It may have lost entries and may assign their ids again, so a
    cursor could point at a different entry. No process reads or writes there until a leader has begun a new generation.
    """
    if connection._sock is None:
        connection.connect()
        check_restart(connection, server)


def check_restart(connection: Any, server: str) -> None:
    """Raise `ConnectionError`, and disconnect, if the server restarted after its streams were created."""
    try:
        connection.send_packed_command([*packed(("GET", server)), *packed(("INFO", "server"))])
        began_on, about = connection.read_response(), connection.read_response()
        run_id = _RUN_ID.search(about)
        if began_on is not None and (run_id is None or began_on != run_id[1]):
            raise ConnectionError("it has restarted or is a different server, and no leader uses it yet")
    except BaseException:
        connection.disconnect()
        raise


class Script:
    """A Lua script. Redis caches it by its hash after the first call."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.hash = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


class RawConnection:
    """Sends one command at a time, without retries. After an error the next command connects again.

    With the key `server`, it connects only to a server that has not restarted since its streams were created.
    """

    def __init__(self, redis: Redis, server: str | None = None) -> None:
        self._connection: Any = open_connection(redis)
        self._server = server

    def call(self, *command: Argument) -> Any:
        """Send a command; return its unparsed reply."""
        try:
            if self._server is not None:
                connect_to_server(self._connection, self._server)
            self._connection.send_packed_command(packed(command))
            return self._connection.read_response()
        except ResponseError:
            raise
        except BaseException:
            self._connection.disconnect()  # a late reply would pass for that of the next command
            raise

    def run(self, script: Script, keys: Sequence[Argument], arguments: Sequence[Argument]) -> Any:
        """Run a script; return its reply."""
        try:
            return self.call("EVALSHA", script.hash, len(keys), *keys, *arguments)
        except NoScriptError:
            if self._server is not None:  # a proxy may fail over behind an open connection
                check_restart(self._connection, self._server)
            return self.call("EVAL", script.text, len(keys), *keys, *arguments)

    def close(self) -> None:
        self._connection.disconnect()


def field(entry: Entry, name: bytes) -> bytes:
    """Return a field of a stream entry, or empty bytes if the entry has no such field."""
    fields = entry[1] or []
    names = fields[::2]
    return fields[2 * names.index(name) + 1] if name in names else b""


Found = list[tuple[bytes, list[Entry]]]
"""The new entries by stream."""


class Answer(NamedTuple):
    """The reply to a blocking read."""

    found: Found
    is_fresh: bool
    """Whether the read was sent by the same call of `wait` that received the reply."""


_BLOCK_SECONDS = 5.0
"""Seconds that a blocking read lasts at most; the reply then shows that Redis is still there."""
_ANSWER_TIMEOUT = 5.0
"""Seconds that the reply of a blocking read may be late before the connection counts as lost."""


class Listening:
    """A blocking XREAD that stays open between calls.

    Redis ends a blocking read when its own timer fires, ten times a second: a wait of 5 ms takes up to 100. The read
    therefore stays open on a connection of its own, and `wait` waits for its reply as long as the caller has time. A
    later reply wakes the next `wait`. That reply may be stale, and more entries may exist by then: it only shows that
    there is something to read.

    The read is sent only to a server that has not restarted since its streams were created (see the key `server`).
    """

    def __init__(self, redis: Redis, server: str) -> None:
        self._connection: Any = open_connection(redis)
        self._server = server
        self._streams: tuple[str, ...] | None = None
        """The streams of the open read; None if no read is open."""
        self._reply_by = 0.0
        """The time by which Redis replies to the open read."""
        self._poll = select.poll()
        self._polled_socket: Any = None

    def wait(self, streams: Sequence[str], after: Sequence[str], count: int, seconds: float) -> Answer | None:
        """Return the reply of the open read, or None if none arrives within `seconds`."""
        is_fresh = False
        try:
            if self._streams not in (None, tuple(streams)):
                self.close()
            if self._streams is None:
                milliseconds = int(_BLOCK_SECONDS * 1000)
                command: tuple[Argument, ...] = (
                    "XREAD",
                    "COUNT",
                    count,
                    "BLOCK",
                    milliseconds,
                    "STREAMS",
                    *streams,
                    *after,
                )
                connect_to_server(self._connection, self._server)
                self._connection.send_packed_command(packed(command))
                self._streams = tuple(streams)
                self._reply_by = time.monotonic() + _BLOCK_SECONDS
                is_fresh = True
            if not self._has_reply(seconds):
                if time.monotonic() > self._reply_by + _ANSWER_TIMEOUT:
                    raise TimeoutError("Redis did not answer a command in time")
                return None
            self._streams = None
            return Answer(self._connection.read_response() or [], is_fresh)
        except ResponseError:
            raise
        except BaseException:
            self.close()
            raise

    def _has_reply(self, seconds: float) -> bool:
        """Wait up to `seconds`; return whether a reply has arrived or the connection has ended.

        The driver's own check makes three system calls and two objects, and takes twenty times as long.
        """
        sock = self._connection._sock
        if sock is not self._polled_socket:
            self._poll = select.poll()
            self._poll.register(sock, select.POLLIN)
            self._polled_socket = sock
        return bool(self._poll.poll(1000 * seconds))

    def close(self) -> None:
        """Close the connection and its open read. The next read connects again."""
        self._streams = None
        self._connection.disconnect()
