"""The health of Redis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from redis import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError

from orchestrator.transport.connection import UNAVAILABLE
from orchestrator.transport.keys import Keys

_LOOK_TTL = 60


@dataclass(frozen=True, kw_only=True)
class RedisHealth:
    """The result of one look at Redis."""

    reachable: bool
    """It answers."""
    error: str | None = None
    """Why it does not answer, or why it does not take writes."""
    is_locked: bool = False
    """It answers, but not to this user with this password."""
    server: str = "Redis"
    """Which server it is: Redis or Valkey."""
    version: str | None = None
    """Of that server."""
    used_memory: int = 0
    """Bytes."""
    max_memory: int = 0
    """Bytes; 0 if there is no limit."""
    eviction: str = "noeviction"
    """Its policy when its memory is full."""
    complaint: str | None = None
    """Why the scheduler cannot use Postgres, if it has said so in the last seconds."""

    @property
    def fullness(self) -> float:
        """How much of its memory is used, from 0 to 1."""
        return self.used_memory / self.max_memory if self.max_memory else 0.0


def check_health(redis: Redis, keys: Keys) -> RedisHealth:
    """Ask Redis for its state, and try a write: nothing else shows whether it takes them."""
    try:
        info = redis.info()
        complaint = cast("bytes | None", redis.get(keys.complaint))
    except UNAVAILABLE as error:
        is_locked = isinstance(error, (AuthenticationError, NoPermissionError))
        return RedisHealth(reachable=False, error=str(error).removesuffix("."), is_locked=is_locked)
    return RedisHealth(
        reachable=True,
        error=_refusal(redis, keys),
        server="Valkey" if "valkey_version" in info else "Redis",
        version=str(info.get("valkey_version", info["redis_version"])),  # Valkey has both, one for clients of Redis
        used_memory=int(info["used_memory"]),
        max_memory=int(info.get("maxmemory", 0)),
        eviction=str(info.get("maxmemory_policy", "noeviction")),
        complaint=complaint.decode("utf-8", "replace") if complaint else None,
    )


def _refusal(redis: Redis, keys: Keys) -> str | None:
    """Return why a write is refused, or None. The key is the leader's own canary, so that nothing is added."""
    try:
        redis.set(keys.canary, b"1", ex=_LOOK_TTL, nx=True)  # which is refused all the same
    except RedisError as error:
        return str(error)
    return None


def refused_commands(redis: Redis, keys: Keys) -> list[str]:
    """Return which of the commands that processes need are refused to this user, tried on a key of its own."""
    key = keys.doctor
    refused = []
    for command in (
        ("XADD", key, "*", "d", ""),
        ("EXPIRE", key, _LOOK_TTL),
        ("EVAL", "return redis.call('XLEN', KEYS[1])", 1, key),
        ("PUBLISH", key, ""),
        ("DEL", key),
    ):
        try:
            redis.execute_command(*command)  # type: ignore[no-untyped-call]
        except NoPermissionError:
            refused.append(str(command[0]))
    return refused


def live_workers(redis: Redis, keys: Keys) -> int:
    """Return how many worker processes have sent a heartbeat lately."""
    names = cast("set[bytes]", redis.smembers(keys.workers))
    return redis.exists(*(keys.worker("").encode() + name for name in names)) if names else 0
