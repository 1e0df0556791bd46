"""Runs of workflows as code, tick by tick."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from orchestrator import RunFailed, WorkflowContext
from orchestrator.domain.code.activation import Activated, Violation
from orchestrator.domain.code.commands import CompleteRun
from orchestrator.domain.tasks.task import Lost, Returned, Succeeded
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.store import retention
from orchestrator.testing import WorkflowTest
from tests.integration.code_stage import act, activation, kinds, rest, run_row
from tests.integration.stage import ONE, System, Worker, raw


@pytest.fixture
def double(system: System) -> CodeWorkflow[..., Any]:
    job = system.job

    @system.app.workflow(name="double")
    async def double(ctx: WorkflowContext, number: int) -> int:
        first, second = await asyncio.gather(job.schedule(number), job.schedule(number))
        return int(first) + int(second)

    return double


def worker_of(system: System, name: str = "w1") -> Worker:
    return system.worker(name, knows=("job", "double", "sleeper"))


def test_the_result_of_a_task_without_stored_results_is_none(system: System, engine_: Engine) -> None:
    def count() -> int:
        return 3

    counting = system.app.task(name="count", store_result=False)(count)

    @system.app.workflow(name="double")
    async def double(ctx: WorkflowContext) -> str:
        return repr(await counting.schedule())

    worker = system.worker(knows=("count", "double"))
    handle = double.start()
    system.pass_seconds()
    worker.report(act(engine_, *worker.take()))
    system.tick()
    (task,) = worker.take()
    worker.report(Succeeded(task.id, 1, 0.1, b"\xc0"))
    system.tick()
    worker.report(act(engine_, *worker.take()))
    system.tick()
    assert handle.result(0) == "None"


def test_a_code_run_goes_from_start_to_result(system: System, double: CodeWorkflow[..., Any], engine_: Engine) -> None:
    worker = worker_of(system)
    handle = double.start(7)
    system.pass_seconds()
    (first,) = worker.take()
    assert activation(first).after == 0
    worker.report(act(engine_, first))
    system.tick()
    assert run_row(system, handle)["open"] == 2
    assert system.row(raw(handle))["blockers"] == 1
    tasks = worker.take()
    assert [task.name for task in tasks] == ["job", "job"]
    worker.succeed(tasks[0])
    system.tick()
    (second,) = worker.take()
    assert activation(second).cached == 1
    worker.succeed(tasks[1])  # while the second activation is out
    system.tick()
    worker.report(act(engine_, second))
    system.tick()
    (third,) = worker.take()
    worker.report(act(engine_, third))
    system.tick()
    assert handle.result(0) == 2
    row = run_row(system, handle)
    assert (row["status"], row["total"], row["open"], row["success"]) == ("success", 2, 0, 2)
    assert kinds(system, handle) == [
        "run_started",
        *("activation_applied", "task_scheduled", "task_scheduled", "task_completed", "task_completed"),
        "activation_applied",
        *("activation_applied", "run_completed"),
    ]
    assert system.count("tasks") == 0


def test_a_duplicate_turn_report_is_applied_once(
    system: System, double: CodeWorkflow[..., Any], engine_: Engine
) -> None:
    worker = worker_of(system)
    handle = double.start(7)
    system.pass_seconds()
    (first,) = worker.take()
    report = act(engine_, first)
    worker.report(report)
    worker.report(report)
    system.tick()
    worker.report(report)
    system.tick()
    assert kinds(system, handle).count("task_scheduled") == 2
    assert run_row(system, handle)["total"] == 2


def test_a_turn_of_an_attempt_that_is_over_is_ignored(
    system: System, double: CodeWorkflow[..., Any], engine_: Engine
) -> None:
    worker = worker_of(system)
    handle = double.start(7)
    system.pass_seconds()
    (late,) = worker.take()
    worker.report(Returned(late.id, late.attempt, "worker stops"))
    system.pass_seconds()
    (turn,) = worker.take()
    assert turn.attempt == late.attempt + 1
    worker.report(act(engine_, late))
    system.tick()
    assert kinds(system, handle) == ["run_started"]
    assert system.row(turn.id)["status"] == "dispatched"


def test_events_during_a_turn_are_delivered_in_another_turn(
    system: System, double: CodeWorkflow[..., Any], engine_: Engine
) -> None:
    worker = worker_of(system)
    double.start(7)
    system.pass_seconds()
    worker.report(act(engine_, *worker.take()))
    system.tick()
    first, second = worker.take()
    worker.succeed(first)
    system.tick()
    (turn,) = worker.take()
    worker.succeed(second)
    system.tick()
    assert worker.take() == [], "it is at work"
    worker.report(act(engine_, turn))
    system.pass_seconds()
    assert [task.is_turn_task for task in worker.take()] == [True]


def test_only_a_worker_without_the_code_receives_the_whole_history(
    system: System, double: CodeWorkflow[..., Any], engine_: Engine
) -> None:
    worker, other = worker_of(system), worker_of(system, "w2")
    double.start(7)
    system.settle()
    system.tick()
    owner, idle = (worker, other) if (taken := worker.take()) else (other, worker)
    (first,) = taken or other.take()
    owner.report(act(engine_, first))
    system.tick()
    tasks = [*worker.take(), *other.take()]
    (worker if (tasks[0].id, 1) in worker.held else other).succeed(tasks[0])
    system.tick()
    assert not [task for task in idle.take() if task.is_turn_task]
    (second,) = [task for task in owner.take() if task.is_turn_task]
    assert activation(second).after == 1
    owner.die()
    system.make_old()
    system.tick_until(lambda: system.row(first.id)["attempt"] > second.attempt)
    (third,) = [task for task in idle.take() if task.is_turn_task]
    assert activation(third).after == 0
    assert len(activation(third).events) == 5


def test_code_that_does_not_fit_is_stuck_until_other_code_comes(
    system: System, double: CodeWorkflow[..., Any], engine_: Engine
) -> None:
    worker = worker_of(system)
    handle = double.start(7)
    system.pass_seconds()
    (first,) = worker.take()
    why = Violation(3, "TaskTypeMismatch", "history has 'a' and the code says 'b'", "- a\n+ b")
    worker.report(Activated(first.id, first.attempt, 0.1, stuck=why))
    system.tick()
    assert handle.status() == "stuck"
    assert run_row(system, handle)["status"] == "running"
    system.pass_seconds(3)
    assert not worker.take()
    handle.retry()
    system.tick(2)
    (second,) = worker.take()
    worker.report(Activated(second.id, second.attempt, 0.1, stuck=why))
    system.tick()
    assert handle.status() == "stuck"
    worker_of(system, "w2")
    system.pass_seconds(2)
    assert handle.status() == "running"
    third = [*worker.take(), *system.workers[1].take()]
    assert [task.attempt for task in third] == [3]


def test_a_pinned_run_waits_for_a_worker_with_its_version(
    system: System, double: CodeWorkflow[..., Any], engine_: Engine
) -> None:
    worker = worker_of(system)
    handle = double.starting(pinned=True).start(7)
    system.pass_seconds(2)
    assert not worker.take()
    worker.learn("double@1")
    system.pass_seconds(2)
    (first,) = worker.take()
    worker.report(act(engine_, first))
    system.tick()
    assert run_row(system, handle)["open"] == 2


def test_a_starting_signal_starts_a_run_if_the_open_run_ends(system: System, double: CodeWorkflow[..., Any]) -> None:
    worker = worker_of(system)
    first = double.starting(id="d-1").start(7)
    system.pass_seconds()
    (turn,) = worker.take()
    for number in (1, 2):
        assert double.starting(id="d-1", signal=("more", number)).start(8) == first
    worker.report(Activated(turn.id, turn.attempt, 0.1, through=1, commands=[CompleteRun(ONE)]))
    system.tick()
    assert first.status() == "success"
    second = double.starting(id="d-1", on_conflict="return").start(9)
    assert second != first
    assert kinds(system, second) == ["run_started", "signal_received", "signal_received"]


def test_code_that_kills_its_workers_is_stuck_and_not_failed(system: System, double: CodeWorkflow[..., Any]) -> None:
    worker = worker_of(system)
    handle = double.start(7)
    for _ in range(system.settings.loss_limit + 2):
        system.pass_seconds()
        for dispatch in worker.take():
            worker.report(Lost(dispatch.id, dispatch.attempt, alone=dispatch.alone))
        system.tick()
    assert handle.status() == "stuck"
    assert run_row(system, handle)["stuck"]["kind"] == "WorkerLost"


def test_losses_before_the_last_turn_do_not_count_against_a_run(system: System, engine_: Engine) -> None:
    """A run may lose many workers over months; losses count only without progress."""

    @system.app.workflow(name="sleeper")
    async def listener(ctx: WorkflowContext) -> int:
        return await ctx.signals("more", type=int).get()

    worker = worker_of(system)
    handle = listener.start()
    system.pass_seconds()
    (turn,) = worker.take()
    system.sql(
        "INSERT INTO orchestrator.attempts (task_id, attempt, outcome, ended_at) "
        "SELECT CAST(:id AS uuid), -number, 'lost', now() - interval '1 day' FROM generate_series(1, 40) AS number "
        "RETURNING 1",
        id=handle.id,
    )
    worker.report(act(engine_, turn))
    system.pass_seconds()
    handle.signal("more", 7)
    system.pass_seconds()
    (turn,) = worker.take()
    worker.report(Lost(turn.id, turn.attempt, alone=False))
    system.pass_seconds()
    assert handle.status() == "running"
    (turn,) = worker.take()
    worker.report(act(engine_, turn))
    system.tick()
    assert handle.result(0) == 7


def test_a_timer_wakes_the_code_when_it_is_due(system: System, engine_: Engine) -> None:
    @system.app.workflow(name="sleeper", timeout=7200)
    async def sleeper(ctx: WorkflowContext) -> str:
        await ctx.sleep(hours=1)
        return "awake"

    worker = worker_of(system)
    handle = sleeper.start()
    system.pass_seconds()
    (first,) = worker.take()
    worker.report(act(engine_, first))
    system.pass_seconds(2)
    assert not worker.take()
    system.lead(offset=3601)
    system.pass_seconds(2)
    (second,) = worker.take()
    worker.report(act(engine_, second))
    system.tick()
    assert handle.result(0) == "awake"
    assert system.count("timers") == 0


def test_a_timer_counts_from_the_turn_that_starts_the_timer(system: System, engine_: Engine) -> None:
    @system.app.workflow(name="sleeper", timeout=7200)
    async def sleeper(ctx: WorkflowContext) -> str:
        with contextlib.suppress(TimeoutError):
            await ctx.promise("never", timeout=60)
        return "awake"

    handle = sleeper.start()
    system.pass_seconds()
    system.lead(offset=1000)  # no worker was up
    worker = worker_of(system)
    system.pass_seconds()
    worker.report(act(engine_, *worker.take()))
    system.tick()
    (row,) = system.sql(
        "SELECT extract(epoch FROM t.due - h.at)::float AS seconds FROM orchestrator.timers t "
        "JOIN orchestrator.histories h ON h.run_id = t.run_id AND h.kind = 'timer_started'"
    )
    assert row["seconds"] == 60
    system.lead(offset=1030)
    system.pass_seconds()
    assert not worker.take()
    system.lead(offset=1065)
    system.pass_seconds(2)
    worker.report(act(engine_, *worker.take()))
    system.tick()
    assert handle.result(0) == "awake"


def test_timers_with_the_same_due_time_fire_in_start_order(system: System, engine_: Engine) -> None:
    @system.app.workflow(name="sleepers")
    async def sleepers(ctx: WorkflowContext) -> list[int]:
        order: list[int] = []

        async def sleep(number: int) -> None:
            await ctx.sleep(hours=1)
            order.append(number)

        await asyncio.gather(*(sleep(number) for number in range(20)))
        return order

    worker = system.worker(knows=("sleepers",))
    handle = sleepers.start()
    rest(system, worker, engine_)
    system.lead(offset=3601)
    rest(system, worker, engine_)
    assert handle.result(0) == list(range(20))

    async def in_memory() -> list[int]:
        async with WorkflowTest() as test:
            return await test.run(sleepers)

    assert asyncio.run(in_memory()) == list(range(20))


def test_a_timed_out_run_is_asked_to_end_and_fails(system: System, engine_: Engine) -> None:
    @system.app.workflow(name="sleeper", timeout=60)
    async def sleeper(ctx: WorkflowContext) -> None:
        await ctx.promise("never")

    worker = worker_of(system)
    handle = sleeper.start()
    system.pass_seconds()
    (first,) = worker.take()
    worker.report(act(engine_, first))
    system.tick()
    system.lead(offset=61)
    system.pass_seconds(2)
    (second,) = worker.take()
    worker.report(act(engine_, second))
    system.tick()
    assert handle.status() == "failed"
    with pytest.raises(RunFailed):
        handle.result(0)
    assert system.count("promises") == 0


def test_deleting_a_run_deletes_its_history(system: System, double: CodeWorkflow[..., Any]) -> None:
    worker = worker_of(system)
    handle = double.starting(id="d-1").start(7)
    system.pass_seconds()
    (first,) = worker.take()
    worker.report(Activated(first.id, first.attempt, 0.1, through=1, commands=[CompleteRun(ONE)]))
    system.tick()
    assert handle.result(0) == 1
    with system.engine.connect() as connection:
        assert sum(retention.delete_remains(connection, [raw(handle)], 2)) == 4  # its turn task, and three events
        connection.commit()
    assert system.count("histories") == system.count("run_keys") == system.count("ended_tasks") == 0
