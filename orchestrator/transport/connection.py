"""Redis connections, configured once, and what an outage looks like on them."""

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
    """Redis answers, but takes no writes: its disk is full, a save has failed, or too few replicas follow it."""


FULL = OutOfMemoryError
"""Redis has no memory left; what frees some is still done."""

REFUSED = (WritesRefused, OutOfMemoryError, ReadOnlyError)
"""Redis can be read, and what frees memory still works; other writes wait."""

UNAVAILABLE = (ConnectionError, TimeoutError, OSError, ResponseError)
"""Redis is away, is full or refuses what is asked of it: say so, wait and try again. Everything else is a defect."""

OLDEST_SUPPORTED = (6, 2)
_MOST_READ = 65_536
"""Bytes that are read at once."""

# The driver has no class for these. And before Redis 7, a script that was refused a write says so in words only.
_REFUSAL = re.compile(r"^(?:MISCONF|NOREPLICAS|BUSY) .*|-(?:OOM|MISCONF|READONLY|NOREPLICAS) .*", re.DOTALL)


class _Recognising:
    """Makes a refused write recognisable by its class."""

    def read_response(self, *arguments: Any, **options: Any) -> Any:
        try:
            if not (arguments or options):
                return self._read()
            return super().read_response(*arguments, **options)  # type: ignore[misc]
        except ResponseError as error:
            if isinstance(error, REFUSED) or not (found := _REFUSAL.search(str(error))):
                raise
            said = found[0].removeprefix("-")
            raise (OutOfMemoryError if said.startswith("OOM") else WritesRefused)(said) from error

    def _read(self) -> Any:
        """Read an answer, past a dozen functions of the driver: each task waits for six."""
        connection: Any = self
        reader, line = connection._parser._reader, connection._sock
        try:
            while (answer := NOT_ENOUGH_DATA if reader is None else reader.gets()) is NOT_ENOUGH_DATA:
                if not (data := b"" if line is None else line.recv(_MOST_READ)):
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


class _OverTcp(_Recognising, Connection): ...


class _OverTls(_Recognising, SSLConnection): ...


class _OverSocket(_Recognising, UnixDomainSocketConnection): ...


class _FollowingOverTcp(Following, _OverTcp): ...


class _FollowingOverTls(Following, _OverTls): ...


_CONNECTIONS = {"redis": _OverTcp, "rediss": _OverTls, "unix": _OverSocket}
_FOLLOWING = {"redis": _FollowingOverTcp, "rediss": _FollowingOverTls}


def connect(url: str, *, timeout: float = 10.0) -> Redis:
    """Return a client. It never repeats a command by itself: a push that was sent twice would run a task twice."""
    if problem := _misfit(url):
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
        over_network["ssl_check_hostname"] = True  # drivers before 6 do not by default
    how: dict[str, Any] = {"connection_class": _CONNECTIONS[scheme]}
    if discovered:
        how = {"connection_class": _FOLLOWING[scheme], "locate": discovered.locate}
    return Redis.from_url(
        url,
        **how,
        protocol=2,
        socket_timeout=timeout,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=0,
        **({} if scheme == "unix" else over_network),
    )


def connect_shared(settings: Settings, redis: Redis, *, timeout: float = 10.0) -> Redis:
    """Return a client for the keys that all shards use: in a cluster they are where those of the first shard are."""
    url = settings.of_shard(0).require_redis()
    return redis if url == settings.require_redis() else connect(url, timeout=timeout)


@functools.lru_cache(maxsize=16)
def _misfit(url: str) -> str | None:
    """Return why no connection can be made of a URL; where the server is down, it is the URL's fault no more."""
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
    """Return what is wrong with Redis, in one line for the log."""
    text = first_line(error)
    return (
        f"{text} Somebody has taken a key of ours; `orchestrator status` says which." if "WRONGTYPE" in text else text
    )


def awaited(redis: Redis) -> Prerequisite:
    """Return Redis as something that a process waits for when it starts."""
    return Prerequisite("Redis", lambda: check_server(redis), _passing)


def _passing(error: Exception) -> str | None:
    """Return the message of an outage; None if a setting must be corrected first."""
    is_refusal = isinstance(error, ResponseError) and not isinstance(error, REFUSED)  # no such database, no permission
    is_mistake = is_refusal or isinstance(error, (AuthenticationError, InvalidResponse))
    if is_mistake or "CERTIFICATE_VERIFY_FAILED" in str(error):
        return None
    return describe(error) if isinstance(error, UNAVAILABLE) else None


def check_server(redis: Redis) -> None:
    """Refuse a server that is too old, a cluster that is taken for one server, and one that may throw keys away."""
    info = redis.info()
    is_cluster = info.get("redis_mode") == "cluster" or info.get("cluster_enabled")
    if is_cluster and not issubclass(redis.connection_pool.connection_class, Following):
        raise ConfigurationError(
            "Setting redis_url: this is a node of a Redis Cluster. Write redis+cluster://host1:6379,host2:6379, with "
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


# -- a raw connection to Redis: one connection that one thread has to itself.
#
# The driver's client finds a connection for each command, wraps it for retries and metrics, and parses what it
# guesses; that takes twice as long as Redis does. Where it matters, commands go out and answers come in by the
# connection itself.

Argument = str | bytes | int | float

Entry = tuple[bytes, list[bytes] | None]
"""Id and fields of an entry of a stream, name and value by turns; None if it was deleted."""


def open_connection(redis: Redis) -> Any:
    """Return a connection like those of a client's pool, which the pool need not count; it connects on first use."""
    pool = redis.connection_pool
    return pool.connection_class(**pool.connection_kwargs)


def packed(words: tuple[Argument, ...]) -> list[bytes]:
    """Return a command as it is sent. The driver would look at each word first, which takes it three times as long."""
    return [pack_command(words)]  # type: ignore[arg-type]  # its stub says that there is one word


_LIFE = re.compile(rb"^run_id:(\w+)", re.MULTILINE)


def connect_to_server(connection: Any, server: str) -> None:
    """Connect, once; refuse a server whose streams were begun before it restarted, by the key `server`.

    It has restarted, or was a replica until now. Then it may have lost entries, and may assign their ids again, so ids
    could be mistaken. So nobody reads or writes there until a leader has begun a new generation.
    """
    if connection._sock is None:
        connection.connect()
        check_restart(connection, server)


def check_restart(connection: Any, server: str) -> None:
    """Refuse the server of an open connection if its streams were begun in another life; then disconnect."""
    try:
        connection.send_packed_command([*packed(("GET", server)), *packed(("INFO", "server"))])
        began_on, about = connection.read_response(), connection.read_response()
        life = _LIFE.search(about)
        if began_on is not None and (life is None or began_on != life[1]):
            raise ConnectionError("it has restarted or is another server, and no leader has begun on it yet")
    except BaseException:
        connection.disconnect()
        raise


class Script:
    """A Lua script, which Redis knows by its hash once it has run it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.hash = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


class RawConnection:
    """Sends one command at a time. What went wrong half-way is not repeated, and the next command connects anew.

    With the key `server`, only to a server whose streams were begun in the life that it is in.
    """

    def __init__(self, redis: Redis, server: str | None = None) -> None:
        self._connection: Any = open_connection(redis)
        self._server = server

    def call(self, *words: Argument) -> Any:
        """Send a command; return its answer as it came."""
        try:
            if self._server is not None:
                connect_to_server(self._connection, self._server)
            self._connection.send_packed_command(packed(words))
            return self._connection.read_response()
        except ResponseError:
            raise
        except BaseException:
            self._connection.disconnect()  # an answer may be on its way that would be taken for the next one's
            raise

    def run(self, script: Script, keys: Sequence[Argument], arguments: Sequence[Argument]) -> Any:
        """Run a script; return its answer."""
        try:
            return self.call("EVALSHA", script.hash, len(keys), *keys, *arguments)
        except NoScriptError:
            if self._server is not None:  # a proxy may keep a connection while another server takes over behind it
                check_restart(self._connection, self._server)
            return self.call("EVAL", script.text, len(keys), *keys, *arguments)

    def close(self) -> None:
        self._connection.disconnect()


def field(entry: Entry, name: bytes) -> bytes:
    """Return a field of an entry; empty if it has none."""
    fields = entry[1] or []
    names = fields[::2]
    return fields[2 * names.index(name) + 1] if name in names else b""


Found = list[tuple[bytes, list[Entry]]]
"""By stream, what has come."""


class Answer(NamedTuple):
    """Something has come."""

    found: Found
    is_fresh: bool
    """Whether the caller that sent the request also got the answer."""


_LONGEST = 5.0
"""Seconds that Redis is asked to wait; then one learns whether it is still there."""
_ANSWER_TIMEOUT = 5.0
"""Seconds beyond that after which its answer is not awaited any more."""


class Listening:
    """A blocking read that stays open: what comes after these positions of these streams?

    Redis ends a blocking read when its own timer comes round, ten times a second: a wait of 5 ms takes up to 100. So a
    read stays open on a connection of its own, and its answer is waited for here for as long as there is time. An
    answer that comes later wakes the next wait. Then it may be old, and there may be more by now: it only says that
    there is something to read.

    It is sent only to a server that has not restarted since its streams were begun, by the key `server`.
    """

    def __init__(self, redis: Redis, server: str) -> None:
        self._connection: Any = open_connection(redis)
        self._server = server
        self._streams: tuple[str, ...] | None = None
        """The streams of the open read; None while none is open."""
        self._until = 0.0
        """When Redis answers at the latest."""
        self._poll = select.poll()
        self._polled: Any = None
        """The socket that it looks at."""

    def wait(self, streams: Sequence[str], after: Sequence[str], count: int, seconds: float) -> Answer | None:
        """Return what has come, or None if nothing has in so many seconds."""
        is_fresh = False
        try:
            if self._streams not in (None, tuple(streams)):
                self.close()
            if self._streams is None:
                milliseconds = int(_LONGEST * 1000)
                words: tuple[Argument, ...] = (
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
                self._connection.send_packed_command(packed(words))
                self._streams = tuple(streams)
                self._until = time.monotonic() + _LONGEST
                is_fresh = True
            if not self._has_come(seconds):
                if time.monotonic() > self._until + _ANSWER_TIMEOUT:
                    raise TimeoutError("Redis does not answer a question that it was to answer by now")
                return None
            self._streams = None
            return Answer(self._connection.read_response() or [], is_fresh)
        except ResponseError:
            raise
        except BaseException:
            self.close()
            raise

    def _has_come(self, seconds: float) -> bool:
        """Wait for so long; say whether there is an answer, or the connection has ended.

        The driver's own way makes three system calls and two objects for it, and takes twenty times as long.
        """
        line = self._connection._sock
        if line is not self._polled:
            self._poll = select.poll()
            self._poll.register(line, select.POLLIN)
            self._polled = line
        return bool(self._poll.poll(1000 * seconds))

    def close(self) -> None:
        """Close the connection, and with it the question; the next one connects anew."""
        self._streams = None
        self._connection.disconnect()
