"""Schedules on a real Postgres, with a leader whose clock the test sets, and which may die at any moment."""

from __future__ import annotations

import base64
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, cast

import pytest
from sqlalchemy import Connection, Engine, text

from orchestrator import InvalidWorkflow, Orchestrator, Settings, WrongState
from orchestrator.domain.dag.definition import Concurrency, Definition, Param, Registered, Step
from orchestrator.domain.schedules.schedule import Schedule, fire_key, fires
from orchestrator.monitoring import trouble
from orchestrator.scheduler import schedules as firing
from orchestrator.scheduler.leadership import TermOver
from orchestrator.scheduler.loop import Scheduler
from orchestrator.scheduler.runs import direct
from orchestrator.scheduler.runs.creation import copy_begun
from orchestrator.scheduler.schedules import FirePace, fire_schedules
from orchestrator.scheduler.spans import LeaderSpans
from orchestrator.scheduler.tasks.creation import create_tasks
from orchestrator.scheduler.transaction import Transaction
from orchestrator.sdk.dag import definitions
from orchestrator.store import copying, insights
from orchestrator.store.runs.creation import NewRun
from orchestrator.store.schedules import backfills
from orchestrator.store.schedules import definitions as schedules
from orchestrator.store.schedules import fires as store
from orchestrator.store.sql import Prepared
from orchestrator.store.tasks import waiting
from orchestrator.trace_context import below, own_trace, run_span
from orchestrator.transport.connection import connect
from orchestrator.transport.keys import Keys
from orchestrator.transport.leader.streams import LeaderStreams
from tests.emptying import empty

START = datetime(2026, 1, 1, tzinfo=UTC)
ONE_STEP = (Step(name="only", task="job"),)


class Died(Exception):
    """The death of a leader."""


class System:
    """A leader, and an application that sets schedules; the test sets the date."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine = engine
        self.settings = settings
        self.app = Orchestrator(settings)
        self.monotonic = 1_000.0
        self.now = START
        self.schedulers: list[Scheduler] = []
        self.lead()

    @property
    def scheduler(self) -> Scheduler:
        return self.schedulers[-1]

    def lead(self) -> Scheduler:
        """Let a new scheduler take over."""
        streams = LeaderStreams(connect(self.settings.redis_url), Keys())
        scheduler = Scheduler(self.engine, streams, self.settings, monotonic=lambda: self.monotonic)
        self.sql("UPDATE orchestrator.leases SET expires_at = now() - interval '1 second'")
        assert scheduler._leadership.acquire()
        scheduler.take_over()
        self.schedulers.append(scheduler)
        return scheduler

    def close(self) -> None:
        for scheduler in self.schedulers:
            scheduler._leadership.disconnect()
        self.app.close()

    def tick(self, at: datetime | str | None = None) -> None:
        """Run a tick of the leader, at a given time."""
        if at is not None:
            self.now = at if isinstance(at, datetime) else moment(at)
        self.monotonic += 1.0
        self.scheduler._leadership._clock_offset = self.now - datetime.now(UTC)
        self.scheduler.tick()

    def sql(self, statement: str, **parameters: object) -> list[Any]:
        with self.engine.begin() as connection:
            result = connection.execute(text(statement), parameters)
            return list(result) if result.returns_rows else []

    def define(self, name: str = "nightly", **parts: Any) -> Definition:
        definition = Definition(name=name, **{"steps": ONE_STEP, **parts})
        self.app.workflows.apply(definition)
        return definition

    def put(self, schedule: Schedule, workflow: str = "nightly", *, now: datetime = START) -> None:
        with self.engine.begin() as connection:
            schedules.put(connection, workflow, schedule, now)

    def row(self, workflow: str = "nightly") -> schedules.StoredSchedule:
        with self.engine.connect() as connection:
            (found,) = schedules.find(connection, workflow)
        return found

    def runs(self, workflow: str = "nightly") -> list[Any]:
        return self.sql(
            "SELECT id, status, fire_time, key, schedule, params, version, cancelling, parked FROM orchestrator.runs"
            " WHERE workflow = :workflow ORDER BY id",
            workflow=workflow,
        )

    def fired(self, workflow: str = "nightly") -> list[str]:
        return [f"{run.fire_time.astimezone(UTC):%d %H:%M}" for run in self.runs(workflow)]

    def end_runs(self) -> None:
        """Let all running runs succeed."""
        self.sql(
            "UPDATE orchestrator.runs SET status = 'success', ended_at = now(), open = 0, success = total"
            " WHERE status = 'running'"
        )
        self.sql("DELETE FROM orchestrator.tasks")
        self.scheduler.term.dags.rolled_back()


def moment(when: str) -> datetime:
    return datetime.fromisoformat(when).replace(tzinfo=UTC)


@pytest.fixture
def system(engine: Engine, database_url: str, redis_url: str) -> Iterator[System]:
    with engine.begin() as connection:
        empty(connection)
    redis = connect(redis_url)
    redis.flushall()
    redis.close()
    system = System(engine, Settings(database_url=database_url, redis_url=redis_url, batch=1_000))
    yield system
    system.close()


# -- firing


def test_a_schedule_in_a_definition_starts_runs_of_the_newest_version(system: System) -> None:
    system.define(schedule={"cron": "0 3 * * *"})
    first = system.row().next_fire
    assert first is not None
    assert first.hour == 3
    system.define(schedule={"cron": "0 3 * * *"}, description="changed since")
    assert system.row().next_fire == first
    system.tick(first - timedelta(seconds=1))
    assert system.runs() == []
    system.tick(first + timedelta(seconds=1))
    (run,) = system.runs()
    assert (run.status, run.version, run.schedule) == ("running", 2, "nightly/default")
    assert run.fire_time == first
    row = system.row()
    assert (row.last_fire, row.last_run, row.fired) == (first, run.id, 1)
    assert row.next_fire == first + timedelta(days=1)


def test_the_fire_time_is_in_inputs_and_parameters(system: System) -> None:
    step = Step(name="only", task="job", input={"due": "${run.fire_time}", "day": "${params.day}"})
    system.define(params={"day": Param(type="date", default="today"), "at": Param()}, steps=(step,))
    params = {"at": "${run.fire_time}"}
    system.put(Schedule(cron="30 0 * * *", timezone="Asia/Tokyo", params=params))
    system.tick("2026-01-01 15:30")
    assert system.runs()[0].params == {"day": "2026-01-02", "at": "2026-01-01T15:30:00+00:00"}
    (payload,) = system.sql("SELECT payload FROM orchestrator.tasks")[0]
    assert b"2026-01-01T15:30:00+00:00" in bytes(payload)
    assert b"2026-01-02" in bytes(payload)


def test_a_schedule_fires_once_when_the_clock_goes_back(system: System) -> None:
    system.define()
    system.put(Schedule(every=600.0, overlap="allow", catch_up="all"))
    system.tick("2026-01-01 01:00")
    assert len(system.runs()) == 6
    system.tick("2026-01-01 00:20")
    system.put(Schedule(every=601.0, overlap="allow", catch_up="all"), now=START)
    system.put(Schedule(every=600.0, overlap="allow", catch_up="all"), now=START)  # all fires would come again
    system.tick("2026-01-01 01:10")
    assert len(system.runs()) == 7
    assert len({run.key for run in system.runs()}) == 7


def test_a_completed_one_time_schedule_does_not_fire_again(system: System) -> None:
    system.define()
    system.put(Schedule(at="2026-01-01T12:00:00", timezone="Europe/Berlin"))
    system.tick("2026-01-01 11:00:01")
    assert system.fired() == ["01 11:00"]
    assert system.row().next_fire is None
    system.put(Schedule(at="2026-01-01T12:00:00", timezone="Europe/Berlin"))
    system.tick("2026-01-03 00:00")
    assert len(system.runs()) == 1


def test_jitter_delays_the_run_and_not_its_fire(system: System) -> None:
    system.define()
    system.put(Schedule(cron="0 3 * * *", jitter=3600.0))
    row = system.row()
    assert row.due_at is not None
    assert row.next_fire is not None
    assert moment("2026-01-01 03:00") < row.due_at < moment("2026-01-01 04:00")
    system.tick(row.due_at - timedelta(seconds=1))
    assert system.runs() == []
    system.tick(row.due_at)
    assert system.fired() == ["01 03:00"]


# -- overlap


@pytest.mark.parametrize(
    ("overlap", "states"),
    [
        ("skip", ["running"]),
        ("allow", ["running", "running", "running"]),
        ("queue", ["running", "pending", "pending"]),
        ("cancel_previous", ["cancelled", "cancelled", "running"]),
    ],
)
def test_overlap_decides_about_fires_while_a_run_is_open(system: System, overlap: Any, states: list[str]) -> None:
    system.define()
    system.put(Schedule(every=3600.0, overlap=overlap))
    for hour in (1, 2, 3):
        system.tick(START + timedelta(hours=hour))
        system.tick()
        system.tick()
    assert [run.status for run in system.runs()] == states
    assert system.row().skipped == (2 if overlap == "skip" else 0)
    assert system.row().next_fire == START + timedelta(hours=4)


def test_a_repeated_fire_does_not_cancel_its_own_run(system: System) -> None:
    system.define()
    system.put(Schedule(every=3600.0, overlap="cancel_previous"))
    system.tick("2026-01-01 01:00")
    system.sql("UPDATE orchestrator.schedules SET next_fire = last_fire, due_at = last_fire")
    for _ in range(3):
        system.tick()
    (run,) = system.runs()
    assert (run.status, run.cancelling) == ("running", False)


def test_queued_runs_start_in_order_and_skipped_fires_resume(system: System) -> None:
    system.define()
    system.define("other")
    system.put(Schedule(every=3600.0, overlap="queue", catch_up="all"))
    system.put(Schedule(every=3600.0, overlap="skip", catch_up="all"), "other")
    system.tick("2026-01-01 03:00")
    assert system.fired() == ["01 01:00", "01 02:00", "01 03:00"]
    assert system.fired("other") == ["01 01:00"]
    assert [run.status for run in system.runs()] == ["running", "pending", "pending"]
    for _ in range(2):
        handle = system.app.run(next(run.id for run in system.runs() if run.status == "running"))
        handle.cancel()
        for _ in range(4):
            system.tick()
    assert [run.status for run in system.runs()] == ["cancelled", "cancelled", "running"]
    system.end_runs()
    system.tick("2026-01-01 04:00")
    assert system.fired("other") == ["01 01:00", "01 04:00"]


def test_overlap_queue_rejects_another_concurrency_limit(system: System) -> None:
    with pytest.raises(InvalidWorkflow, match="overlap: queue is a limit of one run"):
        system.app.workflows.apply(_written(overlap="queue", concurrency=3))
    system.app.workflows.apply(_written(overlap="queue", concurrency=1))
    system.define(concurrency=Concurrency(limit=3))
    system.put(Schedule(every=3600.0, overlap="queue"))
    system.tick("2026-01-01 01:00")
    assert system.runs() == []
    assert "remove its concurrency" in (system.row().error or "")


def _written(*, overlap: str, concurrency: int) -> Definition:
    return definitions.loads(
        f"name: nightly\nconcurrency: {concurrency}\nschedule: {{every: 1h, overlap: {overlap}}}\n"
        "tasks: {only: {task: job}}"
    )


# -- catch-up


@pytest.mark.parametrize(
    ("catch_up", "late", "expected"),
    [
        ("none", 30, ["01 05:00"]),
        ("none", 90, []),
        ("latest", 90, ["01 05:00"]),
        ("all(2)", 90, ["01 04:00", "01 05:00"]),
        ("all", 90, ["01 01:00", "01 02:00", "01 03:00", "01 04:00", "01 05:00"]),
    ],
)
def test_catch_up_decides_which_missed_fires_run(system: System, catch_up: str, late: int, expected: list[str]) -> None:
    system.define()
    system.put(Schedule(every=3600.0, overlap="allow", catch_up=catch_up))
    system.tick(moment("2026-01-01 05:00") + timedelta(seconds=late))
    assert system.fired() == expected
    assert system.row().next_fire == moment("2026-01-01 06:00")
    assert system.row().error is None


def test_catch_up_after_a_long_outage_works_in_slices(system: System) -> None:
    system.define()
    system.put(Schedule(every=60.0, overlap="allow", catch_up="all"))
    for slices in range(1, 14):
        system.tick("2026-01-02 18:00")
        assert len(system.runs()) == min(200 * slices, 2_520)
    assert len({run.fire_time for run in system.runs()}) == 2_520


# -- pausing, replacing, deleting


def test_a_pause_survives_a_new_version_and_is_not_caught_up(system: System) -> None:
    system.define(schedule={"every": 3600.0, "catch_up": "all"})
    with system.engine.begin() as connection:
        assert schedules.pause(connection, "nightly", "default")
        assert not schedules.pause(connection, "nightly", "default")
    system.define(schedule={"every": 1800.0, "catch_up": "all"})
    assert system.row().paused
    now = datetime.now(UTC)
    system.tick(now + timedelta(hours=9))
    assert system.runs() == []
    with system.engine.begin() as connection:
        assert schedules.resume(connection, system.row(), now + timedelta(hours=9))
    system.define(schedule={"every": 1800.0, "catch_up": "all"}, description="again")
    system.tick(now + timedelta(hours=9, minutes=30))
    assert len(system.runs()) == 1
    system.define(schedule={"every": 1800.0, "catch_up": "all", "paused": True})  # the file pauses it
    assert system.row().paused


def test_a_definition_replaces_only_its_own_schedule(system: System) -> None:
    system.define(schedule={"every": 3600.0, "name": "hourly"})
    system.put(Schedule(every=60.0, name="mine"))
    system.define(schedule={"every": 3600.0, "name": "renamed"})
    with system.engine.connect() as connection:
        assert [row.name for row in schedules.find(connection, "nightly")] == ["mine", "renamed"]
        assert [row.name for row in schedules.find(connection, "nightly/mine")] == ["mine"]
    system.define()
    with system.engine.begin() as connection:
        assert [row.name for row in schedules.page(connection, limit=10).schedules] == ["mine"]
    system.app._client.backend.workflows.delete("nightly")
    with system.engine.begin() as connection:
        assert schedules.page(connection, limit=10).schedules == []


def test_applying_an_old_version_again_keeps_the_newer_schedule(system: System) -> None:
    system.define(version=1, schedule={"every": 3600.0})
    system.define(version=2, schedule={"every": 60.0})
    system.define(version=1, schedule={"every": 3600.0})
    assert system.row().schedule.every == 60.0


# -- failures


def test_a_schedule_that_cannot_start_records_its_error_and_continues(system: System) -> None:
    system.define(params={"day": Param(type="integer")})
    system.put(Schedule(every=3600.0, params={"day": "${run.fire_time}"}))
    system.put(Schedule(every=3600.0), "missing")
    system.define("fine")
    system.put(Schedule(every=3600.0), "fine")
    system.tick("2026-01-01 01:00")
    assert "parameter 'day': expected a whole number" in (system.row().error or "")
    assert "There is no workflow 'missing'" in (system.row("missing").error or "")
    assert (system.fired(), system.fired("fine")) == ([], ["01 01:00"])
    with system.engine.connect() as connection:
        overview = insights.overview(connection)
    assert [failing.key for failing in overview.failing_schedules] == ["missing/default", "nightly/default"]
    system.define(params={"day": Param()})
    system.tick("2026-01-01 02:00")
    assert system.row().error is None
    assert system.fired() == ["01 02:00"]


@contextmanager
def reject_runs(system: System) -> Iterator[None]:
    """Let Postgres reject runs whose parameter `text` is x."""
    system.sql(
        "CREATE FUNCTION orchestrator.refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$BEGIN IF NEW.params ->> 'text' = 'x' THEN RAISE 'no such text'; END IF; RETURN NEW; END$$"
    )
    system.sql(
        "CREATE TRIGGER refuse BEFORE INSERT ON orchestrator.runs FOR EACH ROW EXECUTE FUNCTION orchestrator.refuse()"
    )
    try:
        yield
    finally:
        system.sql("DROP FUNCTION orchestrator.refuse CASCADE")


def test_a_run_rejected_by_postgres_stops_no_other_schedule(system: System) -> None:
    system.define(params={"text": Param(default="")})
    system.put(Schedule(every=3600.0, name="a", params={"text": "fine"}))
    system.put(Schedule(every=3600.0, name="b", params={"text": "x"}))
    system.put(Schedule(every=3600.0, name="c"))
    with reject_runs(system):
        system.tick("2026-01-01 01:00")
        system.tick()  # finds the failing schedule
    assert sorted(run.schedule for run in system.runs()) == ["nightly/a", "nightly/c"]
    with system.engine.connect() as connection:
        (refused,) = schedules.find(connection, "nightly/b")
    assert "no such text" in (refused.error or "")
    assert refused.next_fire == moment("2026-01-01 02:00")


def test_an_unreadable_schedule_stops_with_an_error(system: System) -> None:
    system.define()
    system.put(Schedule(every=3600.0))
    system.sql("""UPDATE orchestrator.schedules SET definition = '{"cron": "0 0 * * *", "timezone": "Mars/Base"}'""")
    system.tick("2026-01-01 01:00")
    assert "Its next fire cannot be computed" in (found_error(system) or "")
    system.put(Schedule(every=3600.0))
    assert system.row().next_fire == START + timedelta(hours=1)
    assert system.row().error is None


def found_error(system: System) -> Any:
    (error, next_fire), *_ = system.sql("SELECT error, next_fire FROM orchestrator.schedules")
    assert next_fire is None
    return error


def test_a_backfill_that_cannot_be_stored_ends_with_an_error(system: System) -> None:
    system.define(params={"text": Param(default="x")})
    system.put(Schedule(every=3600.0))
    backfill = system.app.schedules["nightly"].backfill("2026-01-01", "2026-01-02")
    with reject_runs(system):
        system.tick(START)
    view = backfill.progress()
    assert "no such text" in (view.error or "")
    assert view.is_over
    assert system.runs() == []


def test_a_backfill_starts_its_later_runs_with_the_current_parameters_of_its_schedule(system: System) -> None:
    system.define()
    system.put(Schedule(every=3600.0))
    backfill = system.app.schedules["nightly"].backfill("2026-01-01", "2026-01-15", concurrency=1)
    system.tick(START)
    begun = len(system.runs())
    assert 0 < begun < backfill.progress().total
    system.define(params={"day": Param(type="date")})
    system.put(Schedule(every=1800.0, params={"day": "2026-01-01"}))
    system.end_runs()
    system.sql("UPDATE orchestrator.runs SET status = 'success', ended_at = now() WHERE ended_at IS NULL")
    system.tick(START + timedelta(minutes=1))
    assert backfill.progress().error is None
    later = system.runs()[begun:]
    assert later
    assert {run.params["day"] for run in later} == {"2026-01-01"}
    hours = [run.fire_time.astimezone(UTC) for run in system.runs()]
    assert all(b - a == timedelta(hours=1) for a, b in pairwise(hours))  # its range and times stay


def test_the_status_names_a_stopped_backfill_until_it_is_cancelled_or_started_again(system: System) -> None:
    def stopped() -> list[str]:
        with system.engine.connect() as connection:
            found = trouble.of_the_system(insights.overview(connection), 3.0)
            return [problem.message for problem in found if problem.kind == "stopped backfill"]

    system.define()
    system.put(Schedule(every=3600.0))
    first = system.app.schedules["nightly"].backfill("2026-01-01", "2026-01-15")
    system.define(params={"day": Param(type="date")})
    system.tick(START)
    (message,) = stopped()
    assert message.startswith(f"Backfill {first.id} of schedule nightly/default stopped after 0 of 336 fires: ")
    system.define()
    second = system.app.schedules["nightly"].backfill("2026-01-01", "2026-01-15")
    assert stopped() == []
    system.define(params={"day": Param(type="date")})
    system.tick()
    assert len(stopped()) == 1
    second.cancel()
    assert stopped() == []
    with pytest.raises(WrongState, match="has ended"):
        second.cancel()


# -- many schedules


@pytest.mark.parametrize(("seconds", "most", "number"), [(0.01, 100, 1_200), (0.0002, 150, 1_200), (0.0, 1_000, 4_000)])
def test_thousands_of_simultaneous_fires_are_spread_over_ticks(
    system: System, monkeypatch: pytest.MonkeyPatch, seconds: float, most: int, number: int
) -> None:
    """Each tick fires as many schedules as it has time for, so that dispatch continues; every schedule fires once."""
    write = firing._write

    def slowly(*given: Any) -> None:
        system.monotonic += seconds * len(given[-1])
        write(*given)

    monkeypatch.setattr(firing, "_write", slowly)
    system.define()
    system.sql(
        "INSERT INTO orchestrator.schedules (workflow, name, definition, next_fire, due_at)"
        """ SELECT 'nightly', 's' || n, jsonb_build_object('every', 3600, 'name', 's' || n), :at, :at"""
        " FROM generate_series(1, CAST(:number AS int)) n",
        at=moment("2026-01-01 01:00"),
        number=number,
    )
    counts = [0]
    while counts[-1] < number:
        system.tick("2026-01-01 01:00")
        counts.append(system.sql("SELECT count(*) FROM orchestrator.runs")[0][0])
        assert system.scheduler.term.due_in == 0.0 or counts[-1] == number
    assert len({run.schedule for run in system.runs()}) == number
    fired = [after - before for before, after in pairwise(counts)]
    assert fired[0] == 200
    assert all(most - 2 <= one <= most for one in fired[3:-1]), fired


def put_many(system: System, number: int, **definition: Any) -> None:
    """Store schedules of one workflow that are all due at 01:00."""
    system.sql(
        "INSERT INTO orchestrator.schedules (workflow, name, definition, next_fire, due_at)"
        """ SELECT 'nightly', 's' || n, CAST(:given AS jsonb) || jsonb_build_object('name', 's' || n), :at, :at"""
        " FROM generate_series(1, :number) n",
        given=json.dumps({"every": 3600} | definition),
        number=number,
        at=moment("2026-01-01 01:00"),
    )


def test_hundreds_of_one_task_runs_begin_in_few_statements(system: System) -> None:
    """No statement reads or changes a run that the same tick has created."""
    system.define(params={"day": Param()}, steps=(Step(name="only", task="job", input={"day": "${params.day}"}),))
    put_many(system, 200, params={"day": "${run.fire_time}"})
    with statements() as sent:
        system.tick("2026-01-01 01:00")
    counts = Counter(sent)
    assert counts["runs.copy"] == counts["enqueue.copy"] == counts["fires.advance"] == 1
    assert not counts.keys() & {"runs.create", "enqueue.create_tasks", "runs.begin", "runs.settle", "dags.load"}
    assert counts.total() < 25
    tasks = system.sql("SELECT run_id, step, name, status, payload FROM orchestrator.tasks")
    assert len({task.run_id for task in tasks}) == 200
    assert {(task.step, task.name, task.status) for task in tasks} == {("only", "job", "pending")}
    assert b"2026-01-01T01:00:00+00:00" in bytes(tasks[0].payload)
    found = system.sql("SELECT DISTINCT status, total, open, started_at IS NULL FROM orchestrator.runs")
    assert [tuple(row) for row in found] == [("running", 1, 1, False)]


@contextmanager
def statements() -> Iterator[list[str]]:
    """Record the names of the statements that the leader sends."""
    names: list[str] = []
    text_of, copy = Prepared._text, copying.copy

    def record(statement: Prepared[Any], *given: Any) -> str:
        names.append(statement.name)
        return text_of(statement, *given)

    def record_copy(connection: Connection, sql: str, texts: Iterable[str]) -> None:
        names.append(sql.split()[2])
        copy(connection, sql, texts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prepared, "_text", record)
        patch.setattr(copying, "copy", record_copy)
        yield names


def test_an_existing_run_does_not_block_other_fires(system: System) -> None:
    """If one of the runs exists, Postgres rejects the whole COPY."""
    system.define()
    put_many(system, 100, overlap="allow")
    system.tick("2026-01-01 01:00")
    system.sql("DELETE FROM orchestrator.runs WHERE schedule <> 'nightly/s7'")
    system.sql("DELETE FROM orchestrator.tasks")
    system.sql("UPDATE orchestrator.schedules SET next_fire = :at, due_at = :at", at=moment("2026-01-01 01:00"))
    with statements() as sent:
        system.tick("2026-01-01 01:00")
    assert {"runs.copy", "runs.create"} <= set(sent)
    assert Counter(run.schedule for run in system.runs()) == {f"nightly/s{n}": 1 for n in range(1, 101)}
    tasks = system.sql("SELECT run_id FROM orchestrator.tasks")
    assert {task.run_id for task in tasks} == {run.id for run in system.runs() if run.schedule != "nightly/s7"}
    assert system.sql("SELECT DISTINCT next_fire FROM orchestrator.schedules") == [(moment("2026-01-01 02:00"),)]


@pytest.mark.parametrize("settings", [{}, {"data_keys": f"k:{base64.b64encode(bytes(32)).decode()}"}])
def test_copied_and_inserted_runs_have_the_same_columns(
    system: System, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """Many runs are copied, a few are inserted; only ids, names and encrypted values differ."""
    system.settings = replace(system.settings, **settings)
    system.lead()
    registered = Registered(delay=5.0, expires=60.0, queue="own", priority=3)
    step = Step(name="only", task="job", input={"text": "${params.text}"}, registered=registered, timeout=9.0)
    params = {"text": Param(default='a\tb\\c\nd "e" é')}
    system.define(params=params, steps=(step,), tags=("one", 'a "b", {c}\\'), timeout=30.0)
    put_many(system, 25)
    written = []
    for at, many in (("2026-01-01 01:00", 20), ("2026-01-01 02:00", 1_000)):
        monkeypatch.setattr(direct, "_MIN_COPIED", many)
        system.tick(at)
        runs = system.sql("SELECT to_jsonb(r) AS row FROM orchestrator.runs r ORDER BY schedule")
        tasks = system.sql("SELECT to_jsonb(t) AS row FROM orchestrator.tasks t ORDER BY id")
        assert ("é" in str(runs[0].row["params"])) is (not settings)
        written.append([_alike(moment(at), [row.row for row in rows], bool(settings)) for rows in (runs, tasks)])
        system.sql("DELETE FROM orchestrator.runs")
        system.sql("DELETE FROM orchestrator.tasks")
    assert written[0] == written[1]
    assert [len(rows) for rows in written[0]] == [25, 25]


def test_tasks_of_traced_runs_are_children_of_the_runs_spans(system: System) -> None:
    class Rooting:
        def rooted(self, run: NewRun) -> NewRun:
            return run._replace(trace=f"00-{own_trace(run.id)}-{run.id[:8].hex()}-01")

    system.scheduler.term._spans = cast(LeaderSpans, Rooting())
    system.define()
    put_many(system, 25)
    with statements() as sent:
        system.tick("2026-01-01 01:00")
    assert "runs.copy" in sent
    traces = {run.id: run.trace for run in system.sql("SELECT id, trace FROM orchestrator.runs")}
    tasks = system.sql("SELECT run_id, trace FROM orchestrator.tasks")
    assert len(tasks) == 25
    for task in tasks:
        assert task.trace == below(traces[task.run_id], run_span(task.run_id.bytes))


def _alike(at: datetime, rows: Sequence[dict[str, Any]], are_sealed: bool) -> list[dict[str, Any]]:
    """Return comparable rows: values that always differ become whether they are set, and pairs of times their
    difference."""
    differing = {"id", "seq", "run_id", "key", "fire_time", "deadline"}
    differing |= {"payload", "params", "state"} if are_sealed else set()
    between = (("deadline", "started_at"), ("expires_at", "wake_at"))
    return [
        {name: value is not None if name in differing or name.endswith("_at") else value for name, value in row.items()}
        | {late: _time(row[late]) - _time(row[early]) for late, early in between if row.get(late)}
        | {"fire_time": _time(row["fire_time"]) - at if "fire_time" in row else None}
        for row in rows
    ]


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def test_enqueued_tasks_do_not_wait_for_many_fires(system: System) -> None:
    """After a tick that fires, the next tick fires nothing if tasks are waiting; then schedules go on."""
    job = system.app.task(name="job")(print)
    system.define()
    put_many(system, 4_000)
    counts = [0]
    for number in range(5):
        if number != 4:
            job.enqueue()
        system.tick("2026-01-01 01:00")
        counts.append(system.sql("SELECT count(*) FROM orchestrator.runs")[0][0])
    assert counts == [0, 200, 200, 600, 600, 1_400]


@pytest.mark.parametrize("dies_at", ["runs", "tasks", "commit"])
def test_a_leader_that_dies_within_a_batch_neither_loses_nor_doubles_fires(
    system: System, monkeypatch: pytest.MonkeyPatch, dies_at: str
) -> None:
    """It dies after it wrote the runs, or runs and tasks, or after its commit but before it has announced them."""
    system.define()
    put_many(system, 600)
    alive = 0

    def dying(original: Any, after: bool) -> Any:
        def die(*given: Any, **options: Any) -> Any:
            nonlocal alive
            result = original(*given, **options) if after else None
            alive -= 1
            if alive < 0:
                raise Died
            return result if after else original(*given, **options)

        return die

    if dies_at == "runs":
        monkeypatch.setattr(direct, "copy_begun", dying(copy_begun, True))
    elif dies_at == "tasks":
        monkeypatch.setattr(direct, "create_tasks", dying(create_tasks, True))
    else:
        link = system.scheduler.term.link
        monkeypatch.setattr(link, "publish", dying(link.publish, False))
    with suppress(Died):  # the tick treats this exception as its own failure
        system.tick("2026-01-01 01:00")
    written = system.sql("SELECT count(*) FROM orchestrator.runs")[0][0]
    assert written == (200 if dies_at == "commit" else 0)
    monkeypatch.undo()
    deposed = system.scheduler
    system.lead()
    deposed._leadership.disconnect()
    for _ in range(3):
        system.tick("2026-01-01 01:00")
    fired = Counter(run.schedule for run in system.runs())
    assert len(fired) == 600
    assert set(fired.values()) == {1}
    tasks = system.sql("SELECT run_id FROM orchestrator.tasks")
    assert {task.run_id for task in tasks} == {run.id for run in system.runs()}
    assert len(tasks) == 600


def test_due_schedules_and_open_runs_are_found_by_index(system: System) -> None:
    """Schedules that are not due, and runs that have ended, cost nothing."""
    system.sql(
        "INSERT INTO orchestrator.schedules (workflow, name, definition, next_fire, due_at)"
        " SELECT 'w' || n, 'default', '{}', :at, :at FROM generate_series(1, 5000) n",
        at=moment("2027-01-01 01:00"),
    )
    system.sql(
        "INSERT INTO orchestrator.runs (id, name, status, total, open, ended_at, schedule)"
        " SELECT gen_random_uuid(), 'w', 'success', 0, 0, now(), 'w' || n % 10 || '/default'"
        " FROM generate_series(1, 5000) n"
    )
    due = plan(system, store._DUE, now=system.now, limit=200)
    assert "schedules_due" in due
    assert "schedules_due" in plan(system, waiting._PROBE)
    assert "runs_of_schedule" in plan(system, store._OPEN, keys=["w1/default", "w2/default"])
    assert "backfills_open" in plan(system, backfills._OPEN, limit=20)


def plan(system: System, statement: Prepared[Any], **values: Any) -> str:
    with system.scheduler._leadership.reading() as connection:
        statement(connection, **values)
        rows = connection.exec_driver_sql(f"EXPLAIN {statement._execute}", statement._encoded((), values))
        lines = "\n".join(row[0] for row in rows)
    assert "Seq Scan" not in lines
    return lines


# -- a whole year

YEAR_ZONES = [
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "America/St_Johns",
    "Australia/Lord_Howe",
    "Pacific/Chatham",
    "Africa/Casablanca",
    "Asia/Kathmandu",
    "Antarctica/Troll",
    "Asia/Tokyo",
]


def year_schedules(zone: str) -> Sequence[Schedule]:
    options: dict[str, Any] = {"timezone": zone, "overlap": "allow", "catch_up": "all"}
    return [
        Schedule(name="daily", cron="30 2 * * *", **options),
        Schedule(name="elapsed", cron="15 */12 * * *", jitter=900.0, **options),
        Schedule(name="fridays", cron="0 9 * * FRI#2", **options),
        Schedule(name="months", cron="0 0 L * *", **options),
        Schedule(name="interval", every=86_400.0, **options),
    ]


@pytest.mark.long
def test_a_year_of_fires_in_ten_time_zones_survives_dying_leaders(system: System) -> None:
    """No fire is lost or doubled, although leaders die before their commit and clocks go back and forth."""
    chance = random.Random(7)
    for zone in YEAR_ZONES:
        system.define(zone)
        for schedule in year_schedules(zone):
            system.put(schedule, zone)
    end = START + timedelta(days=365)
    now = START
    deaths = 0
    while now < end + timedelta(days=1):
        now += timedelta(hours=chance.choice([1, 8, 30, 60]), seconds=chance.randrange(3_600))
        seen = now - timedelta(hours=chance.choice([0, 0, 0, 5]))  # a clock that was set back
        try:
            fire_once(system, seen, dies=chance.random() < 0.2)
        except Died:
            deaths += 1
            deposed = system.scheduler
            system.lead()
            with pytest.raises(TermOver), deposed._leadership.writing(0.0):
                pass  # the deposed leader cannot write
            deposed._leadership.disconnect()
    fire_once(system, now + timedelta(hours=1), dies=False)
    assert deaths > 20
    keys = Counter(row.key for row in system.sql("SELECT key FROM orchestrator.runs WHERE fire_time <= :end", end=end))
    expected = {
        fire_key(f"{zone}/{schedule.name}", fire)
        for zone in YEAR_ZONES
        for schedule in year_schedules(zone)
        for fire in fires(schedule, START + timedelta(microseconds=1), end + timedelta(microseconds=1))
    }
    assert len(expected) > 14_000
    assert set(keys) == expected
    assert max(keys.values()) == 1


def fire_once(system: System, now: datetime, *, dies: bool) -> None:
    """Fire what is due at a time, in transactions like those of a tick; the leader may die before a commit."""
    scheduler = system.scheduler
    for number in range(20):
        with scheduler._leadership.writing(0.0) as writing:
            fire_schedules(Transaction(writing.connection, now), scheduler.term.cancels, FirePace(), 1_000)
            more = writing.connection.execute(text("SELECT min(due_at) FROM orchestrator.schedules")).scalar_one()
            if dies and number == 0:
                raise Died
        if more > now:
            return
    raise AssertionError("there is always more")
