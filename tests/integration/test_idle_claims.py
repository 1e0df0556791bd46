"""A tick that only applies successes skips the claim if no task can be ready; otherwise it claims.

The clock of the leader stands still here, so that no check of the fleet makes up for a skipped claim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from orchestrator import Handle, Retry
from orchestrator.domain.tasks.task import Dispatch, Enqueued, NewTask, Returned, Succeeded
from orchestrator.sdk.dag.definitions import loads
from orchestrator.sdk.ids import new_id
from orchestrator.store.tasks import claims
from tests.integration.stage import ONE, System, Worker
from tests.waiting import eventually


@pytest.fixture
def claimed(system: System, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of tasks that each claim finds."""
    found: list[int] = []

    def noting(*arguments: Any) -> list[claims.Claimed]:
        tasks = claim(*arguments)
        found.append(len(tasks))
        return tasks

    claim = claims.claim
    monkeypatch.setattr(claims, "claim", noting)
    return found


def drained(system: System, worker: Worker, *, tasks: int = 1, **options: Any) -> list[Dispatch]:
    """Dispatch tasks and consume all nudges."""
    for _ in range(tasks):
        enqueue(system, **options)
    system.tick(3)
    return worker.take()


def enqueue(system: System, **options: Any) -> Handle[Any]:
    """Enqueue a task and wait until Redis has the nudge; clients do not wait."""
    before = system.redis.xlen(system.keys.nudges)
    handle = system.job.options(**options).enqueue()
    eventually(lambda: system.redis.xlen(system.keys.nudges) > before, "the nudge is there")
    return handle


def test_a_tick_that_only_applies_successes_does_not_claim(system: System, claimed: list[int]) -> None:
    worker = system.worker()
    system.settle()
    taken = drained(system, worker, tasks=3)
    claimed.clear()
    for task in taken:
        worker.succeed(task)
        system.tick()
    assert system.count("ended_tasks") == 3
    assert claimed == []
    handle = enqueue(system)
    system.tick()
    assert handle.status() == "dispatched", "whoever enqueues nudges"


def test_a_tick_after_a_rollback_claims(system: System, claimed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    worker = system.worker()
    system.settle()
    first, second = drained(system, worker, tasks=2)
    worker.succeed(first)
    with monkeypatch.context() as patch:
        patch.setattr(system.scheduler.term, "_is_drained", lambda *_: 1 / 0)
        system.tick()  # fails; the next tick bisects
    claimed.clear()
    worker.succeed(second)
    system.tick()
    assert system.count("ended_tasks") == 2
    assert claimed == [0], "what the last claim has left is not known any more"


def _full_slots(system: System) -> Callable[[Worker], None]:
    system.workers[0]._slots = 1
    system.job.enqueue()
    system.job.enqueue()
    return lambda worker: worker.succeed(*worker.take())


def _full_limit(system: System) -> Callable[[Worker], None]:
    lonely = system.app.task(name="lonely", concurrency=1)(lambda: None)
    system.workers[0].learn("lonely")
    lonely.enqueue()
    lonely.enqueue()
    return lambda worker: worker.succeed(*worker.take())


def _full_queue(system: System) -> Callable[[Worker], None]:
    system.app.queue("default").limit(concurrency=1)
    system.job.enqueue()
    system.job.enqueue()
    return lambda worker: worker.succeed(*worker.take())


def _follow_up(system: System) -> Callable[[Worker], None]:
    system.job.options(on_success=system.job).enqueue(1)
    return lambda worker: worker.succeed(*worker.take())


def _retry(system: System) -> Callable[[Worker], None]:
    system.job.options(retries=Retry(backoff=[0, 0], jitter=0)).enqueue()
    return lambda worker: worker.fail(*worker.take())


def _handed_back(system: System) -> Callable[[Worker], None]:
    system.job.enqueue()

    def hand_back(worker: Worker) -> None:
        worker.report(*(Returned(task.id, task.attempt, "no free slot") for task in worker.take()))

    return hand_back


def _child(system: System) -> Callable[[Worker], None]:
    system.job.enqueue()

    def succeed(worker: Worker) -> None:
        (task,) = worker.take()
        worker.report(Succeeded(task.id, task.attempt, 0.1, ONE, [_new()]))

    return succeed


def _enqueued(system: System) -> Callable[[Worker], None]:
    system.job.enqueue()

    def enqueue(worker: Worker) -> None:
        (task,) = worker.take()
        worker.report(Enqueued([_new()]), Succeeded(task.id, task.attempt, 0.1, ONE))

    return enqueue


def _next_step(system: System) -> Callable[[Worker], None]:
    system.app.workflows.apply(loads("name: two\ntasks: {first: {task: job}, last: {task: job, depends_on: [first]}}"))
    system.app.workflows["two"].start()
    return lambda worker: worker.succeed(*worker.take())


def _new() -> NewTask:
    return NewTask(new_id(), "job", "default", b"\x92\x90\x80")


@pytest.mark.parametrize(
    "arrange",
    [_full_slots, _full_limit, _full_queue, _follow_up, _retry, _handed_back, _child, _enqueued, _next_step],
)
def test_tasks_made_ready_by_a_report_are_dispatched_at_once(
    system: System, arrange: Callable[[System], Callable[[Worker], None]]
) -> None:
    worker = system.worker()
    system.settle()
    worker.succeed(*drained(system, worker))
    system.tick()
    end = arrange(system)
    system.pass_seconds(2)
    system.tick(3)
    end(worker)
    system.tick()
    assert len(worker.take()) == 1
