"""Runs whose code kills its process: they run alone from then on, without harm to other runs."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator import WorkflowContext, WorkflowHandle
from orchestrator.domain.tasks.task import Dispatch, Lost
from orchestrator.scheduler.code import runs
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.code.workflow import CodeWorkflow
from tests.integration.code_stage import act, activation, rest, run_row
from tests.integration.stage import System, Worker

KNOWN = ("job", "listener", "listener@1")


@pytest.fixture
def listener(system: System) -> CodeWorkflow[..., Any]:
    @system.app.workflow(name="listener")
    async def listener(ctx: WorkflowContext) -> int:
        return await ctx.signals("more", type=int).get() + await ctx.signals("more", type=int).get()

    return listener


def worker_of(system: System, name: str = "w1", *more: str) -> Worker:
    return system.worker(name, knows=(*KNOWN, *more))


def turns(system: System) -> list[tuple[Worker, Dispatch]]:
    system.pass_seconds(2)
    return [(worker, task) for worker in system.workers for task in worker.take() if task.is_turn_task]


def kill(system: System) -> list[bool]:
    """Kill the processes in which turns run; return for each turn whether it ran alone."""
    found = turns(system)
    for worker, task in found:
        worker.report(Lost(task.id, task.attempt, alone=task.alone))
    return [task.alone for _, task in found]


def get_stuck(system: System, handle: WorkflowHandle[Any]) -> None:
    assert [kill(system) for _ in range(4)] == [[False], [True], [True], [True]]
    system.tick()
    assert handle.status() == "stuck"


def test_new_processes_do_not_retry_a_run_that_kills_its_process(
    system: System, listener: CodeWorkflow[..., Any]
) -> None:
    worker = worker_of(system)
    handle = listener.start()
    get_stuck(system, handle)
    for name in ("w2", "w3"):
        replacement = worker_of(system, name)
        replacement.parent = worker.parent if name == "w2" else replacement.parent
        system.pass_seconds(2)
        assert handle.status() == "stuck"


def test_a_run_that_kills_its_process_is_retried_alone_with_new_code(
    system: System, listener: CodeWorkflow[..., Any]
) -> None:
    worker_of(system)
    handle = listener.start()
    get_stuck(system, handle)
    worker_of(system, "w2", "listener@2")
    assert kill(system) == [True]
    system.tick()
    assert handle.status() == "stuck"
    assert kill(system) == []


def test_a_run_that_kills_its_process_is_retried_alone_with_backoff(
    system: System, listener: CodeWorkflow[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_CHECK_INTERVAL", 0.0)
    worker_of(system)
    handle = listener.start()
    get_stuck(system, handle)
    pauses = []
    for _ in range(8):
        assert kill(system) == []
        reason = run_row(system, handle)["stuck"]
        now = system.sql("SELECT extract(epoch FROM now())::float AS now")[0]["now"]
        pauses.append(round((reason["retry_at"] - now) / 60))
        system.sql(
            "UPDATE orchestrator.runs SET stuck = jsonb_set(stuck, '{retry_at}', '1') WHERE id = CAST(:id AS uuid)",
            id=handle.id,
        )
        assert kill(system) == [True]
        system.tick()
        assert handle.status() == "stuck"
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]


def test_a_manually_retried_run_stays_alone(system: System, listener: CodeWorkflow[..., Any], engine_: Engine) -> None:
    worker_of(system)
    handle = listener.start()
    get_stuck(system, handle)
    handle.retry()
    for number in (1, 2):
        ((worker, turn),) = turns(system)
        assert turn.alone
        worker.report(act(engine_, turn))
        system.pass_seconds()
        handle.signal("more", number)
    rest(system, worker, engine_)
    assert handle.result(0) == 3


def test_a_run_is_not_stuck_after_other_runs_killed_its_processes(
    system: System, listener: CodeWorkflow[..., Any], engine_: Engine
) -> None:
    worker = worker_of(system)
    handle = listener.start()
    for _ in range(29):
        ((_, turn),) = turns(system)
        worker.report(Lost(turn.id, turn.attempt, alone=False))
    ((_, turn),) = turns(system)
    worker.report(Lost(turn.id, turn.attempt, alone=False))
    system.pass_seconds()
    assert handle.status() == "running"
    row = system.row(handle.id)
    assert (row["alone"], row["losses"]) == (True, 0)
    assert row["wake_at"] is not None


def test_a_run_that_killed_a_process_runs_alone_for_twenty_turns(system: System, engine_: Engine) -> None:
    @system.app.workflow(name="listener")
    async def listener(ctx: WorkflowContext) -> None:
        while True:
            await ctx.signals("more", type=int).get()

    worker = worker_of(system)
    handle = listener.start()
    assert [kill(system) for _ in range(2)] == [[False], [True]]
    alone: list[bool] = []
    for number in range(22):
        ((_, turn),) = turns(system)
        alone.append(turn.alone)
        worker.report(act(engine_, turn))
        system.pass_seconds()
        handle.signal("more", number)
    assert alone == 20 * [True] + 2 * [False]
    assert kill(system) == [False]
    assert kill(system) == [True], "it is as good as any other run"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_stuck_run_is_retried_if_another_worker_may_match(
    system: System, engine_: Engine, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(runs, "_CHECK_INTERVAL", 0.0)
    unfit: list[bool] = []

    @system.app.workflow(name="listener")
    async def listener(ctx: WorkflowContext) -> int:
        if unfit:
            raise ValueError("this code does not go on where other code did")
        return await ctx.signals("more", type=int).get() + await ctx.signals("more", type=int).get()

    for number in range(workers):
        worker_of(system, f"w{number}")
    handle = listener.start()
    for _ in range(2):
        ((worker, turn),) = turns(system)
        worker.report(act(engine_, turn))
        system.tick()
        handle.signal("more", 1)
    engine_.close()
    unfit.append(True)
    pauses = []
    for _ in range(3):
        ((worker, turn),) = turns(system)
        if activation(turn).after:  # a worker without this run in memory is sent the whole history
            worker.report(act(engine_, turn))
            ((worker, turn),) = turns(system)
        worker.report(act(engine_, turn))
        system.tick()
        assert handle.status() == "stuck"
        now = system.sql("SELECT extract(epoch FROM now())::float AS now")[0]["now"]
        pauses.append(round((run_row(system, handle)["stuck"]["retry_at"] - now) / 60))
        assert turns(system) == [], "not before its pause is over"
        system.sql("UPDATE orchestrator.runs SET stuck = jsonb_set(stuck, '{retry_at}', '1') WHERE stuck IS NOT NULL")
        if workers == 1:
            assert turns(system) == [], "there is no other code"
            return
    assert pauses == [1, 2, 4]
    unfit.clear()
    rest(system, worker, engine_)
    assert handle.result(0) == 2
