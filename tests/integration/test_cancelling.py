"""Cancelling tasks in every state."""

from __future__ import annotations

from uuid import UUID

import pytest

from orchestrator import TaskCancelled
from orchestrator.transport.codec import (
    Attempt,
    Order,
)
from tests.integration.stage import KEYS, System, raw


def test_a_cancelled_pending_task_is_never_dispatched(system: System) -> None:
    handle = system.job.enqueue()
    handle.cancel()
    system.pass_seconds()
    assert handle.status() == "cancelled"
    worker = system.worker()
    system.pass_seconds(2)
    assert worker.take() == []
    with pytest.raises(TaskCancelled):
        handle.result(0)


def test_cancelling_twice_is_no_error(system: System) -> None:
    handle, run = system.job.enqueue(), system.app.start_many(system.job, [(1,), (2,)])
    for cancelled in (handle, run):
        cancelled.cancel()
        cancelled.cancel()
    system.pass_seconds(2)
    assert (handle.status(), run.progress().status) == ("cancelled", "cancelled")
    handle.cancel()
    run.cancel()
    assert system.count("inbox") == 0


def test_a_pending_cancel_applies_to_started_but_not_to_ended_tasks(system: System) -> None:
    """`cancel` stores a request; reports that the leader applies before that request count."""
    worker = system.worker()
    ended, started = system.dispatch(2)
    first, second = worker.take()
    ended.cancel()
    started.cancel()
    worker.succeed(first)
    worker.start(second)
    system.pass_seconds()
    assert system.states(ended, started) == ["success", "cancelled"]
    worker.succeed(second)
    system.pass_seconds()
    assert system.states(ended, started) == ["success", "cancelled"]


def test_cancelling_a_dispatched_task_removes_its_message(system: System) -> None:
    worker = system.worker()
    handle, other = system.dispatch(2)
    handle.cancel()
    system.pass_seconds()
    assert system.states(handle, other) == ["cancelled", "dispatched"]
    assert [task.id for task in worker.take()] == [raw(other)]


def test_cancelling_a_bundled_task_leaves_its_neighbors(system: System) -> None:
    worker = system.worker(slots=1)
    system.scheduler.term.dispatcher.windows.rates["default"] = 1_000.0  # a fast queue sends bundles
    handles = system.dispatch(6)
    assert system.redis.xlen(KEYS.queue(system.generation, "default")) == 1
    handles[2].cancel()
    system.pass_seconds()
    worker.succeed(*worker.take())
    system.tick()
    assert system.states(*handles) == ["success"] * 2 + ["cancelled"] + ["success"] * 3


def test_cancelling_a_running_task_stops_its_worker_and_ignores_its_report(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    (task,) = worker.take()
    worker.start(task)
    system.pass_seconds()
    handle.cancel()
    system.pass_seconds()
    assert handle.status() == "cancelled"
    stop = Order(stop=[Attempt(task.id, 1)])
    assert worker.orders() == [stop]
    system.pass_seconds(2)
    assert worker.orders() == [stop, stop]  # repeated while heartbeats list the task
    worker.succeed(task)
    system.pass_seconds(2)
    assert handle.status() == "cancelled"
    assert worker.orders() in ([], [stop])
    system.pass_seconds()
    assert worker.orders() == []


def test_requests_are_applied_in_order_of_arrival(system: System) -> None:
    """Retry, then cancel: the reopened task is cancelled."""
    worker = system.worker()
    (handle,) = system.dispatch()
    worker.fail(*worker.take())
    system.tick()
    for kind in ("retry task", "cancel task"):
        system.sql("INSERT INTO orchestrator.inbox (kind, target) VALUES (:kind, :target)", kind=kind, target=handle.id)
    system.pass_seconds()
    assert handle.status() == "cancelled"
    assert system.count("inbox") == 0


def test_requests_for_missing_or_ended_targets_do_nothing(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    worker.succeed(*worker.take())
    system.tick()
    before = system.row(handle)
    for kind in ("cancel task", "retry task", "cancel run", "retry run", "make coffee"):
        for target in (handle.id, str(UUID(int=7))):
            system.sql(
                "INSERT INTO orchestrator.inbox (kind, target) VALUES (:kind, :target)", kind=kind, target=target
            )
    system.pass_seconds()
    assert system.row(handle) == before
    assert system.count("inbox") == 0
