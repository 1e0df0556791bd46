"""The worker's side of the streams: take messages, hand in reports, beat, receive orders."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from redis import Redis
from redis.client import Pipeline
from redis.exceptions import ResponseError

from orchestrator.domain.tasks.task import Dispatch, KeyHolder
from orchestrator.transport.codec import (
    Applied,
    Heartbeat,
    Malformed,
    Order,
    decode,
    decode_dispatches,
    digest_of,
    encode,
    stream_position,
)
from orchestrator.transport.connection import UNAVAILABLE, Argument, Entry, RawConnection, Script, field
from orchestrator.transport.keys import CANARY_TTL, GROUP, NUDGE_CAP, PRIVATE_TTL, Keys, private_queue
from orchestrator.transport.quarantine import Refused, set_aside
from orchestrator.transport.signing import Forged, Once

# The events stream is never created here: where it is missing, Redis has lost it, and the reports stay with the worker,
# and the messages where they are, until a leader has begun anew.
_FLUSH = Script(
    """
local entry = false
local has_reports = ARGV[2] == 'reports'
if has_reports then
  entry = redis.pcall('XADD', KEYS[1], 'NOMKSTREAM', '*', 'd', ARGV[3])
  if type(entry) == 'table' and entry.err then return entry end
end
if entry or not has_reports then
  local next = 4
  for stream = 4, #KEYS do
    local last = next + tonumber(ARGV[next])
    for first = next + 1, last, 1000 do
      local entries = {unpack(ARGV, first, math.min(first + 999, last))}
      redis.pcall('XACK', KEYS[stream], ARGV[1], unpack(entries))
      redis.pcall('XDEL', KEYS[stream], unpack(entries))
    end
    next = last + 1
  end
end
local function read(key)
  local value = redis.pcall('GET', key)
  return type(value) == 'string' and value
end
return {entry, read(KEYS[2]), read(KEYS[3])}
"""
)
_NAMES_TTL = 3600
_OLDEST_ORDER = 60
"""Heartbeats after which an order is no answer any more."""
_ANSWER_TIMEOUT = 5.0
"""Seconds beyond the time that Redis was asked to wait after which its answer is not awaited any more."""


class Received(NamedTuple):
    """One dispatch message."""

    generation: str
    """Of the stream that it was read from; another may have begun since."""
    queue: str
    entry: str
    tasks: list[Dispatch]


class Receipt(NamedTuple):
    """Redis's answer to a flush."""

    entry: str | None
    """The id under which the reports stand in the events stream; None where they were not taken."""
    generation: str | None
    applied: Applied | None


class StreamsGone(Exception):
    """The streams of this generation do not exist (any more): ask for the generation again."""


class WorkerStreams:
    """All Redis operations of one worker process."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._connection = RawConnection(redis, keys.server)
        self._taken = Once()
        self._beat_numbers: dict[str, int] = {}
        """Of the last heartbeats: an order that answers one of long ago is an old one."""

    def generation(self) -> str | None:
        """Return the current generation, or None while no leader has begun one on this server.

        A replica that took over, or a server that restarted from its disk, shows the generation of before, with
        messages in its streams that had been received and answered.
        """
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.get(self._keys.generation)
        pipeline.get(self._keys.server)
        pipeline.info("server")
        generation, server, info = pipeline.execute()
        if not generation or not server or server != str(info["run_id"]).encode():
            return None
        return _text(generation)

    def join(self, generation: str, queues: Sequence[str]) -> None:
        """Make sure that the consumer group exists on each queue."""
        for queue in queues:
            try:
                self._redis.xgroup_create(self._keys.queue(generation, queue), GROUP, id="0", mkstream=True)
            except ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise

    def take(self, generation: str, worker: str, queues: Sequence[str], count: int, block: float) -> list[Received]:
        """Receive up to `count` messages; wait up to `block` seconds for the first, or not at all."""
        streams = [self._keys.queue(generation, queue) for queue in queues]
        options: tuple[Argument, ...] = ("COUNT", count)
        if block > 0:
            options += ("BLOCK", max(1, int(block * 1000)))
        try:
            reply = self._connection.call(
                "XREADGROUP", "GROUP", GROUP, worker, *options, "STREAMS", *streams, *[">"] * len(streams)
            )
        except ResponseError as error:
            if "NOGROUP" in str(error) or "UNBLOCKED" in str(error):
                raise StreamsGone from error
            raise
        received: list[Received] = []
        signing = self._keys.signing
        for stream, items in cast("list[tuple[bytes, list[Entry]]]", reply or []):
            place = stream.decode()
            queue = place.removeprefix(self._keys.queue(generation, ""))
            for item in items:
                entry, body = item[0].decode(), field(item, b"d")
                try:
                    checked = signing.check(place, body)
                    tasks = decode_dispatches(checked.body)
                    self._taken.take(checked.mac)
                    received.append(Received(generation, queue, entry, tasks))
                except Malformed as error:
                    self._set_aside(generation, queue, entry, body, str(error))
        return received

    def flush(self, generation: str, body: bytes | None, done: Mapping[str, Sequence[str]]) -> Receipt:
        """Hand in reports and drop the messages that they answer, all or nothing.

        `done` maps queues to the ids of their messages.
        """
        events = self._keys.events(generation)
        keys: list[Argument] = [events, self._keys.generation, self._keys.applied]
        body = None if body is None else self._keys.signing.sign(events, body)
        arguments: list[Argument] = [GROUP, "reports" if body is not None else "none", body or b""]
        for queue, entries in done.items():
            keys.append(self._keys.queue(generation, queue))
            arguments += [len(entries), *entries]
        entry, now, applied = self._connection.run(_FLUSH, keys, arguments)
        return Receipt(
            entry=entry.decode() if entry else None,
            generation=_text(now) if now else None,
            applied=self._applied(applied),
        )

    def is_led(self, within: float) -> bool:
        """Say whether a leader has shown itself within so many seconds."""
        left: Any = self._redis.pttl(self._keys.canary)
        return int(left) > 1000 * (CANARY_TTL - within)

    def shards_of_leader(self) -> int | None:
        """Return how many shards the leader knows; None if none has said so lately."""
        found = re.fullmatch(rb"shards=(\d+)", cast("bytes | None", self._redis.get(self._keys.canary)) or b"")
        return None if found is None else int(found[1])

    def drop(self, generation: str, done: Mapping[str, Sequence[str]]) -> None:
        """Drop messages although their reports were not taken: perhaps they are what fills Redis.

        Should the worker die with its reports, the leader finds attempts that no worker has, and no message: a loss.
        """
        pipeline = self._redis.pipeline(transaction=True)
        self._drop(pipeline, generation, done)
        pipeline.execute()

    def _drop(self, pipeline: Pipeline, generation: str, done: Mapping[str, Sequence[str]]) -> None:
        for queue, entries in done.items():
            stream = self._keys.queue(generation, queue)
            pipeline.xack(stream, GROUP, *entries)
            pipeline.xdel(stream, *entries)

    def beat(self, beats: Sequence[Heartbeat], names: Sequence[str], ttl: float) -> None:
        """Write the heartbeats of several worker processes, and the task names that they know."""
        keys = self._keys
        pipeline = self._redis.pipeline(transaction=False)
        for beat in beats:
            place = keys.worker(beat.worker)
            pipeline.set(place, keys.signing.sign(place, encode(beat)), px=int(ttl * 1000))
            self._beat_numbers[beat.worker] = beat.number
            pipeline.sadd(keys.workers, beat.worker)
        for digest in {beat.names for beat in beats}:
            place = keys.names(digest)
            pipeline.set(place, keys.signing.sign(place, encode(list(names))), ex=_NAMES_TTL)
        pipeline.execute()

    def publish_parameters(self, body: bytes) -> None:
        """Publish the parameters of tasks, encoded, under their digest. The leader stores them."""
        place = self._keys.parameters(digest_of(body))
        self._redis.set(place, self._keys.signing.sign(place, body), ex=_NAMES_TTL)

    def leave(self, workers: Sequence[str], stopped: Sequence[str]) -> None:
        """Delete the heartbeats of workers that have ended; publish which of them did in good order."""
        keys = self._keys
        generation = self.generation() or ""
        pipeline = self._redis.pipeline(transaction=True)
        for worker in workers:
            pipeline.delete(keys.worker(worker), keys.orders(worker))
            pipeline.expire(keys.queue(generation, private_queue(worker)), PRIVATE_TTL)
            pipeline.srem(keys.workers, worker)
            self._beat_numbers.pop(worker, None)
        self._greet(pipeline, {"fleet": b"", "stopped": keys.signing.sign(keys.nudges, encode(list(stopped)))})
        pipeline.execute()

    def greet(self) -> None:
        """Notify the leader that the fleet has changed. If that fails, it sees so at its next look."""
        with contextlib.suppress(*UNAVAILABLE):
            self._greet(self._redis, {"fleet": b""})

    def _greet(self, redis: Redis, fields: dict[str, bytes]) -> None:
        redis.xadd(self._keys.nudges, cast("Any", fields), maxlen=NUDGE_CAP, approximate=True)

    def order_inbox(self) -> OrderInbox:
        """Return where the leader's orders arrive."""
        return OrderInbox(self._redis, self._keys, self._beat_numbers)

    def key_holders(self, tasks: Sequence[bytes]) -> dict[bytes, KeyHolder]:
        """Return which tasks have the keys that these were wanted for, as far as the leader has published it."""
        found = cast("list[bytes | None]", self._redis.mget([self._keys.key_holder(task) for task in tasks]))
        holders: dict[bytes, KeyHolder] = {}
        for task, data in zip(tasks, found, strict=True):
            with contextlib.suppress(Malformed):  # not ours; the leader publishes it again
                if data is not None:
                    holders[task] = decode(KeyHolder, self._keys.signing.body(self._keys.key_holder(task), data))
        return holders

    def listen_applied(self, heard: Callable[[Applied], None]) -> None:
        """Call `heard`, in a thread, whenever the leader says what it has applied."""

        def listen() -> None:
            while True:
                pubsub = self._redis.pubsub()  # type: ignore[no-untyped-call]
                try:
                    pubsub.subscribe(self._keys.applied)
                    while True:
                        message = pubsub.get_message(timeout=5.0)
                        applied = self._applied(message["data"]) if message and message["type"] == "message" else None
                        if applied is not None:
                            heard(applied)
                except UNAVAILABLE:
                    pubsub.close()
                    threading.Event().wait(0.5)  # the reporter learns it too, a little later

        threading.Thread(target=listen, name="applied", daemon=True).start()

    def _applied(self, value: bytes | None) -> Applied | None:
        try:
            return decode(Applied, self._keys.signing.body(self._keys.applied, value)) if value else None
        except Malformed:
            return None  # of another release, or not ours; the leader writes ours with its next tick

    def _set_aside(self, generation: str, queue: str, entry: str, body: bytes, error: str) -> None:
        stream = self._keys.queue(generation, queue)
        pipeline = self._redis.pipeline(transaction=True)
        set_aside(pipeline, self._keys, [Refused(f"{queue}/{entry}", body, error)])
        pipeline.xack(stream, GROUP, entry)
        pipeline.xdel(stream, entry)
        pipeline.execute(raise_on_error=False)  # what came beside it has to be returned, whatever becomes of it


def _text(value: bytes) -> str | None:
    """Return a generation's name; one that is no text is not ours, and a leader will replace it."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


class OrderInbox:
    """The leader's orders to the workers of one parent, on a connection of their own.

    One asks, and waits for `fileno` to become readable beside other things; then the answer is read.
    """

    def __init__(self, redis: Redis, keys: Keys, beat_numbers: Mapping[str, int]) -> None:
        self._redis = redis
        self._keys = keys
        self._beat_numbers = beat_numbers
        self._taken = Once()
        self._connection: Any = redis.connection_pool.make_connection()
        self._last: dict[str, str] = {}
        """The workers that are listened for, and the last order that each was given."""
        self._answer_until: float | None = None
        """Until when an answer should have come; None while none is awaited."""

    def add(self, worker: str) -> None:
        """Listen for a worker from now on."""
        self._last[worker] = "0-0"

    def remove(self, worker: str) -> None:
        """Listen for it no more."""
        self._last.pop(worker, None)

    def ask(self, block: float) -> None:
        """Ask for what is new, and have Redis wait up to `block` seconds for it; while an answer is due, do nothing."""
        now = time.monotonic()
        if self._answer_until is not None and now > self._answer_until:
            self._connection.disconnect()
            self._answer_until = None
        if self._answer_until is None and self._last:
            if self._connection._sock is None:
                self._connection.connect()
                self._step_back()
            streams = [self._keys.orders(worker) for worker in self._last]
            milliseconds = max(1, int(block * 1000))
            self._connection.send_command(
                "XREAD", "COUNT", 100, "BLOCK", milliseconds, "STREAMS", *streams, *self._last.values()
            )
            self._answer_until = now + block + _ANSWER_TIMEOUT

    def _step_back(self) -> None:
        """Listen from the ends of streams that have not come as far as what was heard: the server is another now.

        It has lost that, and where its clock is behind, what comes next has a lower id. What stands there is old.
        """
        for worker, heard in self._last.items():
            if heard == "0-0":
                continue
            self._connection.send_command("XINFO", "STREAM", self._keys.orders(worker))
            try:
                told = cast("list[Any]", self._connection.read_response())
                end = told[told.index(b"last-generated-id") + 1].decode()
            except ResponseError as error:
                end = "0-0" if "no such key" in str(error) else heard
            self._last[worker] = min(heard, end, key=stream_position)

    @property
    def is_open(self) -> bool:
        """Say whether an answer is due, so that there is something to wait for."""
        return self._answer_until is not None and self._connection._sock is not None

    def fileno(self) -> int:
        """Return what becomes readable when the answer is there."""
        return int(self._connection._sock.fileno())

    def read(self) -> list[tuple[str, Order]]:
        """Return the orders that have come, with the workers that they are for."""
        self._answer_until = None
        reply = cast("list[tuple[bytes, list[tuple[bytes, list[bytes]]]]]", self._connection.read_response() or [])
        found: list[tuple[str, Order]] = []
        for stream, items in reply:
            worker = stream.decode().removeprefix(self._keys.orders(""))
            if worker in self._last:
                self._last[worker] = items[-1][0].decode()
            refused: list[Refused] = []
            for entry, fields in items:
                body = dict(zip(fields[::2], fields[1::2], strict=True)).get(b"d", b"")
                try:
                    found.append((worker, self._order(worker, stream.decode(), body)))
                except Malformed as error:  # not ours; the leader repeats its order
                    refused.append(Refused(f"orders of {worker}/{entry.decode()}", body, str(error)))
            if refused:
                pipeline = self._redis.pipeline(transaction=False)
                set_aside(pipeline, self._keys, refused)
                pipeline.execute(raise_on_error=False)
        return found

    def _order(self, worker: str, place: str, data: bytes) -> Order:
        """Return an order of the leader's, and each only once."""
        checked = self._keys.signing.check(place, data)
        if checked.mac and checked.stamp < self._beat_numbers.get(worker, 0) - _OLDEST_ORDER:
            raise Forged(f"refused: it answers heartbeat {checked.stamp}, which was long ago")
        self._taken.take(checked.mac)
        return decode(Order, checked.body)
