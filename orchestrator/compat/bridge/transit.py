"""The messages of a Celery queue in transit, in the Redis of that queue.

Keys, all below `orchestrator:bridge:<queue>`:

    woken            list: messages moved here by a bridge of the previous release
    taken:<bridge>   list: task id and message, for messages that this bridge is enqueueing
    open             hash: id of the message's task -> id of the task to follow, and the message
    aside            hash: the same for messages that cannot become tasks
    refused          hash: the same for messages whose tasks have ended, and whose results Celery cannot store
    bridges          sorted set: bridges by the time at which they count as dead
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

from redis import Redis

_ID = 16
"""Size of an id in bytes."""
_NO_TASK = bytes(_ID)
_TTL = 10
"""Seconds without a heartbeat after which a bridge counts as dead."""

_MAX_BYTES = 16 * 1024 * 1024
"""Bytes of messages that a bridge takes at once, roughly."""

_TAKE = f"""
local taken, size = {{}}, 0
redis.call('ZADD', KEYS[1], 'NX', 0, ARGV[1])
for place = 3, #KEYS do
    while #taken < #ARGV - 1 and size < {_MAX_BYTES} do
        local message = redis.call('RPOP', KEYS[place])
        if not message then break end
        message = ARGV[#taken + 2] .. message
        redis.call('RPUSH', KEYS[2], message)
        table.insert(taken, message)
        size = size + #message
    end
end
return taken
"""
_CONFIRM = """
for place = 1, #ARGV, 3 do
    if redis.call('LREM', KEYS[1], 1, ARGV[place]) == 1 then
        local id, message = string.sub(ARGV[place], 1, 16), string.sub(ARGV[place], 17)
        redis.call('HSET', KEYS[tonumber(ARGV[place + 1])], id, ARGV[place + 2] .. message)
    end
end
"""
_GIVE = """
local given = 0
for place, id in ipairs(ARGV) do
    local kept = redis.call('HGET', KEYS[1], id)
    if kept then
        redis.call('HDEL', KEYS[1], id)
        redis.call('RPUSH', KEYS[place + 1], string.sub(kept, 17))
        given = given + 1
    end
end
return given
"""
_SETTLE = """
if redis.call('HDEL', KEYS[1], ARGV[1]) == 1 then
    for place = 2, #ARGV do
        redis.call('LPUSH', KEYS[place], ARGV[place])
    end
end
"""
_RETAKE = """
for place, id in ipairs(redis.call('HKEYS', KEYS[1])) do
    redis.call('RPUSH', KEYS[2], id .. string.sub(redis.call('HGET', KEYS[1], id), 17))
end
redis.call('DEL', KEYS[1])
"""
_MOVE = """
for _, id in ipairs(#ARGV > 0 and ARGV or redis.call('HKEYS', KEYS[1])) do
    local kept = redis.call('HGET', KEYS[1], id)
    if kept then
        redis.call('HSET', KEYS[2], id, kept)
        redis.call('HDEL', KEYS[1], id)
    end
end
"""


class Taken(NamedTuple):
    """A message that a bridge has taken."""

    id: bytes
    """Id of the future task."""
    message: bytes


class Kept(NamedTuple):
    """An open message, or one that was put aside."""

    task: bytes
    """Id of the task to follow. With a unique key, it may be the task of another message."""
    message: bytes


class Transit:
    """The state of one queue's messages in Redis."""

    def __init__(self, redis: Redis, queue: str, lists: Sequence[str], prefix: str = "") -> None:
        base = f"{prefix}orchestrator:bridge:{queue}"
        self.queue = queue
        self.lists = [f"{base}:woken", *lists]
        """The lists of waiting messages, the most urgent first. A bridge of the previous release wrote to the first."""
        self.open = f"{base}:open"
        self.aside = f"{base}:aside"
        self._refused = f"{base}:refused"
        self.name = uuid4().hex
        self._redis = redis
        self._base = base
        self._bridges = f"{base}:bridges"
        scripts = [redis.register_script(script) for script in (_TAKE, _CONFIRM, _GIVE, _SETTLE, _RETAKE, _MOVE)]
        self._take, self._confirm, self._give, self._settle, self._retake, self._move = scripts

    def _taken(self, bridge: str) -> str:
        return f"{self._base}:taken:{bridge}"

    # -- bridges

    def beat(self) -> list[str]:
        """Write this bridge's heartbeat. Return the names of dead bridges."""
        now = int(self._now())
        self._redis.zadd(self._bridges, {self.name: now + _TTL})
        dead: Any = self._redis.zrangebyscore(self._bridges, 0, now)
        return [name.decode() for name in dead]

    def others(self) -> int:
        """Return the number of other living bridges."""
        living: Any = self._redis.zcount(self._bridges, int(self._now()) + 1, "+inf")
        return int(living) - (self._redis.zscore(self._bridges, self.name) is not None)

    def retire(self) -> None:
        """Mark this bridge as dead, so that another bridge follows its tasks."""
        self._redis.zadd(self._bridges, {self.name: 0})

    def leave(self, bridge: str) -> bool:
        """Remove a bridge with an empty list. Return whether the list was empty."""
        is_empty = not self._redis.llen(self._taken(bridge))
        if is_empty:
            self._redis.zrem(self._bridges, bridge)
        return is_empty

    def _now(self) -> float:
        seconds: Any = self._redis.time()
        return float(seconds[0])

    # -- messages

    def take(self, ids: Sequence[bytes]) -> list[Taken]:
        """Take messages from the queue, one for each id, or all if there are fewer."""
        keys = [self._bridges, self._taken(self.name), *self.lists]
        entries: Any = self._take(keys, [self.name, *ids])
        return [_read(entry) for entry in entries]

    def taken_by(self, bridge: str, limit: int) -> list[Taken]:
        """Return messages that a bridge has taken and not confirmed."""
        entries: Any = self._redis.lrange(self._taken(bridge), 0, limit - 1)
        return [_read(entry) for entry in entries]

    def retake_aside(self) -> None:
        """Take messages again that were put aside: the application may have more tasks now."""
        self._retake([self.aside, self._taken(self.name)], [])

    def confirm(self, bridge: str, taken: Iterable[Taken], tasks: Mapping[bytes, bytes]) -> None:
        """Move taken messages: those that have become tasks to the open ones, the others aside."""
        arguments: list[Any] = []
        for entry in taken:
            task = tasks.get(entry.id)
            arguments += [entry.id + entry.message, *((3, _NO_TASK) if task is None else (2, task))]
        self._confirm([self._taken(bridge), self.open, self.aside], arguments)

    def each(self, key: str) -> Iterator[tuple[bytes, Kept]]:
        for id, kept in self._redis.hscan_iter(key, count=1_000):
            yield id, Kept(kept[:_ID], kept[_ID:])

    def kept(self, ids: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the open messages with these ids."""
        entries: Any = self._redis.hmget(self.open, list(ids)) if ids else []
        return {id: kept[_ID:] for id, kept in zip(ids, entries, strict=True) if kept is not None}

    def settle(self, ids: Sequence[bytes]) -> None:
        """Delete messages whose tasks have ended."""
        if ids:
            self._redis.hdel(self.open, *ids)

    def refuse(self, id: bytes) -> None:
        """Put a message away whose result cannot be written, so that it is open no longer; its task has run."""
        self._move([self.open, self._refused], [id])

    def reopen_refused(self) -> None:
        """Open messages again whose results could not be written: this bridge may be able to."""
        self._move([self._refused, self.open], [])

    def follow_up(self, id: bytes, messages: Sequence[tuple[str, bytes]]) -> None:
        """Delete a message whose task has ended, and send its follow-up messages, once, whichever process is first."""
        self._settle([self.open, *(key for key, _ in messages)], [id, *(message for _, message in messages)])

    def give(self, source: str, messages: Sequence[tuple[bytes, str]]) -> int:
        """Return messages to their lists. The last message is first in line. Return how many were returned."""
        count: Any = self._give([source, *(key for _, key in messages)], [id for id, _ in messages])
        return int(count)

    def messages(self) -> Iterator[bytes]:
        """Yield messages that wait or were put aside, without taking them."""
        for key in self.lists:
            for start in range(0, int(self._redis.llen(key)), 1_000):
                page: Any = self._redis.lrange(key, -start - 1_000, -start - 1)
                yield from page
        for _, kept in self.each(self.aside):
            yield kept.message

    def counts(self) -> dict[str, int]:
        """Return the number of messages in each place."""
        bridges: Any = self._redis.zrange(self._bridges, 0, -1)
        return {
            "waiting": sum(int(self._redis.llen(key)) for key in self.lists),
            "taken": sum(int(self._redis.llen(self._taken(name.decode()))) for name in bridges),
            "open": int(self._redis.hlen(self.open)),
            "aside": int(self._redis.hlen(self.aside)),
            "refused": int(self._redis.hlen(self._refused)),
        }


def _read(entry: bytes) -> Taken:
    return Taken(entry[:_ID], entry[_ID:])
