"""A Redis that was restarted or has lost something begins a generation."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from redis.exceptions import ConnectionError
from sqlalchemy import Connection

from orchestrator.domain.tasks.outcomes import Flush
from orchestrator.domain.tasks.task import Succeeded
from orchestrator.store.tasks import waiting
from orchestrator.transport.codec import (
    Applied,
    encode,
)
from tests.integration.stage import KEYS, ONE, TTL, System, raw


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def restart(system: System, *, empty: bool) -> None:
    """Have Redis begin another life, with its data or without, and another leader look at it."""
    before = system.generation
    if empty:
        system.redis.flushdb()
    system.sql("UPDATE orchestrator.cursors SET server = 'an earlier life'")
    system.lead()
    system.pass_seconds(2)
    assert system.generation != before


@pytest.mark.parametrize("empty", [False, True])
def test_a_restart_with_nothing_under_way_is_no_alarm(
    system: System, caplog: pytest.LogCaptureFixture, empty: bool
) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    worker.succeed(*worker.take())
    system.tick()
    assert handle.status() == "success"
    restart(system, empty=empty)
    assert warnings(caplog) == []


def test_a_loss_with_tasks_under_way_is_one(system: System, caplog: pytest.LogCaptureFixture) -> None:
    system.worker()
    system.dispatch(2)
    restart(system, empty=True)
    (said,) = (text for text in warnings(caplog) if "redis." in text)
    assert re.match(r"redis.data_lost generation=\S+ tasks_in_flight=2: ", said)


def test_after_flushall_only_what_nobody_has_is_run_again(system: System) -> None:
    worker = system.worker()
    system.settle()
    kept, running, lost = system.dispatch(3)
    taken = {task.id: task for task in worker.take()}
    worker.start(taken[raw(running)])
    system.tick()
    unread = system.dispatch()[0]
    worker.held = [(raw(kept), 1), (raw(running), 1)]  # the third was never delivered
    old = system.generation
    system.redis.flushall()
    system.make_old()
    system.pass_seconds()
    assert system.generation != old
    system.tick_until(lambda: system.row(lost)["attempt"] == 2 and system.row(unread)["attempt"] == 2)
    system.pass_seconds(20)
    assert [(row["attempt"], row["failures"], row["losses"]) for row in map(system.row, (kept, running))] == [
        (1, 0, 0)
    ] * 2
    worker.succeed(taken[raw(kept)], taken[raw(running)])
    worker.succeed(*worker.take())
    system.tick()
    assert system.states(kept, running, lost, unread) == ["success"] * 4
    assert [system.row(handle)["attempt"] for handle in (kept, running, lost, unread)] == [1, 1, 2, 2]


def test_what_redis_has_lost_is_run_again_in_seconds_although_looking_takes_long(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_flight = waiting.in_flight

    def slowly(connection: Connection) -> list[waiting.InFlight]:
        system.clock.now += 1.5
        return in_flight(connection)

    monkeypatch.setattr(waiting, "in_flight", slowly)
    system.worker()
    system.settle()
    (handle,) = system.dispatch()
    system.make_old()
    system.tick()
    system.redis.flushall()
    began = system.clock.now
    system.tick_until(lambda: system.row(handle)["attempt"] == 2)
    assert system.clock.now - began < 2 * TTL


def test_nothing_is_judged_before_everyone_had_time_to_be_heard(system: System) -> None:
    system.worker()
    system.settle()
    (handle,) = system.dispatch()
    system.redis.flushall()
    system.make_old()
    for _ in range(int(TTL) - 1):
        system.pass_seconds()
        assert system.row(handle)["attempt"] == 1


def test_a_report_from_before_the_flushall_counts_once_when_it_is_sent_again(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    (task,) = worker.take()
    worker.succeed(task)
    system.redis.flushall()  # the report is gone with everything else
    worker.held = [(task.id, 1)]
    system.make_old()
    system.pass_seconds(10)
    worker.succeed(task)
    worker.succeed(task)
    system.tick()
    row = system.row(handle)
    assert (row["status"], row["attempt"]) == ("success", 1)


def test_an_applied_mark_that_went_back_begins_a_generation(system: System) -> None:
    """A failover dropped the last second."""
    worker = system.worker()
    (handle,) = system.dispatch()
    before: Any = system.redis.get(KEYS.applied)
    worker.succeed(*worker.take())
    system.tick()
    old = system.generation
    system.redis.set(KEYS.applied, before or encode(Applied(old, "0-1")))
    system.pass_seconds()
    assert system.generation != old
    assert handle.status() == "success"
    (again,) = system.dispatch()
    assert [task.id for task in worker.take()] == [raw(again)]


LATE = 9_999_999_999_000
"""Milliseconds of a clock that is far ahead."""


def fail_over(system: System, applied: Any) -> None:
    """Have a replica take over that has not received the last report, and whose clock is behind that of before."""
    events = KEYS.events(system.generation)
    system.redis.delete(events)
    system.redis.xadd(events, {"d": b""})
    system.redis.xtrim(events, 0, approximate=False)
    system.redis.set(KEYS.applied, applied)
    system.redis.set(KEYS.server, "the life of another")
    system.redis.client_kill_filter(_type="normal", skipme=True)


def test_after_a_failover_nothing_is_reported_or_confirmed_before_a_generation_begins(system: System) -> None:
    """Ids of entries say nothing across it: what is written now comes before what was confirmed."""
    worker = system.worker()
    handle, other = system.dispatch(2)
    first, second = worker.take()
    worker.start(first)
    system.tick()
    before, old = system.redis.get(KEYS.applied), system.generation
    system.redis.execute_command("XSETID", KEYS.events(old), f"{LATE}-0")  # type: ignore[no-untyped-call]
    worker.succeed(first)
    system.tick()
    assert system.scheduler.term.generations.confirmed == f"{LATE}-1"

    fail_over(system, before)
    report = encode(Flush("w1", [Succeeded(second.id, second.attempt, 0.1, ONE)]))
    for _ in range(2):  # at first, each connection only learns that it is broken
        with pytest.raises(ConnectionError):
            worker._streams.flush(old, report, {})
    assert system.redis.xlen(KEYS.events(old)) == 0
    leader = system.scheduler
    for _ in range(2):
        with pytest.raises(ConnectionError):
            leader._streams.publish(old, leader._leadership.term, {}, f"{LATE}-1")
    system.tick()
    assert (system.redis.get(KEYS.applied), system.generation) == (before, old)

    system.pass_seconds()
    assert system.generation != old
    worker.succeed(second)
    system.tick()
    assert system.states(handle, other) == ["success", "success"]
    assert [system.row(each)["attempt"] for each in (handle, other)] == [1, 1]


def test_what_the_end_of_a_generation_applies_is_confirmed_to_nobody(system: System) -> None:
    """Another's lost report may have had the same id, or a lower one."""
    worker = system.worker()
    (handle,) = system.dispatch()
    (task,) = worker.take()
    worker.start(task)
    system.tick()
    before, old = system.redis.get(KEYS.applied), system.generation
    worker.succeed(task)
    system.redis.set(KEYS.server, "the life of another")
    system.pass_seconds()
    assert system.generation != old
    assert handle.status() == "success"
    assert system.redis.get(KEYS.applied) == before


def test_the_streams_of_an_old_generation_are_removed(system: System) -> None:
    worker = system.worker()
    system.dispatch(2)
    worker.take()
    old = system.generation
    system.redis.delete(KEYS.generation)
    system.pass_seconds()
    assert system.generation != old
    assert system.redis.exists(KEYS.events(old), KEYS.queue(old, "default")) == 0
    assert system.redis.exists(KEYS.events(system.generation)) == 1


def test_a_generation_begins_although_what_listeners_should_hear_fails_in_every_tick(system: System) -> None:
    """Each failure puts Redis off for a while, but not the look that finds out that it is another server."""
    system.lead()
    system.redis.set(KEYS.watched, b"1")
    system.pass_seconds(2)
    before, generations = system.generation, system.scheduler.term.generations
    generations.cursor = generations.cursor._replace(server="an earlier life")
    system.redis.set(KEYS.server, "an earlier life")
    system.scheduler.term.link.streams.close()
    system.job.enqueue()  # which listeners hear of
    for _ in range(20):
        system.pass_seconds(after=0.1)
    assert system.generation != before
