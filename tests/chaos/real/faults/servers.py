"""Postgres and Redis that crash, fail over, lose data, or are full."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from random import Random

from redis.exceptions import OutOfMemoryError, RedisError

from tests.chaos.breaking import flush_redis, postgres_down, redis_down
from tests.chaos.real.arena import Arena
from tests.chaos.real.faults.kinds import fault

_FILLER = "chaos:filler"
_ROOM = 1 << 20


@fault
def postgres_restart(arena: Arena, pick: Random) -> Iterator[str]:
    """Crash Postgres; it recovers from its write-ahead log."""
    with postgres_down(arena.services):
        yield "Postgres stopped in immediate mode"


@fault
def postgres_failover(arena: Arena, pick: Random) -> Iterator[str]:
    """Kill Postgres for good, and promote a synchronous standby."""
    if not arena.services.postgres.running:
        yield "nothing: Postgres is down, and has no standby"
        return
    arena.fail_over()
    yield "Postgres failed over to a synchronous standby"


@fault
def redis_restart(arena: Arena, pick: Random) -> Iterator[str]:
    """Crash Redis; it restarts with its append-only file, outdated if Redis last ran without persistence."""
    with redis_down(arena.services, persistence=True):
        yield "Redis killed; it comes back with its log"


@fault
def redis_empty(arena: Arena, pick: Random) -> Iterator[str]:
    """Crash Redis; it restarts empty, and without persistence."""
    with redis_down(arena.services, persistence=False):
        yield "Redis killed; it comes back empty"


@fault
def redis_flush(arena: Arena, pick: Random) -> Iterator[str]:
    flush_redis(arena.services)
    yield "FLUSHALL"


@fault
def redis_full(arena: Arena, pick: Random) -> Iterator[str]:
    """Fill Redis to its memory limit, so that it refuses writes."""
    with arena.redis() as redis:
        redis.config_set("maxmemory", redis.info("memory")["used_memory"] + _ROOM)
        try:
            with suppress(OutOfMemoryError):
                while True:
                    redis.append(_FILLER, b"\0" * (_ROOM // 8))
            yield "Redis filled to its maxmemory"
        finally:
            with suppress(RedisError):  # Redis has restarted, and has no limit
                redis.config_set("maxmemory", 0)
                redis.delete(_FILLER)
