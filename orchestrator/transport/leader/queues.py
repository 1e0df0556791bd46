"""The streams of queues: list their messages and withdraw messages from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

from redis import Redis
from redis.exceptions import ResponseError

from orchestrator.transport.keys import GROUP, Keys

# Messages up to `last-delivered-id` have been delivered to a worker. Later ones have not.
_TAKE_BACK = """
local function parts(id)
  local milliseconds, sequence = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(milliseconds), tonumber(sequence)
end
local groups = redis.pcall('XINFO', 'GROUPS', KEYS[1])
if groups.err then return {} end
local time, count = -1, -1
for _, group in ipairs(groups) do
  local about = {}
  for place = 1, #group, 2 do about[group[place]] = group[place + 1] end
  if about['name'] == ARGV[1] then time, count = parts(about['last-delivered-id']) end
end
local taken = {}
for place = 2, #ARGV do
  local milliseconds, sequence = parts(ARGV[place])
  if milliseconds > time or (milliseconds == time and sequence > count) then
    if redis.call('XDEL', KEYS[1], ARGV[place]) == 1 then taken[#taken + 1] = ARGV[place] end
  end
end
return taken
"""


class StreamsDamaged(Exception):
    """The key of one of our streams has another type, or its stream has reached the last possible id."""


class Message(NamedTuple):
    """A dispatch message in a stream."""

    entry: str
    body: bytes
    consumer: str | None
    """The worker that received the message; None if no worker has."""


class Queues:
    """The dispatch messages that workers have not answered yet."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._take_back = redis.register_script(_TAKE_BACK)

    def messages(self, generation: str, queue: str) -> list[Message]:
        """Return all messages of a queue's stream. The dispatch window keeps their number small."""
        stream = self._keys.queue(generation, queue)
        with NOTICING_DAMAGE:
            entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", self._redis.xrange(stream))
        if not entries:
            return []
        try:
            pending = self._redis.xpending_range(stream, GROUP, "-", "+", len(entries) + 1000)
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            pending = []  # no worker has joined this queue in this generation yet
        owners = {item["message_id"]: item["consumer"].decode() for item in cast("list[dict[str, bytes]]", pending)}
        body_or_empty = self._keys.signing.body_or_empty
        return [
            Message(entry.decode(), body_or_empty(stream, (fields or {}).get(b"d", b"")), owners.get(entry))
            for entry, fields in entries
        ]

    def withdraw(self, generation: str, queue: str, entries: Sequence[str]) -> None:
        """Delete messages, so that no worker receives them."""
        stream = self._keys.queue(generation, queue)
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.xack(stream, GROUP, *entries)
        pipeline.xdel(stream, *entries)
        try:
            with NOTICING_DAMAGE:
                pipeline.execute()
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise

    def take_back(self, generation: str, queue: str, entries: Sequence[str]) -> list[str]:
        """Delete the messages that no worker has received yet; return their ids."""
        entry_ids = self._take_back(keys=[self._keys.queue(generation, queue)], args=[GROUP, *entries])
        return [entry.decode() for entry in cast("list[bytes]", entry_ids)]


class _NoticingDamage:
    """Raises `StreamsDamaged` for errors of a damaged stream. A class, because a generator takes five times as long."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, type: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ResponseError) and ("WRONGTYPE" in str(error) or "exhausted" in str(error)):
            raise StreamsDamaged(str(error)) from error


NOTICING_DAMAGE = _NoticingDamage()
