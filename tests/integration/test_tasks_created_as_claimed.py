"""A task that a tick creates and could claim at once is inserted as dispatched, which saves a second write."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from orchestrator import chain
from orchestrator.domain.tasks.task import Dispatch
from orchestrator.store.tasks import claims
from tests.integration.stage import System, Worker


def open_tasks(system: System) -> list[tuple[str, int]]:
    found = system.sql("SELECT status, attempt FROM orchestrator.tasks ORDER BY seq")
    return [(row["status"], row["attempt"]) for row in found]


def begin(system: System, worker: Worker) -> Sequence[Dispatch]:
    """Start a chain of two tasks; return the first, which the last claim has taken."""
    chain([system.job.si(number) for number in range(2)]).start()
    system.settle()
    taken = worker.take()
    assert len(taken) == 1
    return taken


def test_the_next_step_is_created_as_dispatched(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = system.worker()
    worker.succeed(*begin(system, worker))
    monkeypatch.delattr(claims, "claim")  # the test fails if the tick claims afterwards
    system.tick()
    assert open_tasks(system) == [("dispatched", 1)]
    (task,) = worker.take()
    assert task.attempt == 1
    assert system.scheduler.term.dispatcher.in_flight == 1


def test_the_attempt_of_a_created_task_is_above_the_fence(system: System) -> None:
    worker = system.worker()
    taken = begin(system, worker)
    system.sql("UPDATE orchestrator.leases SET fence = 1000 RETURNING 1")
    worker.succeed(*taken)
    system.tick()
    assert open_tasks(system) == [("dispatched", 1001)]


def test_the_next_step_of_a_paused_queue_is_pending(system: System) -> None:
    worker = system.worker()
    taken = begin(system, worker)
    system.app.queue("default").pause()
    system.settle()
    worker.succeed(*taken)
    system.tick()
    assert open_tasks(system) == [("pending", 0)]
    assert worker.take() == []


def test_other_ready_tasks_are_claimed_in_the_same_tick(system: System) -> None:
    worker = system.worker()
    taken = begin(system, worker)
    system.job.enqueue(7)
    system.redis.delete(system.keys.nudges)
    worker.succeed(*taken)
    system.tick()
    assert open_tasks(system) == [("dispatched", 1), ("dispatched", 1)]
    assert len(worker.take()) == 2
