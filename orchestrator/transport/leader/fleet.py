"""Heartbeats and orders, on the leader's side."""

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
from orchestrator.transport.quarantine import Refused, set_aside_now

_PAUSE = 10.0
"""Seconds to leave a silent server alone: each call to it delays the leader for the whole timeout."""


class RemoteListeners:
    """Adds to the stream of live changes on another server. After a failure, the leader assumes that there are no
    listeners for a while, and marks the next entry as a first one."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._retry_at = 0.0
        self._has_gap = False

    def have_listeners(self) -> bool:
        """Return whether live events have a listener. After a lost entry, return False once."""
        had_gap, self._has_gap = self._has_gap, False
        if had_gap or time.monotonic() < self._retry_at:
            return False
        try:
            return bool(self._redis.exists(self._keys.watched))
        except UNAVAILABLE:
            self._retry_at = time.monotonic() + _PAUSE
            return False

    def add(self, body: bytes, kept: int) -> None:
        """Add a signed entry, unless an earlier entry was lost."""
        if self._has_gap:
            return
        try:
            self._redis.xadd(self._keys.changes, {"d": body}, maxlen=kept, approximate=True)
        except UNAVAILABLE:
            self._has_gap = True
            self._retry_at = time.monotonic() + _PAUSE


# Each script checks and acts in one step, because a worker may send a heartbeat and a consumer may receive a message at
# any moment. Removing a consumer with pending messages would lose track of these messages. If the key has a wrong type,
# `pcall` returns an error, which has no items.
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
"""Seconds without a read after which a consumer is removed. The next read of the worker creates it again."""


class FleetKeys:
    """Heartbeats of workers, the task names and parameters that they know, and orders to them."""

    def __init__(self, redis: Redis, keys: Keys, listeners: RemoteListeners | None = None) -> None:
        self._redis = redis
        self._keys = keys
        self._listeners = listeners
        self._forget_silent = redis.register_script(_FORGET_SILENT)
        self._forget_consumers = redis.register_script(_FORGET_CONSUMERS)
        self.is_watched = False
        """Whether live events had a listener when the heartbeats were last read."""
        self._refused_beats: dict[bytes, Refused] = {}
        """Malformed heartbeats. Each is quarantined once, although it is read every second."""
        self._beat_numbers: dict[str, int] = {}
        """The numbers of the last heartbeats. An order is signed with the number of the heartbeat that it answers."""

    def write_canary(self) -> None:
        """Write the canary, which shows whether Redis accepts writes."""
        self._redis.set(self._keys.canary, f"shards={self._keys.shards}", ex=CANARY_TTL)

    def heartbeats(self) -> list[Heartbeat]:
        """Write the canary, then return the heartbeats of all live workers.

        The write comes first: while Redis refuses writes, silence is no evidence that a worker is dead.
        """
        self.write_canary()
        members = cast("set[bytes]", self._redis.smembers(self._keys.workers))
        keys = [self._keys.worker("").encode() + member for member in members]
        watched = self._keys.canary if self._listeners else self._keys.watched  # a key in this shard's slot
        is_watched, *values = cast("list[bytes | None]", self._redis.mget([watched, *keys]))
        self.is_watched = self._listeners.have_listeners() if self._listeners else is_watched is not None
        beats: list[Heartbeat] = []
        refused: dict[bytes, Refused] = {}
        for key, value in zip(keys, values, strict=True):
            try:
                if value is not None:
                    beats.append(decode(Heartbeat, self._keys.signing.body(key.decode(errors="replace"), value)))
            except Malformed as error:
                refused[key] = Refused(key.decode(errors="replace"), value or b"", str(error))
        new = [refusal for key, refusal in refused.items() if self._refused_beats.get(key) != refusal]
        self._refused_beats = refused
        self._beat_numbers = {beat.worker: beat.number for beat in beats}
        if new:
            set_aside_now(self._redis, self._keys, new)
        return beats

    def forget_gone(self, generation: str, queues: Sequence[str]) -> list[str]:
        """Remove the ids of workers without a heartbeat, and idle consumers without pending messages.

        Return the queues whose streams hold messages.
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
        key = self._keys.names(digest)
        return self._keys.signing.read(list[Word], key, cast("bytes | None", self._redis.get(key)))

    def parameters(self, digest: str) -> dict[str, list[Parameter]] | None:
        """Return the parameters of tasks published under a digest."""
        key = self._keys.parameters(digest)
        body = cast("bytes | None", self._redis.get(key))
        return self._keys.signing.read(_ParametersByName, key, body)

    def order(self, orders: Mapping[str, Order]) -> None:
        """Send each worker its order."""
        pipeline = self._redis.pipeline(transaction=False)
        for worker, order in orders.items():
            stream = self._keys.orders(worker)
            body = self._keys.signing.sign(stream, encode(order), self._beat_numbers.get(worker, 0))
            pipeline.xadd(stream, {"d": body}, maxlen=1000, approximate=True)
            pipeline.expire(stream, _ORDERS_TTL)
        pipeline.execute()
