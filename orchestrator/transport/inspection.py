"""Reads of Redis for people."""

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


@dataclass(frozen=True, kw_only=True)
class ForeignKey:
    """A key of ours under which something else stands, so that no command of ours can use it."""

    key: str
    """Its name."""
    expected: str
    """The type that it should have."""
    found: str
    """The type that it has."""


@dataclass(frozen=True, kw_only=True)
class RedisView:
    """The state of Redis in one value."""

    error: str | None = None
    """Why nothing more is known."""
    quarantined: int | None = None
    """Quarantined messages; None if unknown."""
    foreign_keys: tuple[ForeignKey, ...] = ()
    """Keys of ours that another program has taken."""
    standbys: tuple[Standby, ...] | None = None
    """Schedulers that stand by; None if unknown."""


def inspect(redis: Redis, keys: Keys, generation: str | None, queues: Iterable[str]) -> RedisView:
    """Look at the keys of a generation."""
    expected = keys.types(generation, queues)
    pipeline = redis.pipeline(transaction=False)
    for key in expected:
        pipeline.type(key)
    pipeline.xlen(keys.quarantine)
    *found, quarantined = pipeline.execute(raise_on_error=False)
    names = found[list(expected).index(keys.standbys)]
    return RedisView(
        standbys=tuple(list_standbys(redis, keys)) if names in (b"set", b"none") else None,
        quarantined=quarantined if isinstance(quarantined, int) else None,
        foreign_keys=tuple(
            ForeignKey(key=key, expected=kind, found=actual.decode())
            for (key, kind), actual in zip(expected.items(), found, strict=True)
            if isinstance(actual, bytes) and actual.decode() not in (kind, "none")
        ),
    )


Shards = list[tuple[Redis, Keys]]
"""Of each shard: a client, which is one where one server has several, and its keys."""


@contextmanager
def connected_shards(settings: Settings, timeout: float) -> Iterator[Shards]:
    """Connect to the servers of all shards."""
    clients: dict[str, Redis] = {}
    with ExitStack() as closing:
        for one in (found := [settings.of_shard(number) for number in range(settings.shards)]):
            if (url := one.require_redis()) not in clients:
                clients[url] = connect(url, timeout=timeout)
                closing.callback(clients[url].close)
        yield [(clients[one.require_redis()], Keys.of(one)) for one in found]


def inspect_all(shards: Shards, generation: str | None, queues: Sequence[str]) -> tuple[RedisHealth, RedisView]:
    """Look at the servers of all shards, and return the worst health; the generation is the first one's."""
    healths: list[RedisHealth] = []
    for redis, keys in shards:
        healths.append(check_health(redis, keys))
        if not healths[-1].reachable:  # the next may take as long to say so
            break
    worst = max(healths, key=lambda one: (not one.reachable, one.error or "", one.complaint or "", one.fullness))
    if not worst.reachable:
        return worst, RedisView()
    views = [
        inspect(redis, keys, None if number else generation, () if number else queues)
        for number, (redis, keys) in enumerate(shards)
    ]
    return worst, RedisView(
        quarantined=sum(one.quarantined or 0 for one in views) if views[0].quarantined is not None else None,
        foreign_keys=tuple(key for one in views for key in one.foreign_keys),
        standbys=distinct(one.standbys for one in views),
    )


def distinct(found: Iterable[Sequence[Standby] | None]) -> tuple[Standby, ...] | None:
    """Return the standbys of all shards, each scheduler once; None if those of one are unknown."""
    by_address: dict[str, Standby] = {}
    for standbys in found:
        if standbys is None:
            return None
        for one in standbys:
            by_address.setdefault(one.address, one)
    return tuple(by_address[address] for address in sorted(by_address))
