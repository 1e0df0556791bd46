"""The leader's way in and out: read events, say what was applied, and hand tasks out."""

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
from orchestrator.transport.leader.fleet import FarListeners, FleetKeys
from orchestrator.transport.leader.queues import NOTICING_DAMAGE, Queues
from orchestrator.transport.leader.terms import Deposed, TermForgotten, Terms, entry_after
from orchestrator.transport.pages import Pages
from orchestrator.transport.quarantine import Refused, keep_aside
from orchestrator.transport.signing import Signing

MOST_BYTES = 4_000_000
"""Of events that are applied together; or one, however large it is."""


class BatchSizes:
    """Learns from what was read how many entries to ask for, so that no more is read than a tick can apply."""

    def __init__(self) -> None:
        self._few: int | None = None

    def number(self, most: int) -> int:
        """Return how many entries are to be read, where `most` would be too many if they are large."""
        return most if self._few is None else min(most, self._few)

    def cut(self, entries: list[tuple[str, bytes]], asked: int) -> list[tuple[str, bytes]]:
        """Return the first entries, as far as they are not too large together; the others are read again."""
        size = 0
        for place, (_, body) in enumerate(entries):
            size += len(body)
            if place and size > MOST_BYTES:
                self._few = place
                return entries[:place]
        if self._few is not None and len(entries) == asked:
            self._few *= 2
        return entries


# The cursor is published before tasks, each by itself: where Redis is full and takes neither,
# forgetting applied events still makes room. The stream of changes is for live events: where it cannot be
# added to, because it is not what it should be or Redis is full, it is begun anew, or given up.
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

_NOTHING_SAID: list[Argument] = ["", "", 0]
NO_CHANGES = (b"", 0)
_PUSH_BYTES = 1_000_000
_COMPLAINT_TTL = 5


class Inbound(NamedTuple):
    """The result of one read."""

    entries: list[tuple[str, bytes]] = []
    """Ids and bodies of events, in order."""
    nudged: bool = False
    fleet_changed: bool = False
    complete: bool = True
    """Nothing was left to read."""
    stopped: list[str] = []
    """Workers that have ended in good order."""
    stream: str = ""
    """Where the events stood, for which they are signed."""
    only_tasks: bool = False
    """All nudges say that tasks are ready to be claimed, and that is all that is new."""

    @property
    def wants_look(self) -> bool:
        """Say whether nudges may be about anything."""
        return self.nudged and not self.only_tasks


class LeaderStreams:
    """The leader's calls to Redis in every tick, and all others as parts."""

    def __init__(self, redis: Redis, keys: Keys, shared: Redis | None = None) -> None:
        """`shared` has the keys of all shards, if that is another server."""
        self._redis = redis
        self._keys = keys
        self._listeners = None if shared is None or shared is redis else FarListeners(shared, keys)
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
        """Read events after the cursor; wait up to `block` seconds for the first."""
        if generation != self._generation:  # nudges may be counted anew, too
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
            block = deadline - time.monotonic()  # what rang has been read since
        return self._inbound(self._unread(streams, cursor, count), count)

    def leftover(self, generation: str, cursor: str, count: int) -> Inbound:
        """Read events after the cursor of a generation that ends, in whatever life of the server."""
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
                is_whole = len(items) < NUDGE_CAP  # else others may have been trimmed
                only_tasks = is_whole and all(fields == READY_TASK for _, fields in items)
                fleet_changed = not only_tasks and any(b"fleet" in (fields or ()) for _, fields in items)
                for entry in () if only_tasks else items:
                    said = field(entry, b"stopped") or None
                    stopped += self.signing.read(list[Word], self._keys.nudges, said) or []
            else:
                source = stream.decode()
                entries = self._batch_sizes.cut([(entry[0].decode(), field(entry, b"d")) for entry in items], count)
                is_complete = len(items) < count and len(entries) == len(items)
        return Inbound(entries, nudged, fleet_changed, is_complete, stopped, source, only_tasks)

    def close(self) -> None:
        """Close the connections that are this process's own."""
        self._connection.close()
        self._listening.close()

    def set_aside(self, refused: Sequence[Refused]) -> None:
        """Keep messages that could not be applied, for people to look at."""
        keep_aside(self._redis, self._keys, refused)

    def complain(self, reason: str, pause: float = 0.0) -> None:
        """Publish for `status` why nothing moves; Postgres itself may not take it.

        It expires a little after the next try.
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
        """Publish the cursor of applied events, notify waiting clients, forget applied events, and dispatch tasks: one
        call.

        `claimed` is an attempt, encoded, that identifies the last commit, or None where the cursor does; empty leaves
        what Redis has. `messages` go by queue; refused if another leader has taken over. Many large ones go in several
        calls: a Redis that is nearly full then takes at least some of them. `changes` are for live events: what
        changed, encoded, and how many such entries are kept.
        """
        said = self._said(generation, cursor, ended) if cursor is not None else _NOTHING_SAID
        signing = self._keys.signing
        if changes[0] and signing.is_on:
            changes = signing.sign(self._keys.changes, changes[0]), changes[1]
        far, stream_of_changes = NO_CHANGES, self._keys.changes
        if self._listeners is not None:
            far, changes, stream_of_changes = changes, NO_CHANGES, self._keys.applied  # not written, and in our slot
        for part in _in_parts(messages):
            keys = [self._keys.term, self._keys.applied, self._keys.events(generation), self._keys.claimed]
            keys.append(stream_of_changes)
            arguments: list[Argument] = [self.terms.mark(term), claimed, *changes, *said]
            for queue, bodies in part.items():
                stream = self._keys.queue(generation, queue)
                keys.append(stream)
                arguments.append(len(bodies))
                arguments.extend([signing.sign(stream, body) for body in bodies] if signing.is_on else bodies)
            with NOTICING_DAMAGE:
                accepted = self._connection.run(_PUBLISH, keys, arguments)
            if accepted != 1:
                raise Deposed if accepted == 0 else TermForgotten
            said, changes = _NOTHING_SAID, NO_CHANGES
        if self._listeners is not None and far[0]:
            self._listeners.add(*far)

    def _said(self, generation: str, cursor: str, ended: Sequence[Ended]) -> list[Argument]:
        tick = self._by_channel(ended)
        applied = self._keys.signing.sign(self._keys.applied, encode(Applied(generation, cursor)))
        said: list[Argument] = [applied, entry_after(cursor), len(tick)]
        for channel, body in tick.items():
            said += [channel, body]
        return said

    def _by_channel(self, ended: Sequence[Ended]) -> dict[str, bytes]:
        by_channel: dict[str, list[Ended]] = {}
        for item in ended:
            by_channel.setdefault(self._keys.done(item.id), []).append(item)
        sign, now = self._keys.signing.sign, int(time.time() * 1000)
        return {channel: sign(channel, encode(items), now) for channel, items in by_channel.items()}

    def publish_ended(self, ended: Sequence[Ended]) -> None:
        """Publish ends to waiting clients, without a cursor."""
        pipeline = self._redis.pipeline(transaction=False)
        for channel, body in self._by_channel(ended).items():
            pipeline.publish(channel, body)
        pipeline.execute()

    def publish_key_holders(self, holders: Mapping[bytes, KeyHolder]) -> None:
        """Publish to running tasks which tasks have the keys that they wanted; if it is lost, they ask again."""
        pipeline = self._redis.pipeline(transaction=False)
        for task, holder in holders.items():
            place = self._keys.key_holder(task)
            pipeline.set(place, self._keys.signing.sign(place, encode(holder)), ex=KEY_HOLDER_TTL)
        pipeline.execute()


def _in_parts(messages: Mapping[str, Sequence[bytes]]) -> list[dict[str, list[bytes]]]:
    """Cut messages by queue into parts of limited size: at least one."""
    parts: list[dict[str, list[bytes]]] = [{}]
    size = 0
    for queue, bodies in messages.items():
        for body in bodies:
            if parts[-1] and size + len(body) > _PUSH_BYTES:
                parts.append({})
                size = 0
            parts[-1].setdefault(queue, []).append(body)
            size += len(body)
    return parts
