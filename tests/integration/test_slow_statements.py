"""A statement that takes too long stops only the part of the tick that it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from uuid import UUID

import pytest
from sqlalchemy import Engine

from orchestrator import Handle, Settings
from orchestrator.scheduler import process
from orchestrator.scheduler.loop import Scheduler
from orchestrator.scheduler.pruning import Pruner
from orchestrator.scheduler.upkeep import Janitor, LogKeeping, PayloadCollection
from orchestrator.store import throughput
from orchestrator.store.limits import lanes
from orchestrator.store.sql import Prepared, Row
from orchestrator.transport.connection import connect
from orchestrator.transport.inspection import check_health
from orchestrator.transport.leader.streams import LeaderStreams
from tests.integration.stage import KEYS, System
from tests.waiting import eventually

LEASE = 2.0
"""Seconds. Postgres cancels a statement after 0.4 s, and one of a part that was late before after 0.1 s."""
KEYED = 300
Lead = Callable[[], Scheduler]


@pytest.fixture
def slow_statements() -> list[str]:
    """The names of the statements that timed out."""
    return []


@pytest.fixture
def lead(engine: Engine, system: System, slow_statements: list[str]) -> Iterator[Lead]:
    """Return a function that starts a leader with a running clock; each call starts a new one."""
    with closing(connect(system.settings.redis_url)) as redis, ExitStack() as stack:
        settings = Settings(**{**vars(system.settings), "lease": LEASE})

        def take_over() -> Scheduler:
            scheduler = Scheduler(engine, LeaderStreams(redis, KEYS), settings, on_timeout=slow_statements.append)
            stack.callback(scheduler._leadership.disconnect)
            system.expire_lease()
            assert scheduler._leadership.acquire()
            scheduler.take_over()
            return scheduler

        yield take_over


@pytest.fixture
def seconds_a_key(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """Let Postgres spend this many seconds on each key that the leader reads."""
    seconds: float = request.param
    head = "LIMIT %(limit)s) AS head"
    slowly = f"{head} CROSS JOIN LATERAL (SELECT pg_sleep({seconds}) AS slept WHERE head.lane IS NOT NULL) AS slow"
    sql = lanes._LANES.sql.replace(head, slowly).replace("lanes.after", f"lanes.after in {1_000 * seconds:.0f}")
    monkeypatch.setattr(lanes, "_LANES", Prepared[Row](sql))
    return seconds


def enqueue_keyed(system: System) -> None:
    system.sql(f"""
        INSERT INTO orchestrator.tasks (id, name, queue, payload, lane)
        SELECT gen_random_uuid(), 'job', 'default', '', 'job|' || n FROM generate_series(1, {KEYED}) AS n
    """)


def dispatched(system: System) -> int:
    rows = system.sql("SELECT count(*) AS n FROM orchestrator.tasks WHERE status = 'dispatched' AND lane IS NOT NULL")
    return int(rows[0]["n"])


@pytest.mark.parametrize("seconds_a_key", [0.006], indirect=True)
def test_a_part_that_timed_out_does_less_work_and_then_more_again(
    system: System, lead: Lead, seconds_a_key: float, slow_statements: list[str]
) -> None:
    """Every tick used to time out, of this leader and of the next one."""
    enqueue_keyed(system)
    system.worker(slots=KEYED)
    leader = lead()
    leader.tick()
    assert slow_statements == ["lanes.after in 6"]
    leader.tick()
    assert "lanes.after in 6" in (check_health(system.redis, KEYS).complaint or ""), "status names the statement"

    def are_all_dispatched() -> bool:
        leader.tick()
        return dispatched(system) == KEYED

    eventually(are_all_dispatched, "all are handed out")
    assert leader._leadership.term == 2, "by the same leader, in one term"


def test_a_success_of_a_task_that_a_person_has_locked_delays_the_others_once(
    system: System, lead: Lead, engine: Engine
) -> None:
    worker = system.worker(slots=10)
    locked, free = system.job.enqueue(1), system.job.enqueue(2)
    leader = lead()
    leader.tick()
    dispatches = {dispatch.id: dispatch for dispatch in worker.take()}
    with engine.connect() as person:
        person.exec_driver_sql(f"SELECT FROM orchestrator.tasks WHERE id = '{locked.id}' FOR UPDATE")
        for task in (locked, free):
            worker.succeed(dispatches[UUID(task.id).bytes])

        def is_over() -> bool:
            leader.tick()
            return free.status() == "success"

        eventually(is_over, "the other one has ended")
        assert locked.status() == "dispatched"
        person.rollback()

    def are_over() -> bool:
        leader.tick()
        return locked.status() == "success"

    eventually(are_over, "both have ended")
    assert leader._leadership.term == 2, "by the same leader, in one term"


@pytest.mark.parametrize("seconds_a_key", [1.0], indirect=True)
def test_a_part_that_always_times_out_does_not_block_other_queues(
    system: System, lead: Lead, seconds_a_key: float, slow_statements: list[str]
) -> None:
    """No queue used to move."""
    enqueue_keyed(system)
    system.worker(slots=10)
    system.worker("w2", queue="other")
    leader = lead()
    for number in range(5):
        task = system.job.options(queue="other").enqueue(number)

        def is_dispatched(task: Handle[int] = task) -> bool:
            leader.tick()
            return system.row(task)["status"] == "dispatched"

        eventually(is_dispatched, "it is handed out")
    assert leader._leadership.term == 2
    assert 1 < len(slow_statements) < 5, "it is tried now and then"
    assert dispatched(system) == 0


@pytest.mark.parametrize("seconds_a_key", [0.006], indirect=True)
@pytest.mark.usefixtures("seconds_a_key")
def test_every_leader_logs_the_slow_statement(system: System, lead: Lead, caplog: pytest.LogCaptureFixture) -> None:
    """A new leader does not know what the previous one has logged."""
    enqueue_keyed(system)
    system.worker(slots=KEYED)
    for _ in range(2):
        caplog.clear()
        lead().tick()
        assert "statement=lanes.after in 6: it took too long; the next ticks do less work" in caplog.text


@pytest.mark.parametrize("seconds_a_key", [0.006], indirect=True)
@pytest.mark.usefixtures("seconds_a_key")
def test_the_janitor_analyzes_the_tables_of_a_slow_statement(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    enqueue_keyed(system)
    system.worker(slots=KEYED)
    analysed: list[str] = []

    def lead_once(scheduler: Scheduler) -> None:
        system.expire_lease()
        assert scheduler._leadership.acquire()
        scheduler.take_over()
        scheduler.tick()
        scheduler._leadership.disconnect()

    monkeypatch.setattr(Scheduler, "run", lead_once)
    monkeypatch.setattr(Janitor, "analyse", lambda _, statement: analysed.append(statement))
    for part in (Janitor, Pruner, PayloadCollection, LogKeeping):
        monkeypatch.setattr(part, "start", lambda _: None)
    monkeypatch.setattr(process, "listen", lambda *_: None)
    monkeypatch.setattr(process, "_stop_on_signal", lambda *_: None)
    monkeypatch.setattr(process, "_relax_garbage_collector", lambda: None)
    assert process.run_scheduler(Settings(**{**vars(system.settings), "lease": LEASE})) == 0
    assert analysed == ["lanes.after in 6"]


def test_outdated_statistics_are_refreshed(engine: Engine, system: System) -> None:
    """A table was analyzed while it was nearly empty, and has filled since; or one of its statements timed out."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("ALTER TABLE orchestrator.timers SET (autovacuum_enabled = off)")
        connection.exec_driver_sql("ANALYZE orchestrator.timers")
        connection.exec_driver_sql(
            "INSERT INTO orchestrator.timers (run_id, id, due) "
            "SELECT gen_random_uuid(), gen_random_uuid(), now() FROM generate_series(1, 6000)"
        )

        def count_in_statistics() -> int:
            return int(
                connection.exec_driver_sql(
                    "SELECT reltuples FROM pg_class WHERE oid = 'orchestrator.timers'::regclass"
                ).scalar_one()
            )

        eventually(lambda: "timers" in throughput.misleading(connection), "Postgres has counted what was inserted")
        janitor = Janitor(engine.execution_options(isolation_level="AUTOCOMMIT"))
        janitor.start()
        eventually(lambda: count_in_statistics() == 6000, "statistics are right")
        bounds = connection.exec_driver_sql(
            "SELECT cardinality(histogram_bounds::text::uuid[]) FROM pg_stats "
            "WHERE (schemaname, tablename, attname) = ('orchestrator', 'timers', 'id')"
        ).scalar_one()
        assert bounds == 11, "a small sample is enough, and takes Postgres a tenth of the time"
        assert connection.exec_driver_sql("SHOW default_statistics_target").scalar_one() == "100"
        connection.exec_driver_sql("DELETE FROM orchestrator.timers WHERE ctid < '(1,1)'")
        janitor.analyse("expectations.fire_timers")
        eventually(lambda: count_in_statistics() < 6000, "they are right again")
