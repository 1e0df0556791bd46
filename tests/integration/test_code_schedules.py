"""Schedules that start workflows as code."""

from __future__ import annotations

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


def test_what_the_code_declares_starts_one_run_a_fire(
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


def test_a_run_that_goes_on_in_another_is_open(system: System, nightly: CodeWorkflow[..., Any], worker: Worker) -> None:
    system.app.schedules.set("nightly", every="60s", params={"due": "x"})
    pass_minutes(system, 1)
    end(system, worker, ContinueRun(b"\x92\x90\x81\xa3due\xa1x"))
    pass_minutes(system, 2)
    assert system.app.schedules["nightly"].status().skipped == 1
    end(system, worker, CompleteRun(ONE))
    pass_minutes(system, 3)
    assert system.app.schedules["nightly"].status().fired == 2


def test_the_open_run_is_asked_to_cancel_itself(
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


def test_a_run_can_be_started_at_once(system: System, nightly: CodeWorkflow[..., Any], worker: Worker) -> None:
    system.app.schedules.set("nightly", "hourly", every="1h", params={"due": "x"})
    handle = system.app.schedules["nightly/hourly"].trigger()
    assert isinstance(handle, WorkflowHandle)
    end(system, worker, CompleteRun(ONE))
    assert handle.result(0) == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"overlap": "queue", "params": {"due": "x"}}, "overlap: a run of a workflow as code does not wait"),
        ({"params": {}}, "due"),
        ({"params": {"due": "x", "more": 1}}, "more"),
        ({"params": {"due": "${run.nothing}"}}, "nothing"),
    ],
)
def test_what_cannot_be_scheduled_is_refused(
    system: System, nightly: CodeWorkflow[..., Any], options: dict[str, Any], error: str
) -> None:
    with pytest.raises(Exception, match=error):
        system.app.schedules.set("nightly", every="60s", **options)
    with pytest.raises(Exception, match=error):
        system.app.schedule(every="60s", **options)(nightly)
        system.app.schedules.apply()
    assert system.count("schedules") == 0


def test_there_is_no_backfill(system: System, nightly: CodeWorkflow[..., Any]) -> None:
    system.app.schedules.set("nightly", every="1h", params={"due": "x"})
    with pytest.raises(InvalidWorkflow, match="is a workflow as code, and cannot be filled in"):
        system.app.schedules["nightly"].backfill("2026-01-01", "2026-01-02")


def test_another_schedule_of_a_task_takes_params_of_its_own(system: System) -> None:
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
