"""Redis in memory: the product's two stream interfaces over one store, with calls that can fail.

A call may be refused, executed without a response, or executed after the caller's timeout.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from redis.exceptions import ConnectionError, TimeoutError

from orchestrator.domain.fleet.generation import is_over
from orchestrator.domain.tasks.task import KeyHolder
from orchestrator.transport.codec import (
    Applied,
    Ended,
    Heartbeat,
    Malformed,
    Order,
    decode_dispatches,
    digest_of,
    encode,
    stream_position,
)
from orchestrator.transport.keys import is_private, private_queue
from orchestrator.transport.leader.queues import Message
from orchestrator.transport.leader.streams import NO_CHANGES, Inbound
from orchestrator.transport.leader.terms import Deposed, ServerState
from orchestrator.transport.quarantine import Refused
from orchestrator.transport.signing import OFF
from orchestrator.transport.worker import OrderInbox, Receipt, Received, StreamsGone

Position = tuple[int, int]


def _text(position: Position) -> str:
    return f"{position[0]}-{position[1]}"


@dataclass
class Stream:
    """A stream's entries in order, and its consumer group `workers` once created."""

    entries: dict[str, Any] = field(default_factory=dict)
    last: Position = (0, 0)
    group: bool = False
    delivered: Position = (0, 0)
    pending: dict[str, str] = field(default_factory=dict)
    """Owners of the entries that were received and not acknowledged."""

    def add(self, milliseconds: int, body: Any) -> str:
        self.last = max((milliseconds, 0), (self.last[0], self.last[1] + 1))
        entry = _text(self.last)
        self.entries[entry] = body
        return entry

    def after(self, position: str, count: int) -> list[tuple[str, Any]]:
        start = stream_position(position)
        if self.last <= start:
            return []
        found = [(entry, body) for entry, body in self.entries.items() if stream_position(entry) > start]
        return found[:count]

    def drop(self, entries: Sequence[str]) -> None:
        for entry in entries:
            self.pending.pop(entry, None)
            self.entries.pop(entry, None)


@dataclass
class Data:
    """All data that FLUSHALL removes."""

    generation: str | None = None
    server: str | None = None
    term: int | None = None
    applied: Applied | None = None
    nudges: Stream = field(default_factory=Stream)
    events: dict[str, Stream] = field(default_factory=dict)
    queues: dict[tuple[str, str], Stream] = field(default_factory=dict)
    """Streams by generation and queue."""
    orders: dict[str, Stream] = field(default_factory=dict)
    beats: dict[str, tuple[Heartbeat, float]] = field(default_factory=dict)
    workers: dict[str, None] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)
    parameters: dict[str, bytes] = field(default_factory=dict)
    quarantine: list[tuple[str, str]] = field(default_factory=list)


class CallFaults(Protocol):
    """Decides how a call fails: not at all (None), `refused`, `unanswered` or `late`."""

    def __call__(self, caller: str, operation: str) -> str | None: ...


class Caller:
    """A client with a connection."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.connected_to: int | None = None
        self.verified_in: int | None = None
        """The incarnation of the server in which the caller last verified its streams."""


class MemoryRedis:
    """A Redis server."""

    def __init__(self, clock: Callable[[], float], fault: CallFaults) -> None:
        self._clock = clock
        self._fault = fault
        self._incarnation = 1
        self._skew = 0.0
        self._copy = Data()
        self.data = Data()
        self.late: list[tuple[float, Callable[[], Any]]] = []
        """Calls that are executed after their callers' timeouts, with their times."""

    @property
    def run_id(self) -> str:
        return f"life-{self._incarnation}"

    @property
    def milliseconds(self) -> int:
        return int((1_000_000 + self._clock() + self._skew) * 1000)

    @property
    def now(self) -> float:
        """The server's own clock, by which heartbeats expire."""
        return self._clock() + self._skew

    def call(self, caller: Caller, operation: str, effect: Callable[[], Any], *, same_incarnation: bool = False) -> Any:
        """Execute a call or let it fail; with `same_incarnation`, only on the server that has the caller's streams."""
        connected_to, caller.connected_to = caller.connected_to, self._incarnation
        if connected_to not in (None, self._incarnation):
            raise ConnectionError(f"{operation}: the server is another")
        if same_incarnation and caller.verified_in != self._incarnation:
            if self.data.server not in (None, self.run_id):
                raise ConnectionError(f"{operation}: no leader has begun on this server")
            caller.verified_in = self._incarnation
        fault = self._fault(caller.name, operation)
        if fault == "refused":
            raise ConnectionError(f"{operation}: refused")
        if fault == "late":
            self.late.append((self._clock() + 0.4, effect))
            raise TimeoutError(f"{operation}: timed out")
        response = effect()
        if fault == "unanswered":
            raise ConnectionError(f"{operation}: the answer was lost")
        return response

    def deliver_late(self) -> None:
        """Execute the late calls that are due."""
        due = [effect for at, effect in self.late if at <= self._clock()]
        self.late = [(at, effect) for at, effect in self.late if at > self._clock()]
        for effect in due:
            try:
                effect()
            except (Deposed, StreamsGone):
                continue  # the caller has given up

    # -- faults of a server

    def remember(self) -> None:
        """Bring the replica up to date."""
        self._copy = copy.deepcopy(self.data)

    def flush_all(self) -> None:
        self.data = Data()

    def restart(self) -> None:
        """Restart the server, which loses all data."""
        self.data = Data()
        self._incarnation += 1

    def fail_over(self, skew: float) -> None:
        """Promote the replica: the latest writes are lost, and its clock differs by `skew`."""
        self.data = copy.deepcopy(self._copy)
        self._incarnation += 1
        self._skew = skew

    def set_clock(self, by: float) -> None:
        self._skew += by

    def lose_message(self, choose: Callable[[list[Any]], Any]) -> None:
        standing = [(stream, entry) for stream in self.data.queues.values() for entry in stream.entries]
        if standing:
            stream, entry = choose(standing)
            stream.drop([entry])

    def nudge(self, kind: str = "") -> None:
        self.data.nudges.add(self.milliseconds, kind)

    def left_over(self) -> list[str]:
        """Return all entries of the streams, except private queues of workers that have expired."""
        found = [f"events:{name}/{entry}" for name, stream in self.data.events.items() for entry in stream.entries]
        for (generation, queue), stream in self.data.queues.items():
            if is_private(queue) and queue.removeprefix(private_queue("")) not in self.data.workers:
                continue  # the stream has expired: only its worker reads it
            for entry, body in stream.entries.items():
                tasks = ", ".join(f"{task.id.hex()[-6:]}#{task.attempt}" for task in decode_dispatches(body))
                owner = stream.pending.get(entry, "nobody")
                found.append(f"queue:{generation}:{queue}/{entry} of {owner}: {tasks}")
        return found


class MemoryLeaderStreams:
    """`LeaderStreams` in memory. At each call the scheduler may crash or pause."""

    signing = OFF
    is_watched = False

    def __init__(self, server: MemoryRedis, caller: str, boundary: Callable[[str], None]) -> None:
        self._server = server
        self._caller = Caller(caller)
        self._boundary = boundary
        self._last_nudge = "0-0"
        self.terms = self.queues = self.fleet = self

    def _call(self, operation: str, effect: Callable[[], Any], *, same_incarnation: bool = False) -> Any:
        self._boundary(f"before {operation}")
        response = self._server.call(self._caller, operation, effect, same_incarnation=same_incarnation)
        self._boundary(f"after {operation}")
        return response

    def has_changes(self, generation: str, cursor: str) -> bool:
        """Return whether a blocking read would return at once. Used by the simulator only."""
        data = self._server.data
        events = data.events.get(generation)
        return bool((events and events.after(cursor, 1)) or data.nudges.after(self._last_nudge, 1))

    # -- leadership and generations

    def claim(self, term: int, database: str, *, overrule: bool = False) -> bool:
        del database

        def effect() -> bool:
            if term < (self._server.data.term or 0) and not overrule:
                raise Deposed
            self._server.data.term = term
            return True

        return self._call("claim_term", effect)

    def state(self, generation: str, cursor: str) -> ServerState:
        del cursor  # stream ids do not run out here

        def effect() -> ServerState:
            data = self._server.data
            server, readable = self._server.run_id, generation in data.events
            return ServerState(data.generation, data.applied, server, readable, readable and data.server == server)

        return self._call("state", effect)

    def accept_database(self) -> None:
        """Nothing to do: there is only one Postgres."""

    def begin(self, term: int, generation: str, server: str) -> None:
        def effect() -> None:
            data = self._server.data
            if term < (data.term or 0):
                raise Deposed
            data.term = term
            data.generation = generation
            data.server = server
            stream = data.events.setdefault(generation, Stream())
            stream.add(self._server.milliseconds, b"")
            stream.entries.clear()

        self._call("begin_generation", effect)
        self._last_nudge = "0-0"

    def remove_older(self, generation: str, *, later: bool = False) -> None:
        def effect() -> None:
            data = self._server.data
            for table in (data.events, data.queues):
                for name in [*table]:
                    if is_over(name if isinstance(name, str) else name[0], generation, later=later):
                        del table[name]

        self._call("remove_older", effect)

    # -- events

    def read(self, generation: str, cursor: str, count: int, block: float) -> Inbound:
        del block  # the simulated time does not pass during a blocking read

        def effect() -> Inbound:
            data = self._server.data
            events = data.events.get(generation)
            entries = events.after(cursor, count) if events else []
            nudges = data.nudges.after(self._last_nudge, count)
            if nudges:
                self._last_nudge = nudges[-1][0]
            changed = any(kind == "fleet" for _, kind in nudges)
            only_tasks = all(kind == "task" for _, kind in nudges)
            return Inbound(entries, bool(nudges), changed, len(entries) < count, only_tasks=only_tasks)

        return self._call("read", effect, same_incarnation=True)

    def leftover(self, generation: str, cursor: str, count: int) -> Inbound:
        def effect() -> Inbound:
            events = self._server.data.events.get(generation)
            return Inbound(events.after(cursor, count) if events else [])

        return self._call("leftover", effect)

    def publish_ended(self, ended: Sequence[Ended]) -> None:
        """Nothing to do: nothing listens for ended tasks here."""

    def close(self) -> None:
        """Nothing to close."""

    def set_aside(self, refused: Sequence[Refused]) -> None:
        entries = [(refusal.source, refusal.error) for refusal in refused]
        self._call("set_aside", lambda: self._server.data.quarantine.extend(entries))

    # -- dispatch

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
        del ended, claimed, changes

        def effect() -> None:
            data = self._server.data
            if messages and data.term != term:
                raise Deposed
            if cursor is not None:
                data.applied = Applied(generation, cursor)
                if generation in data.events:
                    stream, end = data.events[generation], stream_position(cursor)
                    stream.drop([entry for entry in stream.entries if stream_position(entry) <= end])
            for queue, bodies in messages.items():
                stream = data.queues.setdefault((generation, queue), Stream())
                for body in bodies:
                    stream.add(self._server.milliseconds, body)

        self._call("publish", effect, same_incarnation=True)

    def messages(self, generation: str, queue: str) -> list[Message]:
        def effect() -> list[Message]:
            stream = self._server.data.queues.get((generation, queue), Stream())
            return [Message(entry, body, stream.pending.get(entry)) for entry, body in stream.entries.items()]

        return self._call("messages", effect)

    def publish_key_holders(self, holders: Mapping[bytes, KeyHolder]) -> None:
        """Nothing to do: workers do not read the holders here."""

    def withdraw(self, generation: str, queue: str, entries: Sequence[str]) -> None:
        def effect() -> None:
            self._server.data.queues.get((generation, queue), Stream()).drop(entries)

        self._call("withdraw", effect)

    def take_back(self, generation: str, queue: str, entries: Sequence[str]) -> list[str]:
        def effect() -> list[str]:
            stream = self._server.data.queues.get((generation, queue), Stream())
            taken = [
                entry for entry in entries if entry in stream.entries and stream_position(entry) > stream.delivered
            ]
            stream.drop(taken)
            return taken

        return self._call("take_back", effect)

    # -- the fleet

    def complain(self, reason: str, pause: float = 0.0) -> None:
        """Nothing to do: the complaint is only displayed."""

    def withdraw_complaint(self) -> None:
        """Nothing to do: the complaint is only displayed."""

    def write_canary(self) -> None:
        self._call("canary", lambda: None)

    def heartbeats(self) -> list[Heartbeat]:
        def effect() -> list[Heartbeat]:
            data, now = self._server.data, self._server.now
            found = [data.beats[worker] for worker in data.workers if worker in data.beats]
            return [beat for beat, expires_at in found if expires_at > now]

        return self._call("fleet", effect)

    def forget_gone(self, generation: str, queues: Sequence[str]) -> list[str]:
        # consumers are only the owners of pending entries here
        def effect() -> list[str]:
            data, now = self._server.data, self._server.now
            for worker in list(data.workers):
                if worker not in data.beats or data.beats[worker][1] <= now:
                    del data.workers[worker]
            return [queue for queue in queues if data.queues.get((generation, queue), Stream()).entries]

        return self._call("forget_gone", effect)

    def names(self, digest: str) -> list[str] | None:
        return self._call("names", lambda: self._server.data.names.get(digest))

    def order(self, orders: Mapping[str, Order]) -> None:
        def effect() -> None:
            for worker, order in orders.items():
                self._server.data.orders.setdefault(worker, Stream()).add(self._server.milliseconds, order)

        self._call("order", effect)


class MemoryWorkerStreams:
    """`WorkerStreams` in memory."""

    def __init__(self, server: MemoryRedis, caller: str) -> None:
        self._server = server
        self._caller = Caller(caller)

    def _call(self, operation: str, effect: Callable[[], Any], *, same_incarnation: bool = False) -> Any:
        return self._server.call(self._caller, operation, effect, same_incarnation=same_incarnation)

    def generation(self) -> str | None:
        def effect() -> str | None:
            data = self._server.data
            return data.generation if data.server == self._server.run_id else None

        return self._call("generation", effect)

    def shards_of_leader(self) -> int | None:
        return None

    def join(self, generation: str, queues: Sequence[str]) -> None:
        def effect() -> None:
            for queue in queues:
                self._server.data.queues.setdefault((generation, queue), Stream()).group = True

        self._call("join", effect)

    def take(self, generation: str, worker: str, queues: Sequence[str], count: int, block: float) -> list[Received]:
        del block

        def effect() -> list[Received]:
            received: list[Received] = []
            for queue in queues:
                stream = self._server.data.queues.get((generation, queue))
                if stream is None or not stream.group:
                    raise StreamsGone
                for entry, body in stream.after(_text(stream.delivered), count):
                    stream.delivered = stream_position(entry)
                    stream.pending[entry] = worker
                    try:
                        received.append(Received(generation, queue, entry, decode_dispatches(body)))
                    except Malformed:
                        raise AssertionError("nobody writes nonsense here") from None
            return received

        return self._call("take", effect, same_incarnation=True)

    def flush(self, generation: str, body: bytes | None, done: Mapping[str, Sequence[str]]) -> Receipt:
        def effect() -> Receipt:
            data = self._server.data
            events = data.events.get(generation)
            entry = events.add(self._server.milliseconds, body) if body is not None and events is not None else None
            for queue, entries in done.items():
                if (generation, queue) in data.queues:
                    data.queues[generation, queue].drop(entries)
            return Receipt(entry, data.generation, data.applied)

        return self._call("flush", effect, same_incarnation=True)

    def is_led(self, within: float) -> bool:
        raise AssertionError(f"processes that end are not played to their last word ({within})")

    def drop(self, generation: str, done: Mapping[str, Sequence[str]]) -> None:
        def effect() -> None:
            for queue, entries in done.items():
                if (generation, queue) in self._server.data.queues:
                    self._server.data.queues[generation, queue].drop(entries)

        self._call("drop", effect)

    def publish_parameters(self, body: bytes) -> None:
        self._call("publish_parameters", lambda: self._server.data.parameters.__setitem__(digest_of(body), body))

    def beat(self, beats: Sequence[Heartbeat], names: Sequence[str], ttl: float) -> None:
        def effect() -> None:
            data = self._server.data
            for beat in beats:
                encode(beat)
                data.beats[beat.worker] = (beat, self._server.now + ttl)
                data.workers[beat.worker] = None
                data.names[beat.names] = list(names)

        self._call("beat", effect)

    def deregister(self, workers: Sequence[str], stopped: Sequence[str]) -> None:
        del stopped  # only displayed

        def effect() -> None:
            for worker in workers:
                for table in (self._server.data.beats, self._server.data.orders, self._server.data.workers):
                    table.pop(worker, None)
            self._server.nudge("fleet")

        self._call("leave", effect)

    def greet(self) -> None:
        self._call("greet", lambda: self._server.nudge("fleet"))

    def key_holders(self, tasks: Sequence[bytes]) -> dict[bytes, KeyHolder]:
        del tasks
        return {}

    def order_inbox(self) -> OrderInbox:
        return MemoryOrderInbox(self)  # type: ignore[return-value]


class MemoryOrderInbox:
    """`OrderInbox` in memory: orders can be read as soon as they are requested."""

    def __init__(self, streams: MemoryWorkerStreams) -> None:
        self._streams = streams
        self._last: dict[str, str] = {}
        self._connected_to = streams._server.run_id

    def add(self, worker: str) -> None:
        self._last[worker] = "0-0"

    def remove(self, worker: str) -> None:
        self._last.pop(worker, None)

    def ask(self, block: float) -> None:
        del block

    def read(self) -> list[tuple[str, Order]]:
        def effect() -> list[tuple[str, Order]]:
            found: list[tuple[str, Order]] = []
            server = self._streams._server
            is_other, self._connected_to = server.run_id != self._connected_to, server.run_id
            for worker in self._last:
                orders = server.data.orders.get(worker, Stream())
                if is_other:
                    self._last[worker] = min(self._last[worker], _text(orders.last), key=stream_position)
                for entry, order in orders.after(self._last[worker], 100):
                    self._last[worker] = entry
                    found.append((worker, order))
            return found

        return self._streams._call("orders", effect)
