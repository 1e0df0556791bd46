"""The worker's side of Redis: receive tasks, report, send heartbeats and read orders."""

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
from orchestrator.transport.signing import Forged, ReplayGuard

# This script never creates the events stream. If it is missing, Redis has lost it: the reports stay with the worker and
# the messages in their streams until a leader has begun a new generation.
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
_MAX_ORDER_AGE = 60
"""An order that answers a heartbeat more than this many heartbeats ago is refused."""
_ANSWER_TIMEOUT = 5.0
"""Seconds that the reply of a blocking read may be late before the connection counts as lost."""


class Received(NamedTuple):
    """A dispatch message that this worker received."""

    generation: str
    """The generation of the stream that held the message. A newer one may have begun since."""
    queue: str
    entry: str
    tasks: list[Dispatch]


class Receipt(NamedTuple):
    """Redis's answer to a flush."""

    entry: str | None
    """The id of the entry with the reports in the events stream; None if the reports were not accepted."""
    generation: str | None
    applied: Applied | None


class StreamsGone(Exception):
    """The streams of this generation no longer exist: read the current generation again."""


class WorkerStreams:
    """All Redis operations of one worker process."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._connection = RawConnection(redis, keys.server)
        self._accepted = ReplayGuard()
        self._beat_numbers: dict[str, int] = {}
        """The numbers of the last heartbeats, to refuse orders that answer a much older heartbeat."""

    def generation(self) -> str | None:
        """Return the current generation, or None if no leader has begun one on this server.

        A promoted replica, or a server that restarted from disk, shows the previous generation, and its streams hold
        messages that have already been received and answered.
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
        """Create the consumer group of each queue unless it exists."""
        for queue in queues:
            try:
                self._redis.xgroup_create(self._keys.queue(generation, queue), GROUP, id="0", mkstream=True)
            except ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise

    def take(self, generation: str, worker: str, queues: Sequence[str], count: int, block: float) -> list[Received]:
        """Receive up to `count` messages. Wait up to `block` seconds for the first; with 0 do not wait."""
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
            stream_key = stream.decode()
            queue = stream_key.removeprefix(self._keys.queue(generation, ""))
            for item in items:
                entry, body = item[0].decode(), field(item, b"d")
                try:
                    checked = signing.check(stream_key, body)
                    tasks = decode_dispatches(checked.body)
                    self._accepted.take(checked.mac)
                    received.append(Received(generation, queue, entry, tasks))
                except Malformed as error:
                    self._set_aside(generation, queue, entry, body, str(error))
        return received

    def flush(self, generation: str, body: bytes | None, done: Mapping[str, Sequence[str]]) -> Receipt:
        """Append reports to the events stream and delete the messages that they answer, in one step.

        `done` maps queues to the ids of their answered messages.
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
        """Return whether a leader has written its canary within this many seconds."""
        milliseconds: Any = self._redis.pttl(self._keys.canary)
        return int(milliseconds) > 1000 * (CANARY_TTL - within)

    def shards_of_leader(self) -> int | None:
        """Return the number of shards that the leader is configured for; None if no leader has published it lately."""
        canary = re.fullmatch(rb"shards=(\d+)", cast("bytes | None", self._redis.get(self._keys.canary)) or b"")
        return None if canary is None else int(canary[1])

    def drop(self, generation: str, done: Mapping[str, Sequence[str]]) -> None:
        """Delete messages although Redis did not accept their reports: the messages may be what fills Redis.

        If the worker then dies, the leader finds neither a holder nor a message, and counts the attempts as lost.
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
        """Write the heartbeats of several worker processes and the task names that they know."""
        keys = self._keys
        pipeline = self._redis.pipeline(transaction=False)
        for beat in beats:
            key = keys.worker(beat.worker)
            pipeline.set(key, keys.signing.sign(key, encode(beat)), px=int(ttl * 1000))
            self._beat_numbers[beat.worker] = beat.number
            pipeline.sadd(keys.workers, beat.worker)
        for digest in {beat.names for beat in beats}:
            key = keys.names(digest)
            pipeline.set(key, keys.signing.sign(key, encode(list(names))), ex=_NAMES_TTL)
        pipeline.execute()

    def publish_parameters(self, body: bytes) -> None:
        """Publish the encoded parameters of tasks under their digest. The leader stores them."""
        key = self._keys.parameters(digest_of(body))
        self._redis.set(key, self._keys.signing.sign(key, body), ex=_NAMES_TTL)

    def deregister(self, workers: Sequence[str], stopped: Sequence[str]) -> None:
        """Delete the heartbeats of ended workers, and publish which of them shut down cleanly."""
        keys = self._keys
        generation = self.generation() or ""
        pipeline = self._redis.pipeline(transaction=True)
        for worker in workers:
            pipeline.delete(keys.worker(worker), keys.orders(worker))
            pipeline.expire(keys.queue(generation, private_queue(worker)), PRIVATE_TTL)
            pipeline.srem(keys.workers, worker)
            self._beat_numbers.pop(worker, None)
        self._nudge_fleet(pipeline, {"fleet": b"", "stopped": keys.signing.sign(keys.nudges, encode(list(stopped)))})
        pipeline.execute()

    def greet(self) -> None:
        """Notify the leader of a change of the fleet. If that fails, the leader notices it at its next check."""
        with contextlib.suppress(*UNAVAILABLE):
            self._nudge_fleet(self._redis, {"fleet": b""})

    def _nudge_fleet(self, redis: Redis, fields: dict[str, bytes]) -> None:
        redis.xadd(self._keys.nudges, cast("Any", fields), maxlen=NUDGE_CAP, approximate=True)

    def order_inbox(self) -> OrderInbox:
        """Return the inbox that receives the leader's orders."""
        return OrderInbox(self._redis, self._keys, self._beat_numbers)

    def key_holders(self, tasks: Sequence[bytes]) -> dict[bytes, KeyHolder]:
        """Return the holders of the keys requested for these tasks, as far as the leader has published them."""
        values = cast("list[bytes | None]", self._redis.mget([self._keys.key_holder(task) for task in tasks]))
        holders: dict[bytes, KeyHolder] = {}
        for task, data in zip(tasks, values, strict=True):
            with contextlib.suppress(Malformed):  # foreign data; the leader publishes it again
                if data is not None:
                    holders[task] = decode(KeyHolder, self._keys.signing.body(self._keys.key_holder(task), data))
        return holders

    def listen_applied(self, callback: Callable[[Applied], None]) -> None:
        """Call `callback` in a thread whenever the leader publishes its applied cursor."""

        def listen() -> None:
            while True:
                pubsub = self._redis.pubsub()  # type: ignore[no-untyped-call]
                try:
                    pubsub.subscribe(self._keys.applied)
                    while True:
                        message = pubsub.get_message(timeout=5.0)
                        applied = self._applied(message["data"]) if message and message["type"] == "message" else None
                        if applied is not None:
                            callback(applied)
                except UNAVAILABLE:
                    pubsub.close()
                    threading.Event().wait(0.5)  # receipts carry the cursor too, a little later

        threading.Thread(target=listen, name="applied", daemon=True).start()

    def _applied(self, value: bytes | None) -> Applied | None:
        try:
            return decode(Applied, self._keys.signing.body(self._keys.applied, value)) if value else None
        except Malformed:
            return None  # of another release, or foreign; the leader writes it again with its next tick

    def _set_aside(self, generation: str, queue: str, entry: str, body: bytes, error: str) -> None:
        stream = self._keys.queue(generation, queue)
        pipeline = self._redis.pipeline(transaction=True)
        set_aside(pipeline, self._keys, [Refused(f"{queue}/{entry}", body, error)])
        pipeline.xack(stream, GROUP, entry)
        pipeline.xdel(stream, entry)
        pipeline.execute(raise_on_error=False)  # whatever happens, the other messages of the batch must be returned


def _text(value: bytes) -> str | None:
    """Decode the name of a generation. Return None for bytes that are not UTF-8: the leader will replace them."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


class OrderInbox:
    """Reads the leader's orders to the workers of one parent, on a connection of its own.

    `ask` sends a blocking read. The caller polls `fileno` together with its other file descriptors, then calls `read`.
    """

    def __init__(self, redis: Redis, keys: Keys, beat_numbers: Mapping[str, int]) -> None:
        self._redis = redis
        self._keys = keys
        self._beat_numbers = beat_numbers
        self._accepted = ReplayGuard()
        self._connection: Any = redis.connection_pool.make_connection()
        self._last_ids: dict[str, str] = {}
        """The workers that belong to this inbox, each with the id of the last order read."""
        self._reply_by: float | None = None
        """The time by which Redis should have replied; None if no reply is pending."""

    def add(self, worker: str) -> None:
        """Start to read the orders of a worker."""
        self._last_ids[worker] = "0-0"

    def remove(self, worker: str) -> None:
        """Stop reading the orders of a worker."""
        self._last_ids.pop(worker, None)

    def ask(self, block: float) -> None:
        """Send a read that blocks up to `block` seconds. Do nothing while a reply is pending."""
        now = time.monotonic()
        if self._reply_by is not None and now > self._reply_by:
            self._connection.disconnect()
            self._reply_by = None
        if self._reply_by is None and self._last_ids:
            if self._connection._sock is None:
                self._connection.connect()
                self._rewind_lost()
            streams = [self._keys.orders(worker) for worker in self._last_ids]
            milliseconds = max(1, int(block * 1000))
            self._connection.send_command(
                "XREAD", "COUNT", 100, "BLOCK", milliseconds, "STREAMS", *streams, *self._last_ids.values()
            )
            self._reply_by = now + block + _ANSWER_TIMEOUT

    def _rewind_lost(self) -> None:
        """Move cursors that are beyond the ends of their streams back to these ends: the server was replaced.

        It has lost those orders. If its clock is behind, new orders get lower ids. Orders in the stream are stale.
        """
        for worker, last_id in self._last_ids.items():
            if last_id == "0-0":
                continue
            self._connection.send_command("XINFO", "STREAM", self._keys.orders(worker))
            try:
                info = cast("list[Any]", self._connection.read_response())
                end = info[info.index(b"last-generated-id") + 1].decode()
            except ResponseError as error:
                end = "0-0" if "no such key" in str(error) else last_id
            self._last_ids[worker] = min(last_id, end, key=stream_position)

    @property
    def is_open(self) -> bool:
        """Return whether a reply is pending."""
        return self._reply_by is not None and self._connection._sock is not None

    def fileno(self) -> int:
        """Return the file descriptor that becomes readable when the reply arrives."""
        return int(self._connection._sock.fileno())

    def read(self) -> list[tuple[str, Order]]:
        """Return the new orders, each with its worker."""
        self._reply_by = None
        reply = cast("list[tuple[bytes, list[tuple[bytes, list[bytes]]]]]", self._connection.read_response() or [])
        orders: list[tuple[str, Order]] = []
        for stream, items in reply:
            worker = stream.decode().removeprefix(self._keys.orders(""))
            if worker in self._last_ids:
                self._last_ids[worker] = items[-1][0].decode()
            refused: list[Refused] = []
            for entry, fields in items:
                body = dict(zip(fields[::2], fields[1::2], strict=True)).get(b"d", b"")
                try:
                    orders.append((worker, self._order(worker, stream.decode(), body)))
                except Malformed as error:  # foreign data; the leader repeats its order
                    refused.append(Refused(f"orders of {worker}/{entry.decode()}", body, str(error)))
            if refused:
                pipeline = self._redis.pipeline(transaction=False)
                set_aside(pipeline, self._keys, refused)
                pipeline.execute(raise_on_error=False)
        return orders

    def _order(self, worker: str, key: str, data: bytes) -> Order:
        """Verify and decode an order. Raise `Forged` for a repeated or stale one."""
        checked = self._keys.signing.check(key, data)
        if checked.mac and checked.stamp < self._beat_numbers.get(worker, 0) - _MAX_ORDER_AGE:
            raise Forged(f"refused: it answers heartbeat {checked.stamp}, which is too old")
        self._accepted.take(checked.mac)
        return decode(Order, checked.body)
