"""Redis connections, configured once."""

from __future__ import annotations

from typing import Any

from redis import ConnectionPool, Redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    ConnectionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)
from redis.retry import Retry

from orchestrator.errors import ConfigurationError

UNAVAILABLE = (ConnectionError, TimeoutError, OSError, ResponseError)
"""Redis is away, is full or refuses what is asked of it: say so, wait and try again. Everything else is a defect."""

OLDEST_SUPPORTED = (6, 2)


def connect(url: str, *, patience: float = 10.0) -> Redis:
    """Return a client. It never repeats a command by itself: a push that was sent twice would run a task twice."""
    if problem := _misfit(url):
        raise ConfigurationError(
            f"Setting redis_url: expected a URL such as redis://host:6379/0, rediss://host:6379/0 or "
            f"unix:///path/to/socket, found {url!r:.300}: {problem}."
        )
    over_network: dict[str, Any] = {"socket_connect_timeout": min(patience, 5.0), "socket_keepalive": True}
    return Redis.from_url(
        url,
        protocol=2,
        socket_timeout=patience,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=0,
        **({} if url.startswith("unix:") else over_network),
    )


def _misfit(url: str) -> str | None:
    """Return why no connection can be made of a URL; where the server is down, it is the URL's fault no more."""
    pool = None
    try:
        pool = ConnectionPool.from_url(url)
        pool.connection_class(**pool.connection_kwargs)
    except (RedisError, ValueError, TypeError, AttributeError) as error:
        return str(error)
    finally:
        if pool is not None:
            pool.disconnect()
    return None


def describe(error: BaseException) -> str:
    """Return what is wrong with Redis, in one line for the log."""
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    if not isinstance(error, ResponseError) or isinstance(error, (OutOfMemoryError, ReadOnlyError)):
        return f"Redis is away: {text}"
    if "WRONGTYPE" in text:
        return f"Redis refuses: {text} Somebody has taken a key of ours; `orchestrator status` says which."
    return f"Redis refuses: {text}"


def check_server(redis: Redis) -> None:
    """Refuse a server that is too old, or that may throw keys away when its memory is full."""
    info = redis.info()
    version = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
    if version < OLDEST_SUPPORTED:
        raise ConfigurationError(f"Redis 6.2 or newer is needed; this server is {info['redis_version']}.")
    policy = info.get("maxmemory_policy", "noeviction")
    if info.get("maxmemory", 0) and policy != "noeviction":
        raise ConfigurationError(
            f"Redis has maxmemory-policy {policy!r}: when full it would silently drop messages. "
            f"Set it with `CONFIG SET maxmemory-policy noeviction`."
        )
