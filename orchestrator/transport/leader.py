"""The leader's side of the streams: read events, push tasks, tell what was applied, watch the fleet."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeVar, cast

from redis import Redis
from redis.exceptions import ResponseError

from orchestrator.domain.fleet.generation import age, is_over
from orchestrator.domain.tasks.task import KeyHolder
from orchestrator.transport.batch_sizes import BatchSizes
from orchestrator.transport.codec import (
    Applied,
    Attempt,
    Ended,
    Heartbeat,
    Malformed,
    Order,
    Word,
    decode,
    encode,
    stream_position,
)
from orchestrator.transport.connection import UNAVAILABLE
from orchestrator.transport.keys import CANARY_TTL, GROUP, KEY_HOLDER_TTL, PRIVATE_TTL, Keys, private_queue
from orchestrator.transport.listening import Found, Listening
from orchestrator.transport.pages import Pages
from orchestrator.transport.quarantine import Refused, set_aside
from orchestrator.transport.raw_connection import Argument, RawConnection, Script, field
from orchestrator.transport.signing import Forged, Signing

M = TypeVar("M")

# A term stands there with a name of the process that has it: should Postgres lose commits, it issues a term twice. What
# does not begin with a number, or is no string at all, was not written by a leader: it counts as nothing, and SET
# replaces it.
_HELD_TERM = """
local mark = redis.pcall('GET', KEYS[1])
mark = type(mark) == 'string' and mark or ''
local held = tonumber(string.match(mark, '^%d+') or '0')
"""

_CLAIM_TERM = f"""
{_HELD_TERM}
if ARGV[3] == '' and tonumber(ARGV[1]) < held then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
if ARGV[4] ~= '' then redis.call('SET', KEYS[2], ARGV[4], 'NX') end
return tonumber(ARGV[1]) == held and mark ~= ARGV[2] and 2 or 1
"""

# Workers never create the events stream: reports to a stream that no leader reads would be lost.
_BEGIN = f"""
{_HELD_TERM}
if tonumber(ARGV[1]) < held then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
redis.call('SET', KEYS[2], ARGV[3])
redis.call('SET', KEYS[3], ARGV[4])
redis.call('SET', KEYS[5], ARGV[5])
redis.call('XADD', KEYS[4], '*', 'd', '')
redis.call('XTRIM', KEYS[4], 'MAXLEN', '0')
return 1
"""

# What was applied is told before anything is handed out, each thing for itself: where Redis is full and takes neither,
# forgetting applied events still makes room.
_PUBLISH = Script("""
if #KEYS > 4 then
  local mark = redis.pcall('GET', KEYS[1])
  if mark ~= ARGV[1] then return type(mark) == 'string' and 0 or -1 end
end
local refusal
local function try(...)
  local answer = redis.pcall(...)
  if type(answer) == 'table' and answer.err then refusal = refusal or answer end
end
local next = 6
if ARGV[3] ~= '' then
  try('SET', KEYS[2], ARGV[3])
  try('PUBLISH', KEYS[2], ARGV[3])
  for _ = 1, tonumber(ARGV[5]) do
    try('PUBLISH', ARGV[next], ARGV[next + 1])
    next = next + 2
  end
  try('XTRIM', KEYS[3], 'MINID', ARGV[4])
end
if ARGV[2] ~= '' then try('SET', KEYS[4], ARGV[2]) end
for stream = 5, #KEYS do
  for _ = 1, tonumber(ARGV[next]) do
    next = next + 1
    redis.call('XADD', KEYS[stream], '*', 'd', ARGV[next])
  end
  next = next + 1
end
return refusal or 1
""")

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
"""

# A message that the group has been given is somebody's; what comes after the last one that was is nobody's yet.
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

_NOTHING_SAID: list[Argument] = ["", "", 0]
_PUSH_BYTES = 1_000_000
_ORDERS_TTL = 60
_COMPLAINT_TTL = 5
_LARGEST = 2**64 - 1
"""Of either part of a stream's ids."""
_CONSUMER_IDLE = 60
"""Seconds without a read after which a consumer is gone; one that is back is made anew by its next read."""


class Deposed(Exception):
    """Another scheduler leads, and nothing was pushed."""


class TermForgotten(Deposed):
    """Redis does not know who leads: it has lost its data, or what stood there. Nothing was pushed."""


class StreamsDamaged(Exception):
    """Somebody has put something else, or the last possible entry, where a stream of this generation should be."""


class Inbound(NamedTuple):
    """What one read brought."""

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


class Message(NamedTuple):
    """A dispatch message that still stands in a stream."""

    entry: str
    body: bytes
    consumer: str | None
    """Who received it; None while nobody did."""


class ServerState(NamedTuple):
    """What Redis remembers of us."""

    generation: str | None
    applied: Applied | None
    server: str
    """Changes whenever the server restarts."""
    readable: bool = True
    """The events stream is there, and is a stream."""
    usable: bool = True
    """Workers can find it, and add to it."""
    same_database: bool = True
    """The Postgres of which it was told is the one that is used now, as far as anybody knows."""
    claimed: Attempt | None = None
    """An attempt of a later commit than that of `applied`, if tasks were handed out since."""

    def reached(self, cursor: str) -> bool:
        """Say whether Redis still remembers that events up to `cursor` were applied."""
        if cursor == "0-0":
            return True
        return self.applied is not None and stream_position(self.applied.cursor) >= stream_position(cursor)

    def is_ahead(self, generation: str, cursor: str) -> bool:
        """Say whether it remembers what came after this: whoever is behind it has lost something."""
        if self.generation is None:
            return not self.same_database
        if self.generation != generation:
            return age(self.generation) != () and age(self.generation) >= age(generation)
        applied = self.applied
        if applied is None or applied.generation != generation:
            return False
        return stream_position(applied.cursor) > stream_position(cursor)


class LeaderStreams:
    """All Redis operations of the leading scheduler."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self.pages = Pages(redis, keys)
        self._claim_term = redis.register_script(_CLAIM_TERM)
        self._begin = redis.register_script(_BEGIN)
        self._connection = RawConnection(redis)
        self._listening = Listening(redis)
        self._take_back = redis.register_script(_TAKE_BACK)
        self._forget_silent = redis.register_script(_FORGET_SILENT)
        self._forget_consumers = redis.register_script(_FORGET_CONSUMERS)
        self._batch_sizes = BatchSizes()
        self._last_nudge = "0-0"
        self._name = secrets.token_hex(4)
        self._database = ""
        self._refused_beats: dict[bytes, Refused] = {}
        """Heartbeats that make no sense; each is set aside once, although it is read every second."""
        self._beat_numbers: dict[str, int] = {}
        """Of the heartbeats that were read last: an order answers one, and is signed with its number."""

    @property
    def signing(self) -> Signing:
        """How messages are signed."""
        return self._keys.signing

    # -- leadership and generations

    def claim_term(self, term: int, database: str, *, overrule: bool = False) -> bool:
        """Make this term the one whose pushes are accepted; `overrule` a later one, which Postgres never issued.

        `database` names the life of the Postgres that issued it; empty if that has no name. Say whether the term is
        the first of its number: not if Postgres has lost commits.
        """
        self._database = database
        keys = [self._keys.term, self._keys.database]
        answer = self._claim_term(keys=keys, args=[term, self._mark(term), "overrule" if overrule else "", database])
        if not answer:
            raise Deposed
        return bool(answer == 1)

    def _mark(self, term: int) -> str:
        """Return what stands in Redis while this process leads in a term."""
        return f"{term} {self._name}"

    def state(self, generation: str, cursor: str) -> ServerState:
        """Read what Redis remembers of a generation that was read up to `cursor`, to learn whether it lost anything.

        What does not read as ours is as good as lost: it is replaced when a new generation begins.
        """
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.get(self._keys.generation)
        pipeline.get(self._keys.server)
        pipeline.get(self._keys.applied)
        pipeline.type(self._keys.events(generation))
        pipeline.get(self._keys.database)
        pipeline.get(self._keys.claimed)
        pipeline.info("server")
        answers = pipeline.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, Exception) and "WRONGTYPE" not in str(answer):
                raise answer
        found, began_on, applied, kind, database, claimed, info = answers
        server = str(info["run_id"])
        return ServerState(
            generation=found.decode(errors="replace") if isinstance(found, bytes) else None,
            applied=self._read(Applied, self._keys.applied, applied) if isinstance(applied, bytes) else None,
            server=server,
            readable=kind == b"stream",
            usable=kind == b"stream"
            and began_on == server.encode()
            and _after(cursor) != cursor
            and not isinstance(database, Exception),
            same_database=not (self._database and isinstance(database, bytes)) or database == self._database.encode(),
            claimed=_decode_or_none(Attempt, claimed) if isinstance(claimed, bytes) else None,
        )

    def accept_database(self) -> None:
        """Have the generation go on with the life of Postgres that is used now."""
        self._redis.set(self._keys.database, self._database)

    def begin_generation(self, term: int, generation: str, server: str) -> None:
        """Announce a new generation; refused if another leader has taken over.

        `server` is the life of the server for which it is meant: `state` has it.
        """
        keys = [self._keys.term, self._keys.generation, self._keys.server, self._keys.events(generation)]
        arguments: list[Argument] = [term, self._mark(term), generation, server, self._database]
        if not self._begin(keys=[*keys, self._keys.database], args=arguments):
            raise Deposed
        self._last_nudge = "0-0"

    def remove_older(self, generation: str, *, later: bool = False) -> None:
        """Remove the streams of earlier generations.

        Of `later` ones only if Postgres has forgotten them: else their leader may have replaced this one.
        """
        for pattern in (self._keys.events("*"), self._keys.queue("*", "*")):
            start = pattern.index("*")
            old = [
                key
                for key in self._redis.scan_iter(match=_literal(pattern))
                if is_over(key.decode(errors="replace")[start:].partition(":")[0], generation, later=later)
            ]
            if old:
                self._redis.delete(*old)

    def complain(self, reason: str) -> None:
        """Tell `status` why nothing moves, where it can be told: Postgres itself may not take it."""
        with suppress(*UNAVAILABLE):
            self._redis.set(self._keys.complaint, reason[:1_000], ex=_COMPLAINT_TTL)

    # -- events

    def read(self, generation: str, cursor: str, count: int, block: float) -> Inbound:
        """Read events after the cursor; wait up to `block` seconds for the first."""
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

    def _unread(self, streams: Sequence[str], cursor: str, count: int) -> Found:
        reply = self._connection.call("XREAD", "COUNT", count, "STREAMS", *streams, cursor, self._last_nudge)
        return cast("Found", reply or [])

    def _inbound(self, found: Found, count: int) -> Inbound:
        entries: list[tuple[str, bytes]] = []
        nudged = fleet_changed = False
        is_complete = True
        stopped: list[str] = []
        source = ""
        nudges = self._keys.nudges.encode()
        for stream, items in found:
            if stream == nudges:
                self._last_nudge = items[-1][0].decode()
                nudged = True
                fleet_changed = any(b"fleet" in (fields or ()) for _, fields in items)
                for entry in items:
                    stopped += self._read(list[Word], self._keys.nudges, field(entry, b"stopped") or None) or []
            else:
                source = stream.decode()
                entries = self._batch_sizes.cut([(entry[0].decode(), field(entry, b"d")) for entry in items], count)
                is_complete = len(items) < count and len(entries) == len(items)
        return Inbound(entries, nudged, fleet_changed, is_complete, stopped, source)

    def close(self) -> None:
        """Close the connections that are this process's own."""
        self._connection.close()
        self._listening.close()

    def set_aside(self, refused: Sequence[Refused]) -> None:
        """Keep messages that could not be applied, for people to look at."""
        pipeline = self._redis.pipeline(transaction=False)
        set_aside(pipeline, self._keys, refused)
        pipeline.execute()

    # -- after a commit

    def publish(
        self,
        generation: str,
        term: int,
        messages: Mapping[str, Sequence[bytes]],
        cursor: str | None = None,
        ended: Sequence[Ended] = (),
        claimed: bytes = b"",
    ) -> None:
        """Say how far events are applied, tell waiting clients, forget applied events, and hand tasks out: one call.

        `claimed` is an attempt, encoded, by which to know the last commit, or None where the cursor does; empty leaves
        what Redis has. `messages` go by queue; refused if another leader has taken over. Many large ones go in several
        calls: a Redis that is nearly full then takes at least some of them.
        """
        said = self._said(generation, cursor, ended) if cursor is not None else _NOTHING_SAID
        signing = self._keys.signing
        for part in _in_parts(messages):
            keys = [self._keys.term, self._keys.applied, self._keys.events(generation), self._keys.claimed]
            arguments: list[Argument] = [self._mark(term), claimed, *said]
            for queue, bodies in part.items():
                stream = self._keys.queue(generation, queue)
                keys.append(stream)
                arguments.append(len(bodies))
                arguments.extend([signing.sign(stream, body) for body in bodies] if signing.is_on else bodies)
            with _noticing_damage():
                accepted = self._connection.run(_PUBLISH, keys, arguments)
            if accepted != 1:
                raise Deposed if accepted == 0 else TermForgotten
            said = _NOTHING_SAID

    def _said(self, generation: str, cursor: str, ended: Sequence[Ended]) -> list[Argument]:
        by_channel: dict[str, list[Ended]] = {}
        for item in ended:
            by_channel.setdefault(self._keys.done(item.id), []).append(item)
        sign, now = self._keys.signing.sign, int(time.time() * 1000)
        applied = sign(self._keys.applied, encode(Applied(generation, cursor)))
        said: list[Argument] = [applied, _after(cursor), len(by_channel)]
        for channel, items in by_channel.items():
            said += [channel, sign(channel, encode(items), now)]
        return said

    def tell_key_holders(self, holders: Mapping[bytes, KeyHolder]) -> None:
        """Tell running tasks which tasks have the keys that they wanted; what is lost, they ask again."""
        pipeline = self._redis.pipeline(transaction=False)
        for task, holder in holders.items():
            place = self._keys.key_holder(task)
            pipeline.set(place, self._keys.signing.sign(place, encode(holder)), ex=KEY_HOLDER_TTL)
        pipeline.execute()

    # -- dispatch

    def messages(self, generation: str, queue: str) -> list[Message]:
        """Return every message that stands in a queue's stream; the window keeps this small."""
        stream = self._keys.queue(generation, queue)
        with _noticing_damage():
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
        return [
            Message(entry.decode(), self._believed(stream, (fields or {}).get(b"d", b"")), owners.get(entry))
            for entry, fields in entries
        ]

    def _believed(self, place: str, data: bytes) -> bytes:
        """Return what stands in a place; nothing if it is not ours. Whoever reads it sets it aside."""
        try:
            return self._keys.signing.body(place, data)
        except Forged:
            return b""

    def withdraw(self, generation: str, queue: str, entries: Sequence[str]) -> None:
        """Take messages back, so that nobody receives them."""
        stream = self._keys.queue(generation, queue)
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.xack(stream, GROUP, *entries)
        pipeline.xdel(stream, *entries)
        try:
            with _noticing_damage():
                pipeline.execute()
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise

    def take_back(self, generation: str, queue: str, entries: Sequence[str]) -> list[str]:
        """Take messages back that nobody has received; return those of which it was not too late."""
        taken = self._take_back(keys=[self._keys.queue(generation, queue)], args=[GROUP, *entries])
        return [entry.decode() for entry in cast("list[bytes]", taken)]

    # -- the fleet

    def write_canary(self) -> None:
        """Learn whether Redis takes writes."""
        self._redis.set(self._keys.canary, b"1", ex=CANARY_TTL)

    def fleet(self) -> list[Heartbeat]:
        """Write the canary, then return the heartbeats of all live workers.

        The write comes first: while Redis refuses writes, the workers' silence means nothing.
        """
        self.write_canary()
        members = cast("set[bytes]", self._redis.smembers(self._keys.workers))
        keys = [self._keys.worker("").encode() + member for member in members]
        found = cast("list[bytes | None]", self._redis.mget(keys)) if keys else []
        beats: list[Heartbeat] = []
        refused: dict[bytes, Refused] = {}
        for key, value in zip(keys, found, strict=True):
            try:
                if value is not None:
                    beat = decode(Heartbeat, self._keys.signing.body(key.decode(errors="replace"), value))
                    beats.append(beat)
            except Malformed as error:
                refused[key] = Refused(key.decode(errors="replace"), value or b"", str(error))
        new = [refusal for key, refusal in refused.items() if self._refused_beats.get(key) != refusal]
        self._refused_beats = refused
        self._beat_numbers = {beat.worker: beat.number for beat in beats}
        if new:
            self.set_aside(new)
        return beats

    def forget_gone(self, generation: str, queues: Iterable[str]) -> None:
        """Drop the ids of workers that have no heartbeat, and their consumers once nothing is left of what they had."""
        keys = self._keys
        self._forget_silent(
            keys=[keys.workers], args=[keys.worker(""), keys.queue(generation, private_queue("")), PRIVATE_TTL]
        )
        for queue in queues:
            self._forget_consumers(keys=[keys.queue(generation, queue)], args=[_CONSUMER_IDLE * 1000])

    def names(self, digest: str) -> list[str] | None:
        """Return the task names published under a digest."""
        place = self._keys.names(digest)
        return self._read(list[Word], place, cast("bytes | None", self._redis.get(place)))

    def _read(self, kind: type[M], place: str, value: bytes | None) -> M | None:
        """Return what stands in a place, or None if it is nothing of ours."""
        return None if value is None else _decode_or_none(kind, self._believed(place, value))

    def order(self, orders: Mapping[str, Order]) -> None:
        """Send each worker its order."""
        pipeline = self._redis.pipeline(transaction=False)
        for worker, order in orders.items():
            stream = self._keys.orders(worker)
            body = self._keys.signing.sign(stream, encode(order), self._beat_numbers.get(worker, 0))
            pipeline.xadd(stream, {"d": body}, maxlen=1000, approximate=True)
            pipeline.expire(stream, _ORDERS_TTL)
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


def _decode_or_none(kind: type[M], value: bytes | None) -> M | None:
    if value is None:
        return None
    try:
        return decode(kind, value)
    except Malformed:
        return None  # written by a stranger or another release: as good as absent


@contextmanager
def _noticing_damage() -> Iterator[None]:
    try:
        yield
    except ResponseError as error:
        if "WRONGTYPE" in str(error) or "exhausted" in str(error):
            raise StreamsDamaged(str(error)) from error
        raise


def _after(cursor: str) -> str:
    """Return the first id after a cursor; the very last has none, and no stream goes on after it."""
    milliseconds, sequence = stream_position(cursor)
    if sequence < _LARGEST:
        return f"{milliseconds}-{sequence + 1}"
    return f"{milliseconds + 1}-0" if milliseconds < _LARGEST else cursor


def _literal(pattern: str) -> str:
    """Escape the hash tag's braces, which mean something else in a pattern."""
    return pattern.replace("{", "[{]").replace("}", "[}]")
