"""Executions wait in order with the other tasks of their queue; in their own queue they need no slot."""

from __future__ import annotations

import pytest

from orchestrator.domain.executors.record import announced
from orchestrator.domain.tasks.task import Succeeded
from orchestrator.executors import Rq
from tests.integration.stage import ONE, System, Worker, raw

EXECUTOR = Rq(function="a:b", url_variable="MINE")


@pytest.fixture
def full(system: System) -> Worker:
    """A worker of two queues whose only slot is taken."""
    worker = system.worker(knows=["job", "other", announced("rq MINE")], slots=1, executions=10)
    worker._queues.append("outside")
    system.settle()
    system.dispatch()
    worker.start(*worker.take())
    system.pass_seconds()
    return worker


def test_executions_in_their_own_queue_need_no_slot(system: System, full: Worker) -> None:
    other = system.app.task(name="other", executor=EXECUTOR, queue="outside")(lambda: None)
    handles = [other.enqueue() for _ in range(5)]
    system.pass_seconds(3)
    assert [task.id for task in full.take()] == [raw(handle) for handle in handles]


def test_executions_among_other_tasks_wait_for_a_free_slot(system: System, full: Worker) -> None:
    (running,) = full.held
    other = system.app.task(name="other", executor=EXECUTOR, priority=9)(lambda: None)
    handles = [other.enqueue() for _ in range(5)]
    plain = system.job.enqueue()
    system.pass_seconds(3)
    assert full.take() == []
    full.report(Succeeded(*running, 0.1, ONE))
    system.pass_seconds(3)
    assert {task.id for task in full.take()} == {raw(handle) for handle in (*handles, plain)}, "they take up none"
