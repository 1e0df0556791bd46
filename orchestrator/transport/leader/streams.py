"""The leader's input and output: read events, publish the cursor, and dispatch tasks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, cast

from redis import Redis

from orchestrator.domain.tasks.task import KeyHolder
from orchestrator.transport.codec import Applied, Ended, Word, encode
from orchestrator.transport.connection import UNAVAILABLE, Argument, Found, Listening, RawConnection, Script, field
from orchestrator.transport.keys import KEY_HOLDER_TTL, NUDGE_CAP, READY_TASK, Keys
from orchestrator.transport.leader.fleet import FleetKeys, RemoteListeners
from orchestrator.transport.leader.queues import NOTICING_DAMAGE, Queues
from orchestrator.transport.leader.terms import Deposed, TermForgotten, Terms, entry_after
from orchestrator.transport.pages import Pages
from orchestrator.transport.quarantine import Refused, set_aside_now
from orchestrator.transport.signing import Signing

MAX_READ_BYTES = 4_000_000
"""The maximum size in bytes of the events applied in one tick; a single larger event is applied alone."""


class BatchSizes:
    """Adapts the number of entries to read to their size, so that the leader reads no more than a tick can apply."""

    def __init__(self) -> None:
        self._limit: int | None = None

    def number(self, most: int) -> int:
        """Return the number of entries to read: `most`, or fewer if recent entries were large."""
        return most if self._limit is None else min(most, self._limit)

    def cut(self, entries: list[tuple[str, bytes]], requested: int) -> list[tuple[str, bytes]]:
        """Return the first entries up to `MAX_READ_BYTES`; the rest is read again later.

        `requested` is the COUNT of the read.
        """
        size = 0
        for count, (_, body) in enumerate(entries):
            size += len(body)
            if count and size > MAX_READ_BYTES:
                self._limit = count
                return entries[:count]
        if self._limit is not None and len(entries) == requested:
            self._limit *= 2
        return entries


# The cursor is published before tasks, and each command fails alone: if Redis is full and accepts neither, trimming
# applied events still frees memory. The stream of changes serves live events. If XADD to it fails, because another
# program took the key or Redis is full, the stream is deleted and the entry added once more.
_PUBLISH = Script("""
if #KEYS > 5 or ARGV[3] ~= '' then
  local mark = redis.pcall('GET', KEYS[1])
  if mark ~= ARGV[1] then return type(mark) == 'string' and 0 or -1 end
end
local refusal
local function try(...)
  local answer = redis.pcall(...)
  if type(answer) == 'table' and answer.err then refusal = refusal or answer end
end
local next = 8
if ARGV[5] ~= '' then
  try('SET', KEYS[2], ARGV[5])
  try('PUBLISH', KEYS[2], ARGV[5])
  for _ = 1, tonumber(ARGV[7]) do
    try('PUBLISH', ARGV[next], ARGV[next + 1])
    next = next + 2
  end
  try('XTRIM', KEYS[3], 'MINID', ARGV[6])
end
if ARGV[2] ~= '' then try('SET', KEYS[4], ARGV[2]) end
if ARGV[3] ~= '' then
  local words = {'XADD', KEYS[5], 'MAXLEN', '~', ARGV[4], '*', 'd', ARGV[3]}
  local answer = redis.pcall(unpack(words))
  if type(answer) == 'table' and answer.err then
    redis.pcall('DEL', KEYS[5])
    try(unpack(words))
  end
end
for stream = 6, #KEYS do
  for _ = 1, tonumber(ARGV[next]) do
    next = next + 1
    redis.call('XADD', KEYS[stream], '*', 'd', ARGV[next])
  end
  next = next + 1
end
return refusal or 1
""")

_NO_CURSOR: list[Argument] = ["", "", 0]
NO_CHANGES = (b"", 0)
_MAX_PUSH_BYTES = 1_000_000
_COMPLAINT_TTL = 5


class Inbound(NamedTuple):
    """The result of one read of events and nudges."""

    entries: list[tuple[str, bytes]] = []
    """Ids and bodies of events, in stream order."""
    nudged: bool = False
    fleet_changed: bool = False
    complete: bool = True
    """The read reached the end of the stream."""
    stopped: list[str] = []
    """Workers that shut down cleanly."""
    stream: str = ""
    """The name of the events stream, which is part of the signatures."""
    only_tasks: bool = False
    """All nudges announce only ready tasks."""

    @property
    def needs_full_check(self) -> bool:
        """Return whether a full check is needed: the nudges may announce more than ready tasks."""
        return self.nudged and not self.only_tasks


class LeaderStreams:
    """The leader's calls to Redis: those of every tick; rarer ones are in `terms`, `queues`, `fleet` and `pages`."""

    def __init__(self, redis: Redis, keys: Keys, shared: Redis | None = None) -> None:
        """`shared` is the server with the keys shared by all shards, if it is another one."""
        self._redis = redis
        self._keys = keys
        self._listeners = None if shared is None or shared is redis else RemoteListeners(shared, keys)
        self.terms = Terms(redis, keys)
        self.queues = Queues(redis, keys)
        self.fleet = FleetKeys(redis, keys, self._listeners)
        self.pages = Pages(redis, keys)
        self._connection = RawConnection(redis, keys.server)
        self._listening = Listening(redis, keys.server)
        self._batch_sizes = BatchSizes()
        self._generation = ""
        self._last_nudge = "0-0"

    @property
    def signing(self) -> Signing:
        return self._keys.signing

    # -- events

    def read(self, generation: str, cursor: str, count: int, block: float) -> Inbound:
        """Read events and nudges after the cursor. Wait up to `block` seconds for the first."""
        if generation != self._generation:  # the stream of nudges may have started over, too
            self._generation, self._last_nudge = generation, "0-0"
        streams = (self._keys.events(generation), self._keys.nudges)
        count = self._batch_sizes.number(count)
        deadline = time.monotonic() + block
        while block > 0:
            answer = self._listening.wait(streams, (cursor, self._last_nudge), count, block)
            if answer is None:
                return Inbound()
            if answer.is_fresh and answer.found:
                return self._inbound(answer.found, count)
            if found := self._unread(streams, cursor, count):
                return self._inbound(found, count)
            block = deadline - time.monotonic()  # the entry that ended the wait has already been read
        return self._inbound(self._unread(streams, cursor, count), count)

    def leftover(self, generation: str, cursor: str, count: int) -> Inbound:
        """Read events after the cursor of an ending generation, even if the server has restarted since."""
        connection, count = RawConnection(self._redis), self._batch_sizes.number(count)
        try:
            reply = connection.call("XREAD", "COUNT", count, "STREAMS", self._keys.events(generation), cursor)
            return self._inbound(cast("Found", reply or []), count)
        finally:
            connection.close()

    def _unread(self, streams: Sequence[str], cursor: str, count: int) -> Found:
        reply = self._connection.call("XREAD", "COUNT", count, "STREAMS", *streams, cursor, self._last_nudge)
        return cast("Found", reply or [])

    def _inbound(self, found: Found, count: int) -> Inbound:
        entries: list[tuple[str, bytes]] = []
        nudged = fleet_changed = only_tasks = False
        is_complete = True
        stopped: list[str] = []
        source = ""
        nudges = self._keys.nudges.encode()
        for stream, items in found:
            if stream == nudges:
                self._last_nudge = items[-1][0].decode()
                nudged = True
                is_whole = len(items) < NUDGE_CAP  # else some may have been trimmed
                only_tasks = is_whole and all(fields == READY_TASK for _, fields in items)
                fleet_changed = not only_tasks and any(b"fleet" in (fields or ()) for _, fields in items)
                for entry in () if only_tasks else items:
                    body = field(entry, b"stopped") or None
                    stopped += self.signing.read(list[Word], self._keys.nudges, body) or []
            else:
                source = stream.decode()
                entries = self._batch_sizes.cut([(entry[0].decode(), field(entry, b"d")) for entry in items], count)
                is_complete = len(items) < count and len(entries) == len(items)
        return Inbound(entries, nudged, fleet_changed, is_complete, stopped, source, only_tasks)

    def close(self) -> None:
        """Close the connections outside of the pool."""
        self._connection.close()
        self._listening.close()

    def set_aside(self, refused: Sequence[Refused]) -> None:
        """Quarantine messages that could not be applied."""
        set_aside_now(self._redis, self._keys, refused)

    def complain(self, reason: str, pause: float = 0.0) -> None:
        """Publish the reason of an outage for `status`. It goes to Redis because Postgres itself may be the problem.

        The text expires a little after the next attempt.
        """
        with suppress(*UNAVAILABLE):
            self._redis.set(self._keys.complaint, reason[:1_000], ex=_COMPLAINT_TTL + int(pause))

    def withdraw_complaint(self) -> None:
        with suppress(*UNAVAILABLE):
            self._redis.delete(self._keys.complaint)

    # -- after a commit

    def publish(
        self,
        generation: str,
        term: int,
        messages: Mapping[str, Sequence[bytes]],
        cursor: str | None = None,
        ended: Sequence[Ended] = (),
        claimed: bytes = b"",
        changes: tuple[bytes, int] = NO_CHANGES,
    ) -> None:
        """Publish the cursor, notify waiting clients, trim applied events and dispatch tasks, in one call.

        `claimed` is an encoded attempt that identifies the last commit, or an encoded None if the cursor does; empty
        bytes leave the value in Redis as it is. `messages` are grouped by queue. Large messages are sent in several
        calls, so that a Redis that is nearly full accepts at least some of them. `changes` are for live events: the
        encoded changes, and the number of entries to keep in their stream. Raise `Deposed` if another leader has taken
        over.
        """
        cursor_arguments = self._cursor_arguments(generation, cursor, ended) if cursor is not None else _NO_CURSOR
        signing = self._keys.signing
        if changes[0] and signing.is_on:
            changes = signing.sign(self._keys.changes, changes[0]), changes[1]
        far_changes, changes_key = NO_CHANGES, self._keys.changes
        if self._listeners is not None:
            far_changes, changes, changes_key = changes, NO_CHANGES, self._keys.applied  # unused, but in our slot
        for part in _in_parts(messages):
            keys = [self._keys.term, self._keys.applied, self._keys.events(generation), self._keys.claimed]
            keys.append(changes_key)
            arguments: list[Argument] = [self.terms.mark(term), claimed, *changes, *cursor_arguments]
            for queue, bodies in part.items():
                stream = self._keys.queue(generation, queue)
                keys.append(stream)
                arguments.append(len(bodies))
                arguments.extend([signing.sign(stream, body) for body in bodies] if signing.is_on else bodies)
            with NOTICING_DAMAGE:
                accepted = self._connection.run(_PUBLISH, keys, arguments)
            if accepted != 1:
                raise Deposed if accepted == 0 else TermForgotten
            cursor_arguments, changes = _NO_CURSOR, NO_CHANGES
        if self._listeners is not None and far_changes[0]:
            self._listeners.add(*far_changes)

    def _cursor_arguments(self, generation: str, cursor: str, ended: Sequence[Ended]) -> list[Argument]:
        bodies = self._by_channel(ended)
        applied = self._keys.signing.sign(self._keys.applied, encode(Applied(generation, cursor)))
        arguments: list[Argument] = [applied, entry_after(cursor), len(bodies)]
        for channel, body in bodies.items():
            arguments += [channel, body]
        return arguments

    def _by_channel(self, ended: Sequence[Ended]) -> dict[str, bytes]:
        by_channel: dict[str, list[Ended]] = {}
        for item in ended:
            by_channel.setdefault(self._keys.done(item.id), []).append(item)
        sign, now = self._keys.signing.sign, int(time.time() * 1000)
        return {channel: sign(channel, encode(items), now) for channel, items in by_channel.items()}

    def publish_ended(self, ended: Sequence[Ended]) -> None:
        """Notify waiting clients of ended tasks and runs, without publishing a cursor."""
        pipeline = self._redis.pipeline(transaction=False)
        for channel, body in self._by_channel(ended).items():
            pipeline.publish(channel, body)
        pipeline.execute()

    def publish_key_holders(self, holders: Mapping[bytes, KeyHolder]) -> None:
        """Publish the holders of requested keys to running tasks. If this is lost, their workers ask again."""
        pipeline = self._redis.pipeline(transaction=False)
        for task, holder in holders.items():
            key = self._keys.key_holder(task)
            pipeline.set(key, self._keys.signing.sign(key, encode(holder)), ex=KEY_HOLDER_TTL)
        pipeline.execute()


def _in_parts(messages: Mapping[str, Sequence[bytes]]) -> list[dict[str, list[bytes]]]:
    """Split messages into parts of limited size; return at least one part."""
    parts: list[dict[str, list[bytes]]] = [{}]
    size = 0
    for queue, bodies in messages.items():
        for body in bodies:
            if parts[-1] and size + len(body) > _MAX_PUSH_BYTES:
                parts.append({})
                size = 0
            parts[-1].setdefault(queue, []).append(body)
            size += len(body)
    return parts
