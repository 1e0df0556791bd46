"""The leader's side of heartbeats and orders."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import cast

from redis import Redis

from orchestrator.domain.tasks.parameters import Parameter, Parameters
from orchestrator.transport.codec import Heartbeat, Malformed, Order, Word, decode, encode, prepare
from orchestrator.transport.connection import UNAVAILABLE
from orchestrator.transport.keys import CANARY_TTL, PRIVATE_TTL, Keys, private_queue
from orchestrator.transport.quarantine import Refused, keep_aside

_PAUSE = 10.0
"""Seconds for which a server that does not answer is left alone: it keeps the leader for as long as its timeout."""


class FarListeners:
    """Adds to the stream of changes. Where that fails, nobody listens: the next entry that is added is a first one."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._try_at = 0.0
        self._has_gap = False

    def are_there(self) -> bool:
        """Say whether somebody listens; not, once, after an entry was lost."""
        had_gap, self._has_gap = self._has_gap, False
        if had_gap or time.monotonic() < self._try_at:
            return False
        try:
            return bool(self._redis.exists(self._keys.watched))
        except UNAVAILABLE:
            self._try_at = time.monotonic() + _PAUSE
            return False

    def add(self, body: bytes, kept: int) -> None:
        """Add an entry, signed, unless one was lost before it."""
        if self._has_gap:
            return
        try:
            self._redis.xadd(self._keys.changes, {"d": body}, maxlen=kept, approximate=True)
        except UNAVAILABLE:
            self._has_gap = True
            self._try_at = time.monotonic() + _PAUSE


# Both look and act in one step: a worker that is back may beat, and a consumer receive a message, at any moment. A
# consumer that was removed with a message to answer for would leave it where nobody finds it. Where the key is not
# what it should be, `pcall` returns an error, which has no items.
_FORGET_SILENT = """
for _, worker in ipairs(redis.pcall('SMEMBERS', KEYS[1])) do
  if redis.call('EXISTS', ARGV[1] .. worker) == 0 then
    redis.call('SREM', KEYS[1], worker)
    redis.call('EXPIRE', ARGV[2] .. worker, ARGV[3])
  end
end
"""
_FORGET_CONSUMERS = """
for _, group in ipairs(redis.pcall('XINFO', 'GROUPS', KEYS[1])) do
  for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], group[2])) do
    local about = {}
    for place = 1, #consumer, 2 do about[consumer[place]] = consumer[place + 1] end
    if about['pending'] == 0 and about['idle'] > tonumber(ARGV[1]) then
      redis.call('XGROUP', 'DELCONSUMER', KEYS[1], group[2], about['name'])
    end
  end
end
return redis.pcall('XLEN', KEYS[1]) ~= 0
"""

_ParametersByName = dict[Word, Parameters]
prepare(_ParametersByName)
_ORDERS_TTL = 60
_CONSUMER_IDLE = 60
"""Seconds without a read after which a consumer is gone; one that is back is made anew by its next read."""


class FleetKeys:
    """The heartbeats of workers, what they know, and their orders."""

    def __init__(self, redis: Redis, keys: Keys, listeners: FarListeners | None = None) -> None:
        self._redis = redis
        self._keys = keys
        self._listeners = listeners
        self._forget_silent = redis.register_script(_FORGET_SILENT)
        self._forget_consumers = redis.register_script(_FORGET_CONSUMERS)
        self.is_watched = False
        """Somebody listened to live changes when the heartbeats were last read."""
        self._refused_beats: dict[bytes, Refused] = {}
        """Heartbeats that make no sense; each is set aside once, although it is read every second."""
        self._beat_numbers: dict[str, int] = {}
        """Of the heartbeats that were read last: an order answers one, and is signed with its number."""

    def write_canary(self) -> None:
        """Learn whether Redis takes writes."""
        self._redis.set(self._keys.canary, f"shards={self._keys.shards}", ex=CANARY_TTL)

    def heartbeats(self) -> list[Heartbeat]:
        """Write the canary, then return the heartbeats of all live workers.

        The write comes first: while Redis refuses writes, the workers' silence means nothing.
        """
        self.write_canary()
        members = cast("set[bytes]", self._redis.smembers(self._keys.workers))
        keys = [self._keys.worker("").encode() + member for member in members]
        watched = self._keys.canary if self._listeners else self._keys.watched  # a key of our slot
        is_watched, *found = cast("list[bytes | None]", self._redis.mget([watched, *keys]))
        self.is_watched = self._listeners.are_there() if self._listeners else is_watched is not None
        beats: list[Heartbeat] = []
        refused: dict[bytes, Refused] = {}
        for key, value in zip(keys, found, strict=True):
            try:
                if value is not None:
                    beats.append(decode(Heartbeat, self._keys.signing.body(key.decode(errors="replace"), value)))
            except Malformed as error:
                refused[key] = Refused(key.decode(errors="replace"), value or b"", str(error))
        new = [refusal for key, refusal in refused.items() if self._refused_beats.get(key) != refusal]
        self._refused_beats = refused
        self._beat_numbers = {beat.worker: beat.number for beat in beats}
        if new:
            keep_aside(self._redis, self._keys, new)
        return beats

    def forget_gone(self, generation: str, queues: Sequence[str]) -> list[str]:
        """Drop the ids of workers that have no heartbeat, and their consumers once nothing is left of what they had.

        Return those of the queues in which messages stand.
        """
        keys = self._keys
        self._forget_silent(
            keys=[keys.workers], args=[keys.worker(""), keys.queue(generation, private_queue("")), PRIVATE_TTL]
        )
        pipeline = self._redis.pipeline(transaction=False)
        for queue in queues:
            self._forget_consumers(keys=[keys.queue(generation, queue)], args=[_CONSUMER_IDLE * 1000], client=pipeline)
        return list(compress(queues, pipeline.execute()))

    def names(self, digest: str) -> list[str] | None:
        """Return the task names published under a digest."""
        place = self._keys.names(digest)
        return self._keys.signing.read(list[Word], place, cast("bytes | None", self._redis.get(place)))

    def parameters(self, digest: str) -> dict[str, list[Parameter]] | None:
        """Return the parameters of tasks published under a digest."""
        place = self._keys.parameters(digest)
        body = cast("bytes | None", self._redis.get(place))
        return self._keys.signing.read(_ParametersByName, place, body)

    def order(self, orders: Mapping[str, Order]) -> None:
        """Send each worker its order."""
        pipeline = self._redis.pipeline(transaction=False)
        for worker, order in orders.items():
            stream = self._keys.orders(worker)
            body = self._keys.signing.sign(stream, encode(order), self._beat_numbers.get(worker, 0))
            pipeline.xadd(stream, {"d": body}, maxlen=1000, approximate=True)
            pipeline.expire(stream, _ORDERS_TTL)
        pipeline.execute()
