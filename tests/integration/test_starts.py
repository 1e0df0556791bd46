"""Tasks that must not start twice: an attempt that may have begun is not dispatched again, any other is."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from orchestrator import Handle, TaskCancelled, TaskFailed, WrongState
from orchestrator.domain.tasks.task import Returned
from tests.integration.stage import System


@pytest.mark.parametrize("begun", [False, True])
def test_a_returned_task_is_dispatched_again_only_if_it_has_not_begun(system: System, begun: bool) -> None:
    worker = system.worker("w1")
    handle: Handle[int] = system.job.options(on_loss="fail").enqueue(1)
    free: Handle[int] = system.job.enqueue(1)
    system.tick()
    tasks = worker.take()
    worker.report(*(Returned(task.id, task.attempt, "worker stops", begun=begun) for task in tasks))
    system.pass_seconds()
    again = worker.take()
    assert len(again) == (1 if begun else 2)
    worker.succeed(*again)
    system.tick()
    assert free.result(0) == 1
    if begun:
        with pytest.raises(TaskFailed, match="worker stops"):
            handle.result(0)
    else:
        assert handle.result(0) == 1


def test_a_lost_message_counts_as_possibly_received(system: System) -> None:
    worker = system.worker("w1")
    handle: Handle[int] = system.job.options(on_loss="fail").enqueue(1)
    system.tick()
    with system.engine.begin() as connection:  # a task dispatched just now would not be checked
        connection.execute(text("UPDATE orchestrator.tasks SET dispatched_at = now() - interval '1 minute'"))
    system.redis.flushall()
    system.pass_seconds(60)
    assert [task for task in worker.take() if task.attempt > 1] == []
    with pytest.raises(TaskFailed, match="message lost"):
        handle.result(0)


def test_failed_attempts_count_as_starts(system: System) -> None:
    worker = system.worker("w1")
    handle: Handle[int] = system.job.options(retries=[0.0] * 9, max_starts=3).enqueue(1)
    for _ in range(3):
        system.pass_seconds()
        worker.fail(*worker.take())
    system.pass_seconds()
    assert worker.take() == []
    assert handle.status() == "failed"
    (row,) = system.sql("SELECT reason, failures FROM orchestrator.ended_tasks")
    assert (row["reason"], row["failures"]) == ("started too often", 3)


def test_a_cancelled_task_can_be_retried_unless_it_belongs_to_a_run(system: System) -> None:
    worker = system.worker("w1")
    handle: Handle[int] = system.job.enqueue(1)
    run = system.app.start_many(system.job, [(1,)])
    system.tick()
    (found,) = system.sql("SELECT id::text FROM orchestrator.tasks WHERE run_id = CAST(:run AS uuid)", run=run.id)
    step: Handle[int] = system.app.handle(found["id"])
    for one in (handle, step):
        one.cancel()
    system.pass_seconds()
    with pytest.raises(TaskCancelled):
        handle.result(0)
    handle.retry()
    with pytest.raises(WrongState, match="cancelled"):
        step.retry()
    system.pass_seconds()
    worker.succeed(*worker.take())
    system.tick()
    assert handle.result(0) == 1
