"""The messages of one old queue in transit, in the Redis of that queue.

Keys, all below `orchestrator:bridge:<queue>`:

    woken            list: messages that a bridge of the previous release was woken with
    taken:<bridge>   list: the id of the task and the message, which that bridge is enqueueing
    open             hash: id of the message's task -> id of the task to follow, and the message
    aside            hash: the same, of messages that cannot become tasks
    bridges          sorted set: bridges by the time at which they count as dead
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

from redis import Redis

_ID = 16
"""Bytes of an id."""
_NOBODY = bytes(_ID)
_TTL = 10
"""Seconds without a sign of life after which a bridge counts as dead."""

_MOST_BYTES = 16 * 1024 * 1024
"""Bytes after which a bridge takes no more messages at once."""

_TAKE = f"""
local taken, size = {{}}, 0
redis.call('ZADD', KEYS[1], 'NX', 0, ARGV[1])
for place = 3, #KEYS do
    while #taken < #ARGV - 1 and size < {_MOST_BYTES} do
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


class Taken(NamedTuple):
    """A message that a bridge has taken."""

    id: bytes
    """Of the task that it becomes."""
    message: bytes


class Kept(NamedTuple):
    """A message whose task is open."""

    task: bytes
    """The task to follow: another than the message's own where that has a unique key."""
    message: bytes


class Transit:
    """The way of one queue's messages."""

    def __init__(self, redis: Redis, queue: str, lists: Sequence[str], prefix: str = "") -> None:
        base = f"{prefix}orchestrator:bridge:{queue}"
        self.queue = queue
        self.lists = [f"{base}:woken", *lists]
        """Where messages wait, the most urgent first: a bridge of the previous release moved some to the first list."""
        self.open = f"{base}:open"
        self.aside = f"{base}:aside"
        self.name = uuid4().hex
        self._redis = redis
        self._base = base
        self._bridges = f"{base}:bridges"
        scripts = (_TAKE, _CONFIRM, _GIVE, _SETTLE, _RETAKE)
        self._take, self._confirm, self._give, self._settle, self._retake = map(redis.register_script, scripts)

    def _taken(self, bridge: str) -> str:
        return f"{self._base}:taken:{bridge}"

    # -- the bridges

    def beat(self) -> list[str]:
        """Say that this bridge lives; return those that do not."""
        now = int(self._now())
        self._redis.zadd(self._bridges, {self.name: now + _TTL})
        dead: Any = self._redis.zrangebyscore(self._bridges, 0, now)
        return [name.decode() for name in dead]

    def others(self) -> int:
        """Return how many other bridges live."""
        living: Any = self._redis.zcount(self._bridges, int(self._now()) + 1, "+inf")
        return int(living) - (self._redis.zscore(self._bridges, self.name) is not None)

    def retire(self) -> None:
        """Count as dead from now on, so that another bridge follows what this one has followed."""
        self._redis.zadd(self._bridges, {self.name: 0})

    def leave(self, bridge: str) -> bool:
        """Forget a bridge that has nothing on its list."""
        is_empty = not self._redis.llen(self._taken(bridge))
        if is_empty:
            self._redis.zrem(self._bridges, bridge)
        return is_empty

    def _now(self) -> float:
        seconds: Any = self._redis.time()
        return float(seconds[0])

    # -- messages

    def take(self, ids: Sequence[bytes]) -> list[Taken]:
        """Take as many messages as there are ids, or all."""
        keys = [self._bridges, self._taken(self.name), *self.lists]
        found: Any = self._take(keys, [self.name, *ids])
        return [_read(one) for one in found]

    def taken_by(self, bridge: str, most: int) -> list[Taken]:
        """Return what a bridge has taken and not enqueued yet, or is not known to have."""
        found: Any = self._redis.lrange(self._taken(bridge), 0, most - 1)
        return [_read(one) for one in found]

    def retake_aside(self) -> None:
        """Try what was put aside again: the application may know more tasks now."""
        self._retake([self.aside, self._taken(self.name)], [])

    def confirm(self, bridge: str, taken: Iterable[Taken], tasks: Mapping[bytes, bytes]) -> None:
        """Keep messages that have become tasks, by the ids of these, and put the others aside."""
        words: list[Any] = []
        for one in taken:
            task = tasks.get(one.id)
            words += [one.id + one.message, *((3, _NOBODY) if task is None else (2, task))]
        self._confirm([self._taken(bridge), self.open, self.aside], words)

    def each(self, key: str) -> Iterator[tuple[bytes, Kept]]:
        for id, kept in self._redis.hscan_iter(key, count=1_000):
            yield id, Kept(kept[:_ID], kept[_ID:])

    def kept(self, ids: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the messages of open tasks."""
        found: Any = self._redis.hmget(self.open, list(ids)) if ids else []
        return {id: kept[_ID:] for id, kept in zip(ids, found, strict=True) if kept is not None}

    def settle(self, ids: Sequence[bytes]) -> None:
        """Forget messages whose tasks have ended."""
        if ids:
            self._redis.hdel(self.open, *ids)

    def follow_up(self, id: bytes, messages: Sequence[tuple[str, bytes]]) -> None:
        """Do the same for one that has others follow it; these are sent once, by whichever process does it first."""
        self._settle([self.open, *(key for key, _ in messages)], [id, *(message for _, message in messages)])

    def give(self, source: str, messages: Sequence[tuple[bytes, str]]) -> int:
        """Give messages back to their lists, the last of them first in line; return how many."""
        given: Any = self._give([source, *(key for _, key in messages)], [id for id, _ in messages])
        return int(given)

    def messages(self) -> Iterator[bytes]:
        """Yield what waits or is aside, and leave it there."""
        for key in self.lists:
            for start in range(0, int(self._redis.llen(key)), 1_000):
                page: Any = self._redis.lrange(key, -start - 1_000, -start - 1)
                yield from page
        for _, kept in self.each(self.aside):
            yield kept.message

    def counts(self) -> dict[str, int]:
        """Return how many messages are where."""
        bridges: Any = self._redis.zrange(self._bridges, 0, -1)
        return {
            "waiting": sum(int(self._redis.llen(key)) for key in self.lists),
            "taken": sum(int(self._redis.llen(self._taken(name.decode()))) for name in bridges),
            "open": int(self._redis.hlen(self.open)),
            "aside": int(self._redis.hlen(self.aside)),
        }


def _read(entry: bytes) -> Taken:
    return Taken(entry[:_ID], entry[_ID:])
