"""The state of Redis for `status`, `doctor` and the dashboard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import cast

from redis import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError

from orchestrator.domain.fleet.announced import Standby
from orchestrator.settings import Settings
from orchestrator.transport.announcements import list_standbys
from orchestrator.transport.connection import UNAVAILABLE, connect
from orchestrator.transport.keys import Keys

_PROBE_TTL = 60


@dataclass(frozen=True, kw_only=True)
class RedisHealth:
    """The result of a health check of Redis."""

    reachable: bool
    """Redis answers."""
    error: str | None = None
    """Why Redis does not answer, or why it refuses writes."""
    is_locked: bool = False
    """Redis answers, but refuses the user or password."""
    server: str = "Redis"
    """The server software: Redis or Valkey."""
    version: str | None = None
    """The version of the server."""
    used_memory: int = 0
    """Used memory in bytes."""
    max_memory: int = 0
    """The memory limit in bytes; 0 if there is none."""
    eviction: str = "noeviction"
    """The eviction policy of a full Redis."""
    complaint: str | None = None
    """Why the scheduler cannot use Postgres, if it reported a problem in the last seconds."""

    @property
    def fullness(self) -> float:
        """The share of the memory limit in use, from 0 to 1."""
        return self.used_memory / self.max_memory if self.max_memory else 0.0


def check_health(redis: Redis, keys: Keys) -> RedisHealth:
    """Read the state of Redis and try a write: only a write shows whether Redis accepts writes."""
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
        version=str(info.get("valkey_version", info["redis_version"])),  # Valkey has both, for compatibility
        used_memory=int(info["used_memory"]),
        max_memory=int(info.get("maxmemory", 0)),
        eviction=str(info.get("maxmemory_policy", "noeviction")),
        complaint=complaint.decode("utf-8", "replace") if complaint else None,
    )


def _refusal(redis: Redis, keys: Keys) -> str | None:
    """Return why a write is refused, or None. The write uses the leader's canary key, so that no key is added."""
    try:
        redis.set(keys.canary, b"1", ex=_PROBE_TTL, nx=True)  # Redis refuses it even if the key exists
    except RedisError as error:
        return str(error)
    return None


def refused_commands(redis: Redis, keys: Keys) -> list[str]:
    """Return the commands that Redis refuses to this user although processes need them, tried on a key of its own."""
    key = keys.doctor
    refused = []
    for command in (
        ("XADD", key, "*", "d", ""),
        ("EXPIRE", key, _PROBE_TTL),
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
    """Return the number of worker processes with a recent heartbeat."""
    names = cast("set[bytes]", redis.smembers(keys.workers))
    return redis.exists(*(keys.worker("").encode() + name for name in names)) if names else 0


@dataclass(frozen=True, kw_only=True)
class ForeignKey:
    """One of our keys that holds another type, so that our commands cannot use it."""

    key: str
    expected: str
    found: str


@dataclass(frozen=True, kw_only=True)
class RedisView:
    """Findings about our keys in Redis."""

    error: str | None = None
    """The error that prevented the inspection."""
    quarantined: int | None = None
    """The number of quarantined messages; None if unknown."""
    foreign_keys: tuple[ForeignKey, ...] = ()
    """Our keys that another program has overwritten."""
    standbys: tuple[Standby, ...] | None = None
    """Standby schedulers; None if unknown."""


def inspect(redis: Redis, keys: Keys, generation: str | None, queues: Iterable[str]) -> RedisView:
    """Inspect the keys of a generation."""
    expected = keys.types(generation, queues)
    pipeline = redis.pipeline(transaction=False)
    for key in expected:
        pipeline.type(key)
    pipeline.xlen(keys.quarantine)
    *types, quarantined = pipeline.execute(raise_on_error=False)
    standbys_type = types[list(expected).index(keys.standbys)]
    return RedisView(
        standbys=tuple(list_standbys(redis, keys)) if standbys_type in (b"set", b"none") else None,
        quarantined=quarantined if isinstance(quarantined, int) else None,
        foreign_keys=tuple(
            ForeignKey(key=key, expected=kind, found=actual.decode())
            for (key, kind), actual in zip(expected.items(), types, strict=True)
            if isinstance(actual, bytes) and actual.decode() not in (kind, "none")
        ),
    )


Shards = list[tuple[Redis, Keys]]
"""A client and the keys of each shard. Shards on the same server share a client."""


@contextmanager
def connected_shards(settings: Settings, timeout: float) -> Iterator[Shards]:
    """Connect to the servers of all shards."""
    clients: dict[str, Redis] = {}
    with ExitStack() as closing:
        for shard_settings in (by_shard := [settings.of_shard(number) for number in range(settings.shards)]):
            if (url := shard_settings.require_redis()) not in clients:
                clients[url] = connect(url, timeout=timeout)
                closing.callback(clients[url].close)
        yield [(clients[shard_settings.require_redis()], Keys.of(shard_settings)) for shard_settings in by_shard]


def inspect_all(shards: Shards, generation: str | None, queues: Sequence[str]) -> tuple[RedisHealth, RedisView]:
    """Check the servers of all shards. Return the worst health and a combined view. `generation` is shard 0's."""
    healths: list[RedisHealth] = []
    for redis, keys in shards:
        healths.append(check_health(redis, keys))
        if not healths[-1].reachable:  # the next check may take just as long
            break
    worst = max(healths, key=lambda view: (not view.reachable, view.error or "", view.complaint or "", view.fullness))
    if not worst.reachable:
        return worst, RedisView()
    views = [
        inspect(redis, keys, None if number else generation, () if number else queues)
        for number, (redis, keys) in enumerate(shards)
    ]
    return worst, RedisView(
        quarantined=sum(view.quarantined or 0 for view in views) if views[0].quarantined is not None else None,
        foreign_keys=tuple(key for view in views for key in view.foreign_keys),
        standbys=distinct(view.standbys for view in views),
    )


def distinct(standbys_by_shard: Iterable[Sequence[Standby] | None]) -> tuple[Standby, ...] | None:
    """Merge the standbys of all shards by scheduler. Return None if those of any shard are unknown."""
    by_address: dict[str, Standby] = {}
    for standbys in standbys_by_shard:
        if standbys is None:
            return None
        for standby in standbys:
            by_address.setdefault(standby.address, standby)
    return tuple(by_address[address] for address in sorted(by_address))
