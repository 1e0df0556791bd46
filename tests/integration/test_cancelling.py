"""Tasks that are cancelled, wherever they stand."""

from __future__ import annotations

from uuid import UUID

import pytest

from orchestrator import TaskCancelled
from orchestrator.transport.codec import (
    Attempt,
    Order,
)
from tests.integration.stage import KEYS, System, raw


def test_cancel_while_pending(system: System) -> None:
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


def test_what_had_started_or_ended_when_the_leader_comes_to_the_wish_is_told_apart(system: System) -> None:
    """The request is stored when `cancel` returns; what happens before the leader applies it counts."""
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


def test_cancel_while_dispatched_takes_the_message_back(system: System) -> None:
    worker = system.worker()
    handle, other = system.dispatch(2)
    handle.cancel()
    system.pass_seconds()
    assert system.states(handle, other) == ["cancelled", "dispatched"]
    assert [task.id for task in worker.take()] == [raw(other)]


def test_cancel_of_one_in_a_bundle_leaves_its_neighbours(system: System) -> None:
    worker = system.worker(slots=1)
    system.scheduler.term.dispatcher.windows.rates["default"] = 1_000.0  # a fast queue is bundled
    handles = system.dispatch(6)
    assert system.redis.xlen(KEYS.queue(system.generation, "default")) == 1
    handles[2].cancel()
    system.pass_seconds()
    worker.succeed(*worker.take())
    system.tick()
    assert system.states(*handles) == ["success"] * 2 + ["cancelled"] + ["success"] * 3


def test_cancel_while_running_stops_the_worker_and_its_report_counts_no_more(system: System) -> None:
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
    assert worker.orders() == [stop, stop]  # repeated while the heartbeat lists it
    worker.succeed(task)
    system.pass_seconds(2)
    assert handle.status() == "cancelled"
    assert worker.orders() in ([], [stop])
    system.pass_seconds()
    assert worker.orders() == []


def test_requests_are_applied_in_the_order_in_which_they_came(system: System) -> None:
    """Retry, then cancel: what was opened again is cancelled."""
    worker = system.worker()
    (handle,) = system.dispatch()
    worker.fail(*worker.take())
    system.tick()
    for kind in ("retry task", "cancel task"):
        system.sql("INSERT INTO orchestrator.inbox (kind, target) VALUES (:kind, :target)", kind=kind, target=handle.id)
    system.pass_seconds()
    assert handle.status() == "cancelled"
    assert system.count("inbox") == 0


def test_requests_for_what_does_not_exist_or_has_ended_do_nothing(system: System) -> None:
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
