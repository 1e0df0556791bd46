"""How many tasks are dispatched ahead of time, and how they are bundled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.domain.fleet.window import HORIZON, room, smoothed_rate
from orchestrator.domain.tasks.task import Dispatch
from orchestrator.scheduler.dispatch.dispatcher import Dispatcher
from orchestrator.scheduler.fleet.view import Fleet
from orchestrator.scheduler.limits import LaneService
from orchestrator.scheduler.link import _PLAIN_FIELDS, Link, messages
from orchestrator.scheduler.tick_result import TickResult
from orchestrator.scheduler.transaction import Transaction
from orchestrator.store.driver import keep_prepared
from orchestrator.store.tasks.claims import Claimed
from orchestrator.store.tasks.waiting import InFlight
from orchestrator.transport.codec import MAX_BUNDLE, Heartbeat, decode_dispatches, names_digest

NOW = datetime(2026, 11, 15, tzinfo=UTC)


class Postgres:
    """A connection, its driver's connection and its cursor. Records the claims; no task is ever ready."""

    description = None
    rowcount = 0
    paramstyle = "pyformat"
    returns_rows = False

    def __init__(self) -> None:
        self.info: dict[str, Any] = {}
        self.rooms: list[dict[str, int]] = []

    def exec_driver_sql(self, statement: str, _: None = None) -> Postgres:
        assert statement.startswith(("PREPARE", "SELECT"))
        return self

    def in_transaction(self) -> bool:
        return True

    def get_execution_options(self) -> dict[str, Any]:
        return {}

    @property
    def connection(self) -> Postgres:
        return self

    @property
    def dbapi_connection(self) -> Postgres:
        return self

    @property
    def dialect(self) -> Postgres:
        return self

    def cursor(self) -> Postgres:
        return self

    def execute(self, statement: str, parameters: Mapping[str, Any] | None) -> None:
        assert statement.startswith("EXECUTE")
        if parameters is not None and "queue_room" in parameters:
            names, rooms = (str(parameters[name]).strip("{}").split(",") for name in ("queue_name", "queue_room"))
            self.rooms.append({name.strip('"'): int(room) for name, room in zip(names, rooms, strict=True)})


def fleet_of(**slots: int) -> Fleet:
    fleet = Fleet(5.0)
    beats = [
        Heartbeat(queue, "host", 1, [queue], count, names_digest(["job"]), "", 0.0) for queue, count in slots.items()
    ]
    fleet.observe(beats, 1.0, lambda _: ["job"])
    return fleet


def claimed(number: int, queue: str = "a", *, alone: bool = False) -> Claimed:
    return Claimed(number.to_bytes(16, "big"), 1, "job", b"\x92\x90\x80", queue, None, None, number, alone)


def in_flight(**counts: int) -> list[InFlight]:
    return [
        InFlight(b"", 1, queue, "dispatched", False, None, 0.0) for queue, count in counts.items() for _ in range(count)
    ]


def rooms(dispatcher: Dispatcher, tick: TickResult | None = None) -> dict[str, int]:
    postgres: Any = Postgres()
    keep_prepared(postgres)
    tx = Transaction(postgres, NOW, result=tick or TickResult())
    dispatcher.claim(tx, 300.0)
    rooms: list[dict[str, int]] = postgres.rooms
    return rooms[0] if rooms else {}


# -- the window


def test_each_queue_gets_its_free_slots() -> None:
    dispatcher = Dispatcher(fleet_of(a=10, b=3), LaneService(), batch=1_000)
    assert rooms(dispatcher) == {"a": 10, "b": 3}
    dispatcher.recount(in_flight(a=4, b=3, nobody=7))
    assert rooms(dispatcher) == {"a": 6}
    assert dispatcher.in_flight == 14


def test_tasks_of_a_draining_worker_take_no_slots_of_other_workers() -> None:
    """The task may run for hours, while another worker has nothing to do."""
    fleet = Fleet(5.0)
    plain = Heartbeat("new", "host", 1, ["a"], 2, names_digest(["job"]), "", 0.0)
    drains = msgspec.structs.replace(plain, worker="old", slots=10, draining=True)
    fleet.observe([plain, drains], 1.0, lambda _: ["job"])
    dispatcher = Dispatcher(fleet, LaneService(), batch=1_000)
    running = [InFlight(b"", 1, "a", "running", False, worker, 0.0) for worker in ("old", "old", "old", "new")]
    dispatcher.recount(running)
    assert rooms(dispatcher) == {"a": 1}
    landing = TickResult()
    landing.capacity.out_of_flight["a"] = 4
    assert rooms(dispatcher, landing) == {"a": 2}, "whoever they were of, there are no more slots than that"


def test_without_a_worker_nothing_is_claimed() -> None:
    assert rooms(Dispatcher(fleet_of(), LaneService(), batch=1_000)) == {}


def test_one_tick_claims_no_more_than_a_batch() -> None:
    assert rooms(Dispatcher(fleet_of(a=5_000), LaneService(), batch=1_000)) == {"a": 1_000}


def test_tasks_that_end_in_a_tick_free_their_slots_in_that_tick() -> None:
    dispatcher = Dispatcher(fleet_of(a=10), LaneService(), batch=1_000)
    dispatcher.recount(in_flight(a=10))
    assert rooms(dispatcher) == {}
    landing = TickResult()
    landing.capacity.out_of_flight["a"] = 4
    assert rooms(dispatcher, landing) == {"a": 4}


def test_a_commit_updates_the_tasks_in_flight() -> None:
    dispatcher = Dispatcher(fleet_of(a=10), LaneService(), batch=1_000)
    first = TickResult()
    first.outgoing.claimed = [claimed(number) for number in range(8)]
    dispatcher.committed(first)
    assert dispatcher.in_flight == 8
    second = TickResult()
    second.capacity.out_of_flight["a"] = 5
    dispatcher.committed(second)
    assert dispatcher.in_flight == 3
    assert rooms(dispatcher) == {"a": 7}


def test_a_fast_queue_is_dispatched_ahead_of_its_slots() -> None:
    now = 100.0
    dispatcher = Dispatcher(fleet_of(a=10), LaneService(), batch=1_000, monotonic=lambda: now)
    dispatcher.committed(TickResult())
    for _ in range(50):
        busy = TickResult()
        busy.capacity.finished["a"] = 100
        now += 0.1
        dispatcher.committed(busy)
    assert 100 <= rooms(dispatcher)["a"] <= 10 + 100
    for _ in range(100):  # idle: the window closes again
        now += 0.1
        dispatcher.committed(TickResult())
    assert rooms(dispatcher) == {"a": 10}


# -- messages


def unpacked(found: Mapping[str, Sequence[bytes]]) -> dict[str, list[list[Dispatch]]]:
    return {queue: [decode_dispatches(body) for body in bodies] for queue, bodies in found.items()}


def test_a_short_backlog_is_spread_over_the_slots() -> None:
    for count in (1, 5, 10, 19):
        bundles = unpacked(messages([claimed(number) for number in range(count)], fleet_of(a=10).slots))["a"]
        assert [len(bundle) for bundle in bundles] == [1] * count


def test_bundles_of_large_tasks_are_limited_in_bytes() -> None:
    tasks = [
        claimed(number)._replace(payload=b"x" * size) for number, size in enumerate([400_000] * 5 + [3_000_000, 5])
    ]
    bundles = unpacked(messages(tasks, fleet_of(a=1).slots))["a"]
    assert [len(bundle) for bundle in bundles] == [2, 2, 1, 1, 1]
    assert [task.id for bundle in bundles for task in bundle] == [task.id for task in tasks]


def test_a_long_backlog_is_bundled() -> None:
    bundles = unpacked(messages([claimed(number) for number in range(1_000)], fleet_of(a=10).slots))["a"]
    assert {len(bundle) for bundle in bundles} == {MAX_BUNDLE}


def test_short_tasks_are_bundled_by_process_and_others_by_slot() -> None:
    fleet = fleet_of(a=10)
    link = Link.__new__(Link)
    link.fleet, link._short = fleet, {}
    tick = TickResult()
    for seconds, size in ((None, 4), (0.0005, 20), (0.5, 4), (0.0009, 20)):
        if seconds is not None:
            tick.counts.durations = [("a", seconds, 1)]
            link.committed(tick)
        bundles = unpacked(messages([claimed(number) for number in range(40)], link._bundle_count))["a"]
        assert {len(bundle) for bundle in bundles} == {size}


def test_a_message_carries_the_whole_task() -> None:
    task = Claimed(b"i" * 16, 7, "job", b"payload", "a", '{"timeout":1.0}', b"r" * 16, 3, True)
    (bundle,) = unpacked(messages([task], fleet_of(a=10).slots))["a"]
    assert bundle == [Dispatch(b"i" * 16, 7, "job", b"payload", "a", '{"timeout":1.0}', b"r" * 16, 3, True)]


def test_the_fields_of_a_plain_task_begin_a_dispatch() -> None:
    assert Claimed._fields[:_PLAIN_FIELDS] == Dispatch.__struct_fields__[:_PLAIN_FIELDS]
    task = Claimed(b"i" * 16, 7, "job", b"payload", "a", '{"timeout":1.0}', None, None, True, 2, lane="job|1", seq=5)
    (bundle,) = unpacked(messages([task], fleet_of(a=10).slots))["a"]
    assert bundle == [Dispatch(b"i" * 16, 7, "job", b"payload", "a", '{"timeout":1.0}', alone=True, failures=2)]


lines = st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), max_size=200)


@given(lines, st.integers(1, 20))
def test_bundling_keeps_every_task_once_and_in_order(line: list[tuple[str, bool]], slots: int) -> None:
    tasks = [claimed(number, queue, alone=alone) for number, (queue, alone) in enumerate(line)]
    found = unpacked(messages(tasks, fleet_of(a=slots, b=1).slots))
    for queue, bundles in found.items():
        sent = [task for bundle in bundles for task in bundle]
        for alone in (False, True):
            wanted = [task.id for task in tasks if task.queue == queue and task.alone is alone]
            assert [task.id for task in sent if task.alone is alone] == wanted
        assert all(len(bundle) <= MAX_BUNDLE for bundle in bundles)
        assert all(len(bundle) == 1 for bundle in bundles if any(task.alone for task in bundle))
    assert sum(len(bundle) for bundles in found.values() for bundle in bundles) == len(tasks)


# -- room


def test_without_a_worker_there_is_no_room() -> None:
    assert room(slots=0, outstanding=0, rate=1_000_000.0) == 0


@given(st.integers(1, 10_000), st.integers(0, 100_000), st.floats(0, 100_000))
def test_room_is_the_free_slots_and_a_short_horizon(slots: int, outstanding: int, rate: float) -> None:
    free = room(slots, outstanding, rate)
    assert free >= 0
    assert free + outstanding <= max(outstanding, slots + rate * HORIZON)
    assert free == 0 or free + outstanding > slots + rate * HORIZON - 1


@given(st.floats(0, 1e5), st.integers(0, 10_000), st.floats(0.001, 100))
def test_a_smoothed_rate_lies_between_the_old_and_the_measured_rate(
    previous: float, finished: int, seconds: float
) -> None:
    measured = finished / seconds
    low, high = sorted((previous, measured))
    assert low * (1 - 1e-9) - 1e-9 <= smoothed_rate(previous, finished, seconds) <= high * (1 + 1e-9) + 1e-9
