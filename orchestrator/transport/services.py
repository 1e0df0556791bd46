"""Registered services over HTTP, in Redis, where workers find them.

An entry is the last heartbeat of a service worker. Redis may lose it: registrations are in Postgres, and the next
heartbeat brings the entry back. Times are those of Redis's own clock, so that clocks of writers and readers may differ.
"""

from __future__ import annotations

from redis import Redis

from orchestrator.domain.executors.services import ServiceWorker
from orchestrator.transport.codec import encode, prepare
from orchestrator.transport.keys import Keys

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
