"""Failed attempts: retried, returned or final."""

from __future__ import annotations

from datetime import timedelta

import pytest

from orchestrator import Retry, TaskFailed
from orchestrator.domain.tasks.task import Dispatch, Returned
from tests.integration.stage import System


def test_a_failed_attempt_is_retried_after_its_backoff(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch(retries=Retry(max=3, base=300, jitter=0))
    worker.fail(*worker.take())
    system.pass_seconds(3)
    row = system.row(handle)
    assert (row["status"], row["attempt"], row["failures"]) == ("pending", 1, 1)
    (attempt,) = system.sql("SELECT *, CAST(:id AS uuid) FROM orchestrator.attempts", id=handle.id)
    assert (attempt["attempt"], attempt["outcome"], attempt["error"]["kind"]) == (1, "failed", "ValueError")
    assert row["wake_at"] - attempt["ended_at"] == timedelta(seconds=300)
    system.lead(offset=200)
    system.pass_seconds()
    assert handle.status() == "pending"
    system.lead(offset=301)
    system.pass_seconds()
    row = system.row(handle)
    assert (row["status"], row["attempt"], row["failures"]) == ("dispatched", 2, 1)
    worker.fail(*worker.take())
    system.tick()
    (_, second) = system.sql("SELECT ended_at FROM orchestrator.attempts ORDER BY attempt")
    assert system.row(handle)["wake_at"] - second["ended_at"] == timedelta(seconds=600)


def test_a_task_fails_when_its_retries_are_exhausted(system: System) -> None:
    worker = system.worker()
    handle = system.job.options(retries=Retry(max=2, base=0.001, jitter=0)).enqueue()
    system.pass_seconds()
    for attempt in (1, 2, 3):
        taken: list[Dispatch] = []
        system.tick_until(lambda taken=taken: taken.extend(worker.take()) or taken)  # type: ignore[misc]
        assert [task.attempt for task in taken] == [attempt]
        worker.fail(*taken)
    system.tick()
    row = system.row(handle)
    assert (row["status"], row["reason"], row["attempt"], row["failures"]) == ("failed", "ValueError", 3, 3)
    assert system.count("attempts") == 2
    with pytest.raises(TaskFailed, match="ValueError: no") as caught:
        handle.result(0)
    assert (caught.value.kind, caught.value.traceback) == ("ValueError", "a traceback")
    system.pass_seconds(3)
    assert worker.take() == []


def test_an_unretryable_error_fails_the_task_at_once(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch(retries=5)
    worker.fail(*worker.take(), retryable=False)
    system.tick()
    assert handle.status() == "failed"


def test_a_returned_task_uses_up_no_retry(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    for attempt in range(1, 6):
        (task,) = worker.take()
        assert task.attempt == attempt
        worker.report(Returned(task.id, task.attempt, "drained"))
        system.tick()
    row = system.row(handle)
    assert (row["status"], row["attempt"], row["failures"], row["losses"]) == ("dispatched", 6, 0, 0)
    assert system.count("attempts") == 0


def test_a_failed_task_can_be_retried_by_hand(system: System) -> None:
    worker = system.worker()
    (handle,) = system.dispatch()
    worker.fail(*worker.take())
    system.tick()
    handle.retry()
    system.pass_seconds()
    row = system.row(handle)
    assert (row["status"], row["attempt"], row["failures"]) == ("dispatched", 2, 0)
    worker.succeed(*worker.take())
    system.tick()
    assert handle.status() == "success"
