"""The turn task of a code run has the run's id: cancelling the task cancels the run, and the code is notified."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from orchestrator import NotFound, WorkflowContext, WrongState
from orchestrator.domain.dag.definition import Definition, Step
from orchestrator.domain.ids import successor_id, to_text
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.code.handle import WorkflowHandle
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.store import inbox
from orchestrator.store.inbox import RequestKind
from orchestrator.store.limits import queues
from tests.integration.code_stage import kinds, rest, turn
from tests.integration.stage import System, Worker, raw


@pytest.fixture
def order(system: System) -> CodeWorkflow[..., Any]:
    job = system.job

    @system.app.workflow(name="order")
    async def order(ctx: WorkflowContext, *, fails: bool = False, continues: bool = False) -> None:
        if fails:
            await job.options(retries=0).schedule(1)
        signals = ctx.signals("go")
        try:
            await signals.get()
        except asyncio.CancelledError:
            await job.schedule("refund")
            raise
        if continues:
            ctx.continue_as_new()

    return order


@pytest.fixture
def worker(system: System) -> Worker:
    return system.worker(knows=("job", "order"))


def _by_handle(system: System, handle: WorkflowHandle[Any]) -> None:
    system.app.handle(handle.id).cancel()


def _by_purge(system: System, handle: WorkflowHandle[Any]) -> None:
    with system.engine.begin() as connection:
        queues.request_purge(connection, "default")


WAYS: list[Callable[[System, WorkflowHandle[Any]], None]] = [_by_handle, _by_purge]


@pytest.mark.parametrize("cancel", WAYS)
def test_cancelling_the_turn_task_notifies_the_code(
    system: System,
    order: CodeWorkflow[..., Any],
    worker: Worker,
    engine_: Engine,
    cancel: Callable[[System, WorkflowHandle[Any]], None],
) -> None:
    handle = order.start()
    plain = system.job.options(delay=1000).enqueue(1)
    rest(system, worker, engine_)
    cancel(system, handle)
    if cancel is _by_handle:
        plain.cancel()
    turn(system, worker, engine_)
    assert plain.status() == "cancelled", "others end at once"
    assert handle.status() == "running"
    (refund,) = [task for task in worker.take() if not task.is_turn_task]
    worker.succeed(refund)
    rest(system, worker, engine_)
    assert handle.status() == "cancelled"
    assert kinds(system, handle).count("run_cancel_requested") == 1


def test_a_cancel_of_the_turn_task_reaches_the_runs_successor(
    system: System, order: CodeWorkflow[..., Any], worker: Worker, engine_: Engine
) -> None:
    handle = order.start(continues=True)
    rest(system, worker, engine_)
    handle.signal("go", 1)
    rest(system, worker, engine_)
    with system.engine.begin() as connection:  # requested before the run continued, and applied now
        inbox.add(connection, RequestKind.CANCEL_TASK, raw(handle))
    system.pass_seconds()
    successor = WorkflowHandle[Any](system.app._client, successor_id(raw(handle)))
    assert kinds(system, successor)[-1] == "run_cancel_requested"


def test_the_run_of_a_dag_cannot_be_cancelled_as_a_task(system: System) -> None:
    system.app.workflows.apply(Definition(name="dag", steps=(Step(name="a", task="job"),)))
    run = system.app.workflows["dag"].start()
    with pytest.raises(NotFound, match="No task"):
        system.app.handle(run.id).cancel()


def test_the_tasks_of_a_failed_code_run_cannot_be_retried(
    system: System, order: CodeWorkflow[..., Any], worker: Worker, engine_: Engine
) -> None:
    handle = order.start(fails=True)
    turn(system, worker, engine_)
    (task,) = [task for task in worker.take() if not task.is_turn_task]
    worker.fail(task, retryable=False)
    rest(system, worker, engine_)
    assert handle.status() == "failed"
    before = system.count("inbox")
    with pytest.raises(WrongState, match=f"orchestrator runs rerun {handle.id}"):
        system.app.handle(handle.id).retry()
    with pytest.raises(WrongState, match=f"reset the run to an earlier event: orchestrator runs reset {handle.id}"):
        system.app.handle(to_text(task.id)).retry()
    assert system.count("inbox") == before
