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
    """Restart Redis, with or without its data, and start another leader."""
    before = system.generation
    if empty:
        system.redis.flushdb()
    system.sql("UPDATE orchestrator.cursors SET server = 'an earlier life'")
    system.lead()
    system.pass_seconds(2)
    assert system.generation != before


@pytest.mark.parametrize("empty", [False, True])
def test_a_restart_without_tasks_in_flight_logs_no_warning(
    system: System, caplog: pytest.LogCaptureFixture, empty: bool
) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    worker.succeed(*worker.take())
    system.tick()
    assert handle.status() == "success"
    restart(system, empty=empty)
    assert warnings(caplog) == []


def test_data_loss_with_tasks_in_flight_logs_a_warning(system: System, caplog: pytest.LogCaptureFixture) -> None:
    system.worker()
    system.dispatch(2)
    restart(system, empty=True)
    (said,) = (text for text in warnings(caplog) if "redis." in text)
    assert re.match(r"redis.data_lost generation=\S+ tasks_in_flight=2: ", said)


def test_after_flushall_only_tasks_without_a_worker_run_again(system: System) -> None:
    worker = system.worker()
    system.settle()
    kept, running, lost = system.dispatch(3)
    taken = {task.id: task for task in worker.take()}
    worker.start(taken[raw(running)])
    system.tick()
    unread = system.dispatch()[0]
    worker.held = [(raw(kept), 1), (raw(running), 1)]  # the third task was never delivered
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


def test_lost_tasks_run_again_soon_despite_slow_scans(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_no_task_is_declared_lost_before_every_worker_could_report(system: System) -> None:
    system.worker()
    system.settle()
    (handle,) = system.dispatch()
    system.redis.flushall()
    system.make_old()
    for _ in range(int(TTL) - 1):
        system.pass_seconds()
        assert system.row(handle)["attempt"] == 1


def test_a_report_sent_again_after_flushall_counts_once(system: System) -> None:
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


def test_a_reverted_applied_mark_begins_a_generation(system: System) -> None:
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
"""A stream timestamp in milliseconds, from a clock that is far ahead."""


def fail_over(system: System, applied: Any) -> None:
    """Fail Redis over to a replica that missed the last report and whose clock is behind."""
    events = KEYS.events(system.generation)
    system.redis.delete(events)
    system.redis.xadd(events, {"d": b""})
    system.redis.xtrim(events, 0, approximate=False)
    system.redis.set(KEYS.applied, applied)
    system.redis.set(KEYS.server, "the life of another")
    system.redis.client_kill_filter(_type="normal", skipme=True)


def test_after_a_failover_nothing_is_confirmed_before_a_new_generation(system: System) -> None:
    """Stream ids are not comparable across a failover: new entries may sort before confirmed ones."""
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
    for _ in range(2):  # the first call only finds the connection broken
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


def test_reports_applied_at_the_end_of_a_generation_are_not_confirmed(system: System) -> None:
    """Another worker's lost report may have had the same or a lower id."""
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


def test_a_generation_begins_although_publishing_to_listeners_fails(system: System) -> None:
    """Each failure delays the use of Redis, but not the check that detects a different server."""
    system.lead()
    system.redis.set(KEYS.watched, b"1")
    system.pass_seconds(2)
    before, generations = system.generation, system.scheduler.term.generations
    generations.cursor = generations.cursor._replace(server="an earlier life")
    system.redis.set(KEYS.server, "an earlier life")
    system.scheduler.term.link.streams.close()
    system.job.enqueue()  # published to listeners
    for _ in range(20):
        system.pass_seconds(after=0.1)
    assert system.generation != before
