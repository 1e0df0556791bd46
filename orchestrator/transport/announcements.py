"""What processes announce in Redis and others read: standbys, services, and payload stores in use.

A scheduler that stands by says so for people to see, and is forgotten when it no longer does.
"""

from __future__ import annotations

import contextlib
from contextlib import closing
from typing import cast

from redis import Redis, RedisError

from orchestrator.domain.executors.services import ServiceWorker
from orchestrator.domain.fleet.announced import Standby
from orchestrator.errors import Unavailable
from orchestrator.settings import Settings
from orchestrator.transport.codec import encode, prepare
from orchestrator.transport.connection import connect
from orchestrator.transport.keys import Keys

prepare(Standby)

_MOST = 100
"""Most standbys that are listed: another program could write any number there."""

# In one step: one that is back may speak at any moment. Names outlive what they name by a TTL at most, because the set
# of them expires too if nobody is left to tidy it.
_ANNOUNCE = """
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
redis.call('SADD', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
for _, name in ipairs(redis.call('SRANDMEMBER', KEYS[1], ARGV[5])) do
  if redis.call('EXISTS', ARGV[4] .. name) == 0 then redis.call('SREM', KEYS[1], name) end
end
"""


def announce(redis: Redis, keys: Keys, name: str, standby: Standby, ttl: float) -> None:
    """Say that a scheduler stands by, for so many seconds."""
    place = keys.standby(name)
    body = keys.signing.sign(place, encode(standby))
    redis.register_script(_ANNOUNCE)(
        keys=[keys.standbys, place], args=[body, int(ttl * 1000), name, keys.standby(""), _MOST]
    )


def withdraw(redis: Redis, keys: Keys, name: str) -> None:
    """Say that it does no longer: it leads, or ends."""
    pipeline = redis.pipeline(transaction=True)
    pipeline.delete(keys.standby(name))
    pipeline.srem(keys.standbys, name)
    pipeline.execute()


def list_standbys(redis: Redis, keys: Keys) -> list[Standby]:
    """Return the schedulers that stand by, in the order of their addresses."""
    names = cast("list[bytes]", redis.srandmember(keys.standbys, _MOST))
    if not names:
        return []
    places = [keys.standby(name.decode(errors="replace")) for name in names]
    found = cast("list[bytes | None]", redis.mget(places))
    read = (keys.signing.read(Standby, place, data) for place, data in zip(places, found, strict=True))
    return sorted((one for one in read if one is not None), key=lambda one: (one.address, one.since))


# -- registered services over HTTP, in Redis, where workers find them.
#
# An entry is the last heartbeat of a service worker. Redis may lose it: registrations are in Postgres, and the next
# heartbeat brings the entry back. Times are those of Redis's own clock, so that clocks of writers and readers may
# differ.

MOST = 10_000
"""Service workers that are known at once."""
FORGOTTEN_AFTER = 3_600.0
"""Seconds of silence after which an entry makes room; it may come back at any time."""

prepare(ServiceWorker)


def find(redis: Redis, keys: Keys, worker: str) -> tuple[ServiceWorker | None, float]:
    """Return what a worker has said last, if it is known, and the time."""
    pipeline = redis.pipeline(transaction=False)
    pipeline.time()
    pipeline.hget(keys.services, worker)
    now, data = pipeline.execute()
    return keys.signing.read(ServiceWorker, keys.services, data), _seconds(now)


def write(redis: Redis, keys: Keys, entry: ServiceWorker) -> None:
    """Write down what a worker says."""
    redis.hset(keys.services, entry.id, keys.signing.sign(keys.services, encode(entry)))


def drop(redis: Redis, keys: Keys, worker: str) -> None:
    """Forget a worker until it speaks again."""
    redis.hdel(keys.services, worker)


def list_live(redis: Redis, keys: Keys, ttl: float, service: str | None = None) -> list[ServiceWorker]:
    """Return the service workers that were heard of within `ttl` seconds and offer a service, or any, by their ids."""
    found, now = _read(redis, keys)
    return sorted(
        (
            one
            for one in found.values()
            if one is not None and now - one.heard_at <= ttl and one.services and service in (None, *one.services)
        ),
        key=lambda one: one.id,
    )


def make_room(redis: Redis, keys: Keys, worker: str) -> bool:
    """Say whether there is room for a worker; long silent ones, and unreadable entries, make some."""
    if redis.hlen(keys.services) < MOST or redis.hexists(keys.services, worker):
        return True
    found, now = _read(redis, keys)
    silent = [id for id, one in found.items() if one is None or now - one.heard_at > FORGOTTEN_AFTER]
    if silent:
        redis.hdel(keys.services, *silent)
    return len(found) - len(silent) < MOST


def _read(redis: Redis, keys: Keys) -> tuple[dict[str, ServiceWorker | None], float]:
    pipeline = redis.pipeline(transaction=False)
    pipeline.time()
    pipeline.hgetall(keys.services)
    now, entries = pipeline.execute()
    found = {
        id.decode("utf-8", "replace"): keys.signing.read(ServiceWorker, keys.services, data)
        for id, data in entries.items()
    }
    return found, _seconds(now)


def _seconds(now: tuple[int, int]) -> float:
    return now[0] + now[1] / 1e6


# -- which folders are payload stores in use: noted in Redis, for processes that have not seen them mounted.
#
# Where Redis has lost it, the next process that writes into such a folder notes it again.

_TIMEOUT = 2.0


class StoresInUse:
    """Notes which are; it is asked so rarely that it keeps no connection."""

    def __init__(self, settings: Settings) -> None:
        self._url = settings.redis_url and settings.of_shard(0).require_redis()
        self._key = Keys.of(settings).payload_stores

    def has(self, place: str) -> bool:
        """Say whether a store was noted; raise `Unavailable` where that cannot be known now."""
        if not self._url:
            return False
        try:
            with closing(connect(self._url, timeout=_TIMEOUT)) as redis:
                return bool(redis.sismember(self._key, place))
        except RedisError as error:
            raise Unavailable(
                f"The payload store {place} cannot be used: Redis, which knows whether it is new or not mounted, is "
                f"not reached: {error}"
            ) from error

    def note(self, place: str) -> None:
        """Note that a store is in use, if that can be done now."""
        if self._url:
            with contextlib.suppress(RedisError), closing(connect(self._url, timeout=_TIMEOUT)) as redis:
                redis.sadd(self._key, place)
