"""Reads of Redis for people."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from redis import Redis

from orchestrator.domain.fleet.announced import Standby
from orchestrator.transport.keys import Keys
from orchestrator.transport.standbys import list_standbys


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
