"""Redis connections, configured once, and what an outage looks like on them."""

from __future__ import annotations

import functools
import re
from typing import Any

from redis import Connection, ConnectionPool, Redis, SSLConnection, UnixDomainSocketConnection
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    InvalidResponse,
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

# The driver has no class for these. And before Redis 7, a script that was refused a write says so in words only.
_REFUSAL = re.compile(r"^(?:MISCONF|NOREPLICAS|BUSY) .*|-(?:OOM|MISCONF|READONLY|NOREPLICAS) .*", re.DOTALL)


class _Recognising:
    """Makes a refused write recognisable by its class."""

    def read_response(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().read_response(*arguments, **options)  # type: ignore[misc]
        except ResponseError as error:
            if isinstance(error, REFUSED) or not (found := _REFUSAL.search(str(error))):
                raise
            said = found[0].removeprefix("-")
            raise (OutOfMemoryError if said.startswith("OOM") else WritesRefused)(said) from error


class _OverTcp(_Recognising, Connection):
    pass


class _OverTls(_Recognising, SSLConnection):
    pass


class _OverSocket(_Recognising, UnixDomainSocketConnection):
    pass


class _FollowingOverTcp(Following, _OverTcp):
    pass


class _FollowingOverTls(Following, _OverTls):
    pass


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
