"""Announcements of processes in Redis: standby schedulers, service workers, and payload stores in use.

A standby scheduler announces itself for `status`. Its entry expires when it stops announcing.
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

_MAX_STANDBYS = 100
"""The maximum number of standbys to list: another program could write any number into the set."""

# A script, because a standby that returns may announce itself at any moment. The set of names expires too: if no
# standby is left to clean it up, names outlive their entries by one TTL at most.
_ANNOUNCE = """
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
redis.call('SADD', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
for _, name in ipairs(redis.call('SRANDMEMBER', KEYS[1], ARGV[5])) do
  if redis.call('EXISTS', ARGV[4] .. name) == 0 then redis.call('SREM', KEYS[1], name) end
end
"""


def announce(redis: Redis, keys: Keys, name: str, standby: Standby, ttl: float) -> None:
    """Announce a standby scheduler for `ttl` seconds."""
    key = keys.standby(name)
    body = keys.signing.sign(key, encode(standby))
    redis.register_script(_ANNOUNCE)(
        keys=[keys.standbys, key], args=[body, int(ttl * 1000), name, keys.standby(""), _MAX_STANDBYS]
    )


def withdraw(redis: Redis, keys: Keys, name: str) -> None:
    """Withdraw the announcement of a standby that now leads or ends."""
    pipeline = redis.pipeline(transaction=True)
    pipeline.delete(keys.standby(name))
    pipeline.srem(keys.standbys, name)
    pipeline.execute()


def list_standbys(redis: Redis, keys: Keys) -> list[Standby]:
    """Return the standby schedulers, ordered by address."""
    names = cast("list[bytes]", redis.srandmember(keys.standbys, _MAX_STANDBYS))
    if not names:
        return []
    standby_keys = [keys.standby(name.decode(errors="replace")) for name in names]
    bodies = cast("list[bytes | None]", redis.mget(standby_keys))
    decoded = (keys.signing.read(Standby, key, data) for key, data in zip(standby_keys, bodies, strict=True))
    return sorted((item for item in decoded if item is not None), key=lambda item: (item.address, item.since))


# -- registered service workers (HTTP), where workers look them up.
#
# An entry is the last heartbeat of a service worker. Redis may lose it: registrations are in Postgres, and the next
# heartbeat restores the entry. Times are by Redis's clock, so that the clocks of writers and readers may differ.

MAX_WORKERS = 10_000
"""The maximum number of registered service workers."""
FORGOTTEN_AFTER = 3_600.0
"""Seconds without a heartbeat after which an entry may be evicted for another. The worker may return at any time."""

prepare(ServiceWorker)


def find(redis: Redis, keys: Keys, worker: str) -> tuple[ServiceWorker | None, float]:
    """Return the last heartbeat of a service worker, if any, and Redis's time."""
    pipeline = redis.pipeline(transaction=False)
    pipeline.time()
    pipeline.hget(keys.services, worker)
    now, data = pipeline.execute()
    return keys.signing.read(ServiceWorker, keys.services, data), _seconds(now)


def write(redis: Redis, keys: Keys, entry: ServiceWorker) -> None:
    """Store the heartbeat of a service worker."""
    redis.hset(keys.services, entry.id, keys.signing.sign(keys.services, encode(entry)))


def drop(redis: Redis, keys: Keys, worker: str) -> None:
    """Remove a service worker until its next heartbeat."""
    redis.hdel(keys.services, worker)


def list_live(redis: Redis, keys: Keys, ttl: float, service: str | None = None) -> list[ServiceWorker]:
    """Return service workers heard of in the last `ttl` seconds, by id: those of `service`, or all that offer any."""
    workers, now = _read(redis, keys)
    return sorted(
        (
            worker
            for worker in workers.values()
            if worker is not None
            and now - worker.heard_at <= ttl
            and worker.services
            and service in (None, *worker.services)
        ),
        key=lambda worker: worker.id,
    )


def make_room(redis: Redis, keys: Keys, worker: str) -> bool:
    """Return whether there is room for a service worker, after evicting silent and unreadable entries."""
    if redis.hlen(keys.services) < MAX_WORKERS or redis.hexists(keys.services, worker):
        return True
    workers, now = _read(redis, keys)
    silent = [id for id, entry in workers.items() if entry is None or now - entry.heard_at > FORGOTTEN_AFTER]
    if silent:
        redis.hdel(keys.services, *silent)
    return len(workers) - len(silent) < MAX_WORKERS


def _read(redis: Redis, keys: Keys) -> tuple[dict[str, ServiceWorker | None], float]:
    pipeline = redis.pipeline(transaction=False)
    pipeline.time()
    pipeline.hgetall(keys.services)
    now, entries = pipeline.execute()
    workers = {
        id.decode("utf-8", "replace"): keys.signing.read(ServiceWorker, keys.services, data)
        for id, data in entries.items()
    }
    return workers, _seconds(now)


def _seconds(now: tuple[int, int]) -> float:
    return now[0] + now[1] / 1e6


# -- payload store folders in use, for processes that must know whether an empty folder is new or not mounted.
#
# If Redis loses a folder, the next process that writes into it records it again.

_TIMEOUT = 2.0


class StoresInUse:
    """Records the folders in use. It is used so rarely that it keeps no connection."""

    def __init__(self, settings: Settings) -> None:
        self._url = settings.redis_url and settings.of_shard(0).require_redis()
        self._key = Keys.of(settings).payload_stores

    def has(self, folder: str) -> bool:
        """Return whether a store is recorded; raise `Unavailable` if Redis cannot be reached."""
        if not self._url:
            return False
        try:
            with closing(connect(self._url, timeout=_TIMEOUT)) as redis:
                return bool(redis.sismember(self._key, folder))
        except RedisError as error:
            raise Unavailable(
                f"The payload store {folder} cannot be used: Redis cannot be reached, and only Redis knows whether the "
                f"store is new or not mounted: {error}"
            ) from error

    def note(self, folder: str) -> None:
        """Record that a store is in use, if Redis can be reached."""
        if self._url:
            with contextlib.suppress(RedisError), closing(connect(self._url, timeout=_TIMEOUT)) as redis:
                redis.sadd(self._key, folder)
