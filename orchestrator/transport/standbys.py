"""Schedulers that stand by: each says so in Redis, for people to see, and is forgotten when it no longer does."""

from __future__ import annotations

from typing import cast

from redis import Redis

from orchestrator.domain.fleet.announced import Standby
from orchestrator.transport.codec import encode, prepare
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
