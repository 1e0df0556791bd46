"""Ended tasks of the last hour: the leader writes counts every ten seconds, and readers see them at once."""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine

from orchestrator.api.context import Api
from orchestrator.api.routes.system import read_minutes
from orchestrator.domain.access import KeyScope
from orchestrator.store import insights, retention, throughput
from orchestrator.store.throughput import Throughput
from tests.integration.stage import System
from tests.integration.test_rolled_back import rolled_back


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each tick a bucket of its own."""
    monkeypatch.setattr(throughput, "BUCKET", timedelta(milliseconds=1))


def written(engine: Engine) -> list[Throughput]:
    with engine.connect() as connection:
        return throughput.read(connection, datetime.now(UTC) - timedelta(hours=1))


def test_buckets_start_every_ten_seconds() -> None:
    assert throughput.bucket_of(datetime(2026, 1, 1, 0, 0, 19, 999_999, UTC)) == datetime(2026, 1, 1, 0, 0, 10, 0, UTC)


@pytest.mark.usefixtures("short")
def test_ended_tasks_are_counted_at_once_and_written_once(system: System, engine: Engine) -> None:
    worker = system.worker(slots=10)
    system.settle()
    system.dispatch(6, retries=3)
    one, two, bad, *rest = worker.take()
    worker.succeed(one, two)
    worker.fail(bad)
    system.tick()
    with engine.connect() as connection:
        assert insights.overview(connection).ended_last_minute["success"] == 2, "before it is written"
    with closing(Api(system.settings)) as api:
        shown = [read_minutes(api, KeyScope()), read_minutes(api, KeyScope(), "default")]
        shown.append(read_minutes(api, KeyScope(), each=True))
    assert [sum(minute.success for minute in minutes) for minutes in shown] == [2, 2, 2], "the dashboard says the same"
    worker.succeed(*rest)
    system.tick(3)
    rows = [row for row in written(engine) if row.queue == "default"]
    assert sum(row.success for row in rows) == 5
    assert sum(row.retried for row in rows) == 1
    assert sum(row.dispatched for row in rows) >= 6
    assert sum(sum(row.runs) for row in rows) == 6
    assert sum(sum(row.waits) for row in rows) >= 6
    with engine.connect() as connection:
        found = insights.overview(connection)
        assert (found.ended_last_minute["success"], found.ended_last_hour["success"]) == (5, 5), "and none twice"


def test_the_queue_latency_counts_only_first_attempts(system: System) -> None:
    worker = system.worker()
    system.settle()
    (handle,) = system.dispatch()
    worker.fail(*worker.take(), retryable=False)
    system.tick()
    (waits,) = system.scheduler.meter.waits.values()
    before = sum(waits.counts)
    handle.retry()
    system.tick(2)
    assert [task.attempt for task in worker.take()] == [2]
    assert sum(waits.counts) == before == 1, "a retry by hand does not wait since the enqueue"


@pytest.mark.usefixtures("short")
def test_rolled_back_counts_are_written_by_the_next_tick(
    system: System, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = system.worker()
    system.settle()
    system.dispatch()
    worker.succeed(*worker.take())
    system.tick()
    with rolled_back(monkeypatch):
        system.tick()
    assert sum(row.success for row in written(engine)) == 0
    system.tick(2)
    assert sum(row.success for row in written(engine)) == 1


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("killed", [1, 2], ids=["once", "twice in a row"])
def test_unwritten_counts_of_a_dead_leader_are_added_by_the_next(
    system: System, engine: Engine, monkeypatch: pytest.MonkeyPatch, killed: int
) -> None:
    worker = system.worker(slots=20)
    system.settle()
    system.dispatch(8)
    first, second, *rest = worker.take()
    worker.succeed(first)
    system.tick(2)
    assert sum(row.success for row in written(engine)) == 1
    worker.succeed(second)
    worker.fail(rest.pop(), retryable=False)
    system.tick()  # counted, but not written
    for _ in range(killed):
        system.expire_lease()
        system.lead()
        with rolled_back(monkeypatch):
            system.tick()  # counted as well, but only once
        worker.succeed(rest.pop())
        system.tick()
        with engine.connect() as connection:
            assert insights.overview(connection).ended_last_hour["success"] == 7 - len(rest)
    worker.succeed(*rest)
    system.tick(2)
    rows = written(engine)
    assert (sum(row.success for row in rows), sum(row.failed for row in rows)) == (7, 1)
    with engine.connect() as connection:
        found = insights.overview(connection).ended_last_hour
    assert (found["success"], found["failed"]) == (7, 1)


def test_an_idle_leader_writes_no_counts(system: System, engine: Engine) -> None:
    system.settle()
    system.tick(3)
    assert written(engine) == []


def test_old_counts_are_deleted(system: System, engine: Engine) -> None:
    row = {"queue": "a", "waits": [1], "runs": [2]} | dict.fromkeys(
        ("success", "failed", "cancelled", "skipped", "dispatched", "retried", "lost"), 1
    )
    now = datetime.now(UTC)
    with engine.begin() as connection:
        for age in (timedelta(hours=3), timedelta(minutes=3)):
            throughput.add(connection, 1, now - age, [row])
        assert retention.forget_expired(connection, "throughput", 100) == 1
        assert retention.forget_expired(connection, "throughput", 100) == 0
        found = insights.overview(connection)
        assert (found.ended_last_minute["failed"], found.ended_last_hour["failed"]) == (0, 1)
        connection.rollback()


def test_past_minutes_are_read_once(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    api, reads = Api(system.settings), []
    read = throughput.minutes
    monkeypatch.setattr(throughput, "minutes", lambda *given: (reads.append(given[-1]), read(*given))[1])
    try:
        for _ in range(3):
            read_minutes(api, KeyScope())
            api.recent.forget()
        over = [until for until in reads if until is not None]
        assert len(over) == len(set(over)), "again only when the minute has passed"
    finally:
        api.close()


def test_an_hour_is_complete_although_most_minutes_are_cached(system: System, engine: Engine) -> None:
    api = Api(system.settings)

    def add(minutes: int, success: int) -> None:
        at = f"now() - interval '{minutes} minutes', 'q{success}', 1"
        numbers = f"{success}, 0, 0, 0, {success}, 0, 0, ARRAY[{success}], ARRAY[{success}]"
        system.sql(f"INSERT INTO orchestrator.throughput SELECT {at}, {numbers}")

    def read() -> tuple[int, int]:
        found = read_minutes(api, KeyScope())
        return sum(one.success for one in found), sum(sum(one.waits) for one in found)

    try:
        add(30, 4)
        add(1, 20)
        assert read() == (24, 24)
        add(0, 300)
        assert read() == (324, 324)
        assert sum(one.success for one in read_minutes(api, KeyScope(), each=True)) == 324
    finally:
        api.close()
