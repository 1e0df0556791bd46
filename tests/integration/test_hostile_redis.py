"""Foreign data in our Redis: the leader goes on whatever it finds, and reports what it set aside.

The leader and its services are those of `stage.py`; here only the content of Redis is wrong.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from redis import Redis

from orchestrator.domain.ids import time_ordered_id
from orchestrator.domain.tasks.task import NewTask, Succeeded
from orchestrator.scheduler.leadership import TermOver
from orchestrator.transport import codec, inspection
from orchestrator.transport.codec import Applied, Ended, Heartbeat, encode
from orchestrator.transport.connection import connect
from orchestrator.transport.leader.terms import Deposed
from orchestrator.transport.worker import WorkerStreams
from orchestrator.workers.parent.held import HeldAttempts
from orchestrator.workers.reporting.reporter import Reporter
from tests.integration.stage import KEYS, ONE, System
from tests.waiting import eventually

LAST = "18446744073709551615-18446744073709551615"
"""The last id that a stream can have; nothing can be added after it."""


def run_a_task(system: System) -> None:
    """Run a task from its enqueue to its end, with as many ticks as the leader needs to recover."""
    worker = system.workers[0] if system.workers else system.worker()
    handle = system.job.enqueue(1)

    def ended() -> bool:
        worker.succeed(*worker.take())
        return handle.status() == "success"

    system.make_old()
    for _ in range(30):
        try:
            system.pass_seconds()
        except Deposed:
            system.lead()
        if ended():
            return
        system.make_old()
    raise AssertionError("the leader does not get on")


def foreign_keys(system: System) -> dict[str, str]:
    view = inspection.inspect(system.redis, KEYS, system.scheduler.term.generations.cursor.generation, ["default"])
    return {foreign.key: foreign.found for foreign in view.foreign_keys}


# -- heartbeats


def beat(**changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "worker": "stranger",
        "host": "host",
        "pid": 1,
        "queues": ["default"],
        "slots": 0,
        "names": "digest",
        "generation": "",
        "started_at": 1.0,
    }
    return encode(Heartbeat(**{**fields, **changes}))


BEATS = {
    "nothing": b"",
    "noise": b"\xff\xfe",
    "nesting without end": b"\x91" * 100_000,
    "a NUL in its id": beat(worker="a\0b"),
    "a NUL in its host": beat(host="a\0b"),
    "no id": beat(worker=""),
    "a long id": beat(worker="w" * 100_000),
    "a NUL in a queue": beat(queues=["a\0b"]),
    "a huge pid": beat(pid=2**40),
    "slots without end": beat(slots=2**60),
    "slots below zero": beat(slots=-5),
    "running without end": beat(running=2**60),
    "the end of time": beat(started_at=1e300),
    "no time": beat(started_at=float("nan")),
    "queues without end": beat(queues=["q"] * 100_000),
}


@pytest.mark.parametrize("name", BEATS)
def test_an_invalid_heartbeat_is_set_aside_once(system: System, name: str) -> None:
    system.worker()
    system.redis.set(KEYS.worker("stranger"), BEATS[name])
    system.redis.sadd(KEYS.workers, "stranger")
    run_a_task(system)
    system.pass_seconds(3)
    (refused,) = system.quarantine()
    assert refused[b"entry"] == KEYS.worker("stranger").encode()
    assert int(refused[b"size"]) == len(BEATS[name])
    assert {row["id"] for row in system.sql("SELECT id FROM orchestrator.workers")} == {"w1"}


def test_a_strange_heartbeat_is_used_as_far_as_it_is_valid(system: System) -> None:
    system.worker()
    system.redis.set(KEYS.worker("stranger"), beat(held=b"\xff" * 33, queues=["öffnungszeiten"], slots=2**31 - 1))
    system.redis.sadd(KEYS.workers, "stranger", b"\xff\xfe", b"", b"w" * 100_000)
    run_a_task(system)
    assert system.quarantine() == []


@pytest.mark.parametrize("names", [b"\xff", encode(["a\0b", "job"]), encode([1]), encode(["n" * 100_000])])
def test_invalid_task_names_are_ignored(system: System, names: bytes) -> None:
    system.worker()
    system.redis.set(KEYS.worker("stranger"), beat(slots=5))
    system.redis.set(KEYS.names("digest"), names)
    system.redis.sadd(KEYS.workers, "stranger")
    run_a_task(system)


# -- keys with foreign values

STRANGE: dict[str, Callable[[Redis, str], object]] = {
    "noise": lambda redis, key: redis.set(key, b"\xff\xfe"),
    "nothing": lambda redis, key: redis.set(key, b""),
    "a word": lambda redis, key: redis.set(key, b"banana"),
    "a large number": lambda redis, key: redis.set(key, b"9" * 30),
    "a very long number": lambda redis, key: redis.set(key, b"9" * 10_000),
    "infinity": lambda redis, key: redis.set(key, b"inf"),
    "a message": lambda redis, key: redis.set(key, encode(Applied("1-1", "0-0"))),
    "a position without end": lambda redis, key: redis.set(key, encode(["1-1", "9" * 5_000 + "-1"])),
    "a position that is a word": lambda redis, key: redis.set(key, encode(["1-1", "banana"])),
    "a list": lambda redis, key: redis.delete(key) and redis.lpush(key, b"x"),
    "a hash": lambda redis, key: redis.delete(key) and redis.hset(key, "x", b"x"),
}


@pytest.mark.parametrize("key", [KEYS.generation, KEYS.server, KEYS.database, KEYS.term, KEYS.applied, KEYS.canary])
def test_foreign_values_are_replaced(system: System, key: str) -> None:
    run_a_task(system)
    for put in STRANGE.values():
        system.redis.set(key, "something")
        put(system.redis, key)
        run_a_task(system)
        assert foreign_keys(system) == {}


def test_a_term_never_issued_by_postgres_is_overruled(system: System, caplog: pytest.LogCaptureFixture) -> None:
    """For example, the database was restored from a backup and Redis was not."""
    run_a_task(system)
    system.redis.set(KEYS.term, 10**12)
    with caplog.at_level(logging.ERROR):
        run_a_task(system)
    assert caplog.text.count("Redis holds a later term") == 1
    assert system.redis.get(KEYS.term).split()[0] == str(system.scheduler._leadership.term).encode()  # type: ignore[union-attr]


def test_a_later_term_issued_by_postgres_is_not_overruled(system: System) -> None:
    run_a_task(system)
    old = system.scheduler
    system.lead()
    with pytest.raises(TermOver):
        old.term.generations.claim_term(0.0)
    assert system.redis.get(KEYS.term).split()[0] == str(system.scheduler._leadership.term).encode()  # type: ignore[union-attr]


def put_string(redis: Redis, key: str) -> None:
    redis.set(key, b"x")


def put_list(redis: Redis, key: str) -> None:
    redis.delete(key)
    redis.lpush(key, b"x")


def remove(redis: Redis, key: str) -> None:
    redis.delete(key)


def exhaust(redis: Redis, key: str) -> None:
    redis.xadd(key, {"d": b"x"}, id=LAST)


@pytest.mark.parametrize("damage", [put_string, put_list, remove, exhaust])
def test_a_damaged_events_stream_begins_a_generation(system: System, damage: Callable[[Redis, str], None]) -> None:
    """Otherwise workers could no longer report, unnoticed."""
    worker = system.worker()
    (handle,) = system.dispatch()
    task = worker.take()[0]
    old = system.generation
    damage(system.redis, KEYS.events(old))
    system.pass_seconds(2)
    assert system.generation != old
    worker.report(Succeeded(task.id, task.attempt, 0.1, ONE))
    system.tick()
    assert handle.status() == "success"
    assert system.redis.exists(KEYS.events(old)) == 0
    run_a_task(system)


@pytest.mark.parametrize("damage", [put_string, put_list, remove, exhaust])
def test_a_damaged_queue_loses_only_its_messages(system: System, damage: Callable[[Redis, str], None]) -> None:
    worker = system.worker()
    other = system.worker("w2", queue="other")
    handles = system.dispatch(3)
    damage(system.redis, KEYS.queue(system.generation, "default"))
    elsewhere = system.job.options(queue="other").enqueue(1)
    system.job.enqueue(2)
    system.pass_seconds(2)
    system.make_old()

    def finish() -> bool:
        for each in (worker, other):
            each.succeed(*each.take())
        system.make_old()
        return system.states(*handles, elsewhere) == ["success"] * 4

    system.tick_until(finish)


FIXED = [KEYS.nudges, KEYS.workers, KEYS.quarantine]


@pytest.mark.parametrize("key", FIXED)
def test_an_occupied_key_is_reported_and_the_leader_recovers(
    system: System, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = system.worker()
    run_a_task(system)
    put_string(system.redis, key)
    with caplog.at_level(logging.WARNING):
        handle = system.job.enqueue(1)  # committed already, so the call does not fail
        worker.flush(b"\xff")
        for _ in range(3):
            system.clock.now += 1.0
            system.tick()
    assert "orchestrator status" in caplog.text
    assert foreign_keys(system) == {key: "string"}
    system.redis.delete(key)
    system.pass_seconds(2)
    system.make_old()
    system.tick_until(lambda: worker.succeed(*worker.take()) or handle.status() == "success")
    assert foreign_keys(system) == {}


# -- messages


def test_a_flood_of_hostile_messages_is_bounded(system: System, caplog: pytest.LogCaptureFixture) -> None:
    """Other work goes on, the quarantine stays small, and the log has one line for each tick, not each message."""
    worker = system.worker()
    handles = system.dispatch(3)
    tasks = worker.take()
    pipeline = system.redis.pipeline(transaction=False)
    for number in range(1_500):
        pipeline.xadd(KEYS.events(system.generation), {"d": b"\xc1" * (30_000 if number < 50 else 10)})
        pipeline.xadd(KEYS.nudges, {"anything": b"\xff" * 100})
    pipeline.execute()
    worker.succeed(*tasks)
    with caplog.at_level(logging.ERROR):
        system.tick(5)
    assert system.states(*handles) == ["success"] * 3
    assert 1_000 <= len(system.quarantine()) <= 1_100
    assert max(len(refused[b"body"]) for refused in system.quarantine()) <= 10_000
    assert caplog.text.count("event.quarantined") <= 3


def test_an_oversized_message_is_not_decoded(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    tasks = worker.take()
    monkeypatch.setattr(codec, "MAX_MESSAGE", 1_000)
    worker.report(Succeeded(tasks[0].id, 1, 0.1, b"\xda\xff\xff" + b"x" * 65_535))
    system.tick()
    assert handle.status() == "dispatched"
    (refused,) = system.quarantine()
    assert b"65," in refused[b"error"]
    assert int(refused[b"size"]) > 65_535
    assert len(refused[b"body"]) == 10_000


DISPATCHES = {
    "an id of three bytes": [[b"abc", 1, "job", b"\x92\x90\x80", "default"]],
    "no attempt": [[b"i" * 16, 0, "job", b"\x92\x90\x80", "default"]],
    "a huge attempt": [[b"i" * 16, 2**40, "job", b"\x92\x90\x80", "default"]],
    "a run of three bytes": [[b"i" * 16, 1, "job", b"\x92\x90\x80", "default", None, b"abc"]],
    "something else": {"a": 1},
}


@pytest.mark.parametrize("name", DISPATCHES)
def test_a_worker_sets_aside_invalid_messages_and_runs_the_others(system: System, name: str) -> None:
    worker = system.worker()
    (before,) = system.dispatch()
    stream = KEYS.queue(system.generation, "default")
    system.redis.xadd(stream, {"d": msgspec.msgpack.encode(DISPATCHES[name])})
    system.redis.xadd(stream, {"other": b"field"})
    (after,) = system.dispatch()
    taken = worker.take()
    assert len(taken) == 2
    assert len(system.quarantine()) == 2
    worker.succeed(*taken)
    system.tick()
    assert system.states(before, after) == ["success"] * 2
    assert system.redis.xlen(stream) == 0


def test_a_worker_sets_aside_invalid_orders(system: System) -> None:
    worker = system.worker()
    for body in (b"\xff", b"", encode([[[b"abc", 1]]])):
        system.redis.xadd(KEYS.orders("w1"), {"d": body})
    system.redis.xadd(KEYS.orders("w1"), {"d": encode([[], True])})
    (order,) = worker.orders()
    assert order.drain
    assert [refused[b"entry"].partition(b"/")[0] for refused in system.quarantine()] == [b"orders of w1"] * 3


# -- messages to workers and clients


def test_a_reporter_ignores_invalid_positions(system: System) -> None:
    """Otherwise its thread would die, and with it every later report."""
    new = NewTask(time_ordered_id(1, bytes(10)), "job", "default", b"\x92\x90\x80")
    held = HeldAttempts(10)
    reporter = Reporter(WorkerStreams(connect(system.settings.redis_url), KEYS), "w1", held)
    system.pass_seconds()
    handed = threading.Thread(target=reporter.send_tasks, args=([new],), daemon=True)
    reporter.start()
    for strange in (encode(["1-1", "banana"]), encode(["1-1", "9" * 5_000]), b"\xff", encode([1, 2])):
        system.redis.set(KEYS.applied, strange)
    handed.start()
    eventually(lambda: system.redis.xlen(KEYS.events(system.generation)) == 1, "the report")
    eventually(lambda: system.redis.publish(KEYS.applied, encode(["1-1", "banana"])) > 0, "somebody listens")
    system.redis.publish(KEYS.applied, b"\xff")
    system.pass_seconds()
    handed.join(10.0)
    assert not handed.is_alive()


def test_a_waiting_client_ignores_invalid_announcements(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    tasks = worker.take()
    channel = KEYS.done(tasks[0].id)
    results: list[object] = []
    waiting = threading.Thread(target=lambda: results.append(handle.result(timeout=30.0)), daemon=True)
    waiting.start()
    strange: list[Any] = [
        b"\xff",
        encode([[tasks[0].id, "banana"]]),
        encode([[b"abc", "success"]]),
        encode([Ended(tasks[0].id, "success", b"\xc1")]),
        encode([Ended(tasks[0].id, "success", b"\x91" * 3_000)]),
    ]
    eventually(lambda: system.redis.publish(channel, strange[0]) > 0, "somebody listens")
    for message in strange[1:]:
        system.redis.publish(channel, message)
    worker.succeed(*tasks)
    system.tick()
    waiting.join(30.0)
    assert results == [1]
