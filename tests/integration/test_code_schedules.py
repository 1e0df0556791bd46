"""Schedules that start workflows as code."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import pytest

from orchestrator import InvalidWorkflow, WorkflowContext, WorkflowHandle
from orchestrator.domain.code.activation import Activated
from orchestrator.domain.code.commands import CancelRun, Command, CompleteRun, ContinueRun
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.sdk.values.payload import decode_call
from tests.integration.code_stage import activation
from tests.integration.stage import ONE, System, Worker

MINUTE = 60.0


@pytest.fixture
def nightly(system: System) -> CodeWorkflow[..., Any]:
    @system.app.workflow(name="nightly", version=3, timeout=1000, queue="nights")
    async def nightly(ctx: WorkflowContext, due: str, *, number: int = 0) -> int: ...

    return nightly


@pytest.fixture
def worker(system: System) -> Worker:
    worker = system.worker(knows=("nightly",), queue="nights")
    system.pass_seconds()
    return worker


def runs(system: System) -> list[dict[str, Any]]:
    return [dict(row) for row in system.sql("SELECT * FROM orchestrator.runs ORDER BY fire_time, id")]


def end(system: System, worker: Worker, command: Command) -> None:
    system.pass_seconds()
    turns = [task for task in worker.take() if task.is_turn_task]
    assert turns
    worker.report(*(Activated(one.id, one.attempt, 0.1, through=1, commands=[command]) for one in turns))
    system.pass_seconds()


def pass_minutes(system: System, minutes: int) -> None:
    system.lead(offset=minutes * MINUTE)
    system.pass_seconds()


def test_a_schedule_declared_in_code_starts_a_run_per_fire(
    system: System, nightly: CodeWorkflow[..., Any], worker: Worker
) -> None:
    params = {"due": "${run.fire_time}", "number": 7}
    assert system.app.schedule(every="60s", overlap="allow", params=params)(nightly) is nightly
    for _ in range(2):
        assert system.app.schedules.apply() == ["nightly"]
    for _ in range(2):
        pass_minutes(system, 1)
    (run,) = runs(system)
    assert (run["workflow"], run["version"], run["schedule"], run["code"]) == ("nightly", 3, "nightly/default", True)
    assert run["deadline"] is not None
    (turn,) = worker.take()
    started: Any = activation(turn).events[0].what
    arguments, keywords = msgspec.msgpack.decode(started.payload)
    assert (arguments, keywords["number"]) == ([], 7)
    assert keywords["due"] == run["fire_time"].isoformat()
    stored = system.app.schedules["nightly"].status()
    assert (stored.fired, str(stored.last_run), stored.error) == (1, str(run["id"]), None)
    pass_minutes(system, 2)
    assert len(runs(system)) == 2


def test_a_run_that_continues_counts_as_open(system: System, nightly: CodeWorkflow[..., Any], worker: Worker) -> None:
    system.app.schedules.set("nightly", every="60s", params={"due": "x"})
    pass_minutes(system, 1)
    end(system, worker, ContinueRun(b"\x92\x90\x81\xa3due\xa1x"))
    pass_minutes(system, 2)
    assert system.app.schedules["nightly"].status().skipped == 1
    end(system, worker, CompleteRun(ONE))
    pass_minutes(system, 3)
    assert system.app.schedules["nightly"].status().fired == 2


def test_overlap_cancel_previous_asks_the_open_run_to_cancel(
    system: System, nightly: CodeWorkflow[..., Any], worker: Worker
) -> None:
    system.app.schedules.set("nightly", every="60s", overlap="cancel_previous", params={"due": "x"})
    for minute in (1, 2):
        pass_minutes(system, minute)
    first, second = runs(system)
    kinds = [
        row["kind"]
        for row in system.sql(
            "SELECT kind FROM orchestrator.histories WHERE run_id = :id ORDER BY number", id=first["id"]
        )
    ]
    assert kinds == ["run_started", "run_cancel_requested"]
    end(system, worker, CancelRun())
    assert {run["status"] for run in runs(system)} <= {"cancelled", "running"}
    assert second["status"] == "running"


def test_triggering_a_schedule_starts_a_run_at_once(
    system: System, nightly: CodeWorkflow[..., Any], worker: Worker
) -> None:
    system.app.schedules.set("nightly", "hourly", every="1h", params={"due": "x"})
    handle = system.app.schedules["nightly/hourly"].trigger()
    assert isinstance(handle, WorkflowHandle)
    end(system, worker, CompleteRun(ONE))
    assert handle.result(0) == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"params": {}}, "due"),
        ({"params": {"due": "x", "more": 1}}, "more"),
        ({"params": {"due": "${run.nothing}"}}, "nothing"),
    ],
)
def test_a_schedule_with_invalid_params_is_rejected(
    system: System, nightly: CodeWorkflow[..., Any], options: dict[str, Any], error: str
) -> None:
    with pytest.raises(Exception, match=error):
        system.app.schedules.set("nightly", every="60s", **options)
    with pytest.raises(Exception, match=error):
        system.app.schedule(every="60s", **options)(nightly)
        system.app.schedules.apply()
    assert system.count("schedules") == 0


def statuses(system: System) -> list[str]:
    return [run["status"] for run in runs(system)]


def test_queued_runs_begin_one_after_another(system: System, nightly: CodeWorkflow[..., Any], worker: Worker) -> None:
    system.app.schedules.set("nightly", every="60s", overlap="queue", params={"due": "x"})
    for minute in (1, 2, 3):
        pass_minutes(system, minute)
    assert statuses(system) == ["running", "pending", "pending"]
    waiting = system.app.workflow_run(runs(system)[1]["id"])
    assert waiting.status() == "pending"
    waiting.signal("early", 1)  # stored, but starts nothing
    system.pass_seconds(3)
    (turn,) = worker.take()
    assert statuses(system) == ["running", "pending", "pending"]
    worker.report(Activated(turn.id, turn.attempt, 0.1, through=1, commands=[CompleteRun(ONE)]))
    system.pass_seconds(3)
    assert statuses(system) == ["success", "running", "pending"]
    begun = runs(system)[1]
    assert begun["deadline"] - begun["started_at"] == timedelta(seconds=1000)  # timeout counts from its start
    (turn,) = worker.take()
    assert [event.what.__struct_config__.tag for event in activation(turn).events] == ["run_started", "signal_received"]


def test_the_next_run_waits_for_the_last_of_a_chain(
    system: System, nightly: CodeWorkflow[..., Any], worker: Worker
) -> None:
    system.app.schedules.set("nightly", every="60s", overlap="queue", params={"due": "x"})
    for minute in (1, 2):
        pass_minutes(system, minute)
    end(system, worker, ContinueRun(b"\x92\x90\x81\xa3due\xa1x"))
    assert sorted(statuses(system)) == ["pending", "running", "success"]
    end(system, worker, CompleteRun(ONE))
    assert sorted(statuses(system)) == ["running", "success", "success"]


@pytest.mark.parametrize(("how", "state"), [("cancel", "cancelled"), ("terminate", "terminated")])
def test_a_waiting_run_ends_without_its_code(
    system: System, nightly: CodeWorkflow[..., Any], worker: Worker, how: str, state: str
) -> None:
    system.app.schedules.set("nightly", every="60s", overlap="queue", params={"due": "x"})
    for minute in (1, 2, 3):
        pass_minutes(system, minute)
    waiting = system.app.workflow_run(runs(system)[1]["id"])
    getattr(waiting, how)()
    system.pass_seconds(3)
    assert waiting.status() == state
    assert statuses(system) == ["running", "cancelled", "pending"]
    end(system, worker, CompleteRun(ONE))
    assert statuses(system) == ["success", "cancelled", "running"]


def test_a_backfill_starts_the_fires_that_had_no_run(
    system: System, nightly: CodeWorkflow[..., Any], worker: Worker
) -> None:
    system.app.schedules.set("nightly", every="1h", params={"due": "${run.fire_time}"})
    schedule = system.app.schedules["nightly"]
    backfill = schedule.backfill("2026-01-01", "2026-01-01T05:00", concurrency=2)
    system.pass_seconds(3)
    assert statuses(system) == ["running"] * 2 + ["pending"] * 3
    for _ in range(3):
        end(system, worker, CompleteRun(ONE))
    done = backfill.progress()
    assert (done.done, done.total, done.failed) == (5, 5, 0)
    assert [f"{run['fire_time']:%H}" for run in runs(system)] == ["00", "01", "02", "03", "04"]
    again = schedule.backfill("2026-01-01", "2026-01-01T06:00")
    system.pass_seconds(3)
    assert again.progress().had_run == 5
    assert len(runs(system)) == 6


def test_a_backfill_knows_the_runs_of_older_releases(
    system: System, nightly: CodeWorkflow[..., Any], worker: Worker
) -> None:
    system.app.schedules.set("nightly", every="1h", params={"due": "x"})
    system.sql(
        "UPDATE orchestrator.schedules SET next_fire = date_trunc('hour', now()) - interval '3h', due_at = now() "
        "RETURNING name"
    )
    system.pass_seconds(3)
    system.sql("UPDATE orchestrator.runs SET key = NULL RETURNING id")  # older releases gave code runs no key
    (run,) = runs(system)
    start = run["fire_time"] - timedelta(hours=2)
    system.app.schedules["nightly"].backfill(start.isoformat(), (start + timedelta(hours=2, seconds=1)).isoformat())
    system.pass_seconds(3)
    assert [one["fire_time"] for one in runs(system)] == [start, start + timedelta(hours=1), run["fire_time"]]


def test_each_schedule_of_a_task_has_its_own_params(system: System) -> None:
    def clean(area: str, due: str = "", limit: int = 3) -> None: ...

    app = system.app
    task = app.task(name="clean")(clean)
    app.schedule(every="1h", params={"area": "attic", "due": "${run.fire_time}"})(task)
    app.schedules.apply()
    app.schedules.set("clean", "cellar", every="1h", params={"area": "cellar", "due": "today", "limit": 9})
    worker = system.worker(knows=("clean",))
    given = []
    for key in ("clean/default", "clean/cellar"):
        app.schedules[key].trigger()
        system.pass_seconds(3)
        (sent,) = worker.take()
        given.append(decode_call(sent.payload)[1])
    assert given[0] == {"area": "attic", "due": given[0]["due"], "limit": 3}
    assert given[1] == {"area": "cellar", "due": "today", "limit": 9}
    with pytest.raises(InvalidWorkflow, match="unknown parameter 'aria'. Did you mean 'area'"):
        app.schedules.set("clean", "roof", every="1h", params={"aria": "roof"})
