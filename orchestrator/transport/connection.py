"""Redis connections, configured once."""

from __future__ import annotations

from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, ConnectionError, OutOfMemoryError, ReadOnlyError, TimeoutError
from redis.retry import Retry

from orchestrator.errors import ConfigurationError

UNAVAILABLE = (ConnectionError, TimeoutError, OSError, BusyLoadingError, ReadOnlyError, OutOfMemoryError)
"""What an outage of Redis looks like: wait and try again. Everything else is a defect."""

OLDEST_SUPPORTED = (6, 2)


def connect(url: str, *, patience: float = 10.0) -> Redis:
    """Return a client. It never repeats a command by itself: a push that was sent twice would run a task twice."""
    over_network: dict[str, Any] = {"socket_connect_timeout": min(patience, 5.0), "socket_keepalive": True}
    return Redis.from_url(
        url,
        protocol=2,
        socket_timeout=patience,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=0,
        **({} if url.startswith("unix:") else over_network),
    )


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
