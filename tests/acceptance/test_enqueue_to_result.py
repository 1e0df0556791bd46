"""From enqueue to result, through real processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import project
import pytest
from sqlalchemy.orm import Session

from orchestrator import NotFound, ResultTimeout, RunFailed, TaskCancelled, TaskFailed, WrongState
from tests.acceptance.stack import Stack
from tests.acceptance.ways import Way, both_ways, in_database  # noqa: F401
from tests.waiting import eventually


def test_results_come_back_in_the_annotated_types(running: Stack) -> None:
    assert project.add.enqueue(2, b=3).result(60) == 5
    assert project.add_async.enqueue(2, 3).result(60) == 5
    assert project.move.options(queue="default").enqueue(project.Point(1, 2), by=3).result(60) == project.Point(4, 5)
    assert project.noop.delay().result(60) is None
    assert project.add(1, 2) == 3


def test_a_task_receives_its_context(running: Stack) -> None:
    for handle in (project.who.enqueue(label="x"), project.who.enqueue("x")):
        assert handle.result(60) == ["x", handle.id, "project.who", "1"]


def test_tasks_are_enqueued_and_awaited_asynchronously(running: Stack) -> None:
    async def main() -> list[int]:
        handles = [await project.add.aenqueue(number, number) for number in range(20)]
        return [await handle.aresult(60) for handle in handles]

    assert asyncio.run(main()) == [2 * number for number in range(20)]


def test_a_failure_carries_the_remote_error_and_traceback(running: Stack) -> None:
    with pytest.raises(TaskFailed, match="LookupError: gone") as caught:
        project.broken.enqueue("gone").result(60)
    assert caught.value.kind == "LookupError"
    assert "project.py" in caught.value.traceback
    assert "orchestrator/" not in caught.value.traceback


def test_retries_with_backoff_and_their_history(running: Stack, tmp_path: Path) -> None:
    path = str(tmp_path / "tries")
    handle = project.flaky.options(retries=3).enqueue(path, 1)
    assert handle.result(60) == 2
    rows = running.sql(
        "SELECT attempt, outcome, error->>'message' FROM orchestrator.attempts WHERE task_id = :id", id=handle.id
    )
    assert rows == [(1, "failed", "failure 1")]
    assert running.sql("SELECT attempt, failures FROM orchestrator.ended_tasks WHERE id = :id", id=handle.id) == [
        (2, 1)
    ]


def test_a_result_that_cannot_be_serialized_fails_the_task(running: Stack) -> None:
    with pytest.raises(TaskFailed, match=r"result of task 'project.unserialisable' cannot be serialised"):
        project.unserialisable.enqueue().result(60)


@pytest.mark.parametrize("task", [project.too_long, project.too_long_async, project.too_long_isolated])
def test_a_task_that_exceeds_its_timeout_fails(running: Stack, task: object) -> None:
    with pytest.raises(TaskFailed, match=r"ran longer than its timeout of 0\.3 s") as caught:
        task.enqueue().result(60)  # type: ignore[attr-defined]
    assert caught.value.kind == "orchestrator.errors.TaskTimeout"


def test_an_isolated_task_runs_outside_the_worker_processes(running: Stack) -> None:
    number, pid = project.isolated.enqueue(7).result(60)
    assert number == 7
    workers = {row[0] for row in running.sql("SELECT pid FROM orchestrator.workers")}
    assert pid not in workers


@pytest.mark.parametrize("task", [project.parent, project.parent_async, project.parent_isolated])
def test_a_task_enqueues_child_tasks(running: Stack, tmp_path: Path, task: object) -> None:
    path = tmp_path / "children"
    children = task.enqueue(str(path), 3).result(60)  # type: ignore[attr-defined]
    assert [project.app.handle(child).result(60) for child in children] == [0, 1, 2]
    assert sorted(path.read_text().split()) == ["0", "1", "2"]


def test_a_task_enqueued_on_success_exists_only_after_success(running: Stack, tmp_path: Path) -> None:
    path = tmp_path / "children"
    child = project.parent_on_success.enqueue(str(path), str(tmp_path / "tries")).result(60)
    assert project.app.handle(child).result(60) == 2
    assert path.read_text().split() == ["2"]


def test_a_task_cannot_wait_for_another_task(running: Stack) -> None:
    with pytest.raises(TaskFailed, match="A task cannot wait for another task"):
        project.waits_for_another.enqueue().result(60)


def test_a_result_timeout_does_not_affect_the_task(running: Stack, tmp_path: Path) -> None:
    go = tmp_path / "go"
    handle = project.held.enqueue(str(tmp_path / "started"), str(go))
    with pytest.raises(ResultTimeout):
        handle.result(0.2)
    go.touch()
    assert handle.result(60) > 0


def test_a_delayed_task_waits_in_postgres(running: Stack) -> None:
    late = project.add.options(delay=3600).enqueue(1, 1)
    handle = project.add.options(delay=0.5).enqueue(1, 1)
    assert handle.result(60) == 2
    waited = "SELECT started_at - created_at > interval '0.45 s' FROM orchestrator.ended_tasks WHERE id = :id"
    assert running.scalar(waited, id=handle.id) is True
    assert late.status() == "pending"
    late.cancel()


@in_database
def test_a_rolled_back_transaction_enqueues_nothing(running: Stack) -> None:
    engine = running.engine.execution_options(isolation_level="READ COMMITTED")
    with Session(engine) as session:
        gone = project.add.enqueue_in(session.connection(), 1, 1)
        session.rollback()
    with pytest.raises(NotFound):
        gone.status()
    with Session(engine) as session:
        handle = project.add.enqueue_in(session.connection(), 2, 2)
        session.commit()
    assert handle.result(60) == 4


def test_pending_and_running_tasks_are_cancelled(running: Stack, tmp_path: Path) -> None:
    waiting = project.add.options(delay=3600).enqueue(1, 1)
    waiting.cancel()
    with pytest.raises(TaskCancelled):
        waiting.result(60)
    started = tmp_path / "started"
    handle = project.held.enqueue(str(started), str(tmp_path / "never"))
    eventually(started.exists, "the task runs")
    handle.cancel()
    with pytest.raises(TaskCancelled):
        handle.result(60)
    # The code itself is stopped too, and its slot is free again.
    eventually(
        lambda: running.scalar("SELECT sum(running) FROM orchestrator.workers WHERE state = 'live'") == 0,
        "the worker has stopped the task",
    )
    handle.cancel()  # no effect on a cancelled task
    ended = project.add.enqueue(1, 2)
    assert ended.result(60) == 3
    with pytest.raises(WrongState, match="it is in state 'success'"):
        ended.cancel()


def test_a_failed_task_is_retried_by_hand(running: Stack, tmp_path: Path) -> None:
    path = tmp_path / "tries"
    handle = project.flaky.options(retries=0).enqueue(str(path), 1)
    with pytest.raises(TaskFailed):
        handle.result(60)
    handle.retry()
    assert project.app.handle(handle.id).result(60) == 2


def test_a_run_of_many_tasks_has_results_and_progress(running: Stack) -> None:
    run = project.app.start_many(project.add, [(number, 1) for number in range(500)], name="sums")
    assert run.results(60) == [number + 1 for number in range(500)]
    progress = run.progress()
    assert (progress.status, progress.counters.success, progress.fraction) == ("success", 500, 1.0)
    assert project.app.start_many(project.add, [], name="nothing").wait_ended(60) == "success"


def test_a_run_with_a_failure_fails_and_can_be_retried(running: Stack, tmp_path: Path) -> None:
    path = tmp_path / "tries"
    task = project.flaky.options(retries=0)
    run = project.app.start_many(task, [(str(path), 1)])
    assert run.wait_ended(60) == "failed"
    with pytest.raises(RunFailed, match="1 failed"):
        run.results(1)
    run.retry()
    eventually(lambda: run.progress().status == "success", "the retried run succeeds")
    assert run.progress().counters.failed == 0


def test_cancelling_a_run_cancels_all_its_tasks(running: Stack, tmp_path: Path) -> None:
    started = tmp_path / "started"
    run = project.app.start_many(project.held, [(str(started), str(tmp_path / "never"))] * 2_000)
    eventually(started.exists, "the run runs")
    run.cancel()
    assert run.wait_ended(60) == "cancelled"
    counters = run.progress().counters
    assert (counters.open, counters.cancelled) == (0, 2_000)


def test_many_tasks_are_enqueued_at_once(running: Stack) -> None:
    handles = project.app.enqueue_many(project.add, [(number, 0) for number in range(1_000)])
    assert [handle.result(60) for handle in handles] == list(range(1_000))


@pytest.mark.long
def test_the_counters_of_a_large_run_are_exact(running: Stack, way: Way) -> None:
    number = 100_000 if way == "database" else 25_000  # about the maximum of one request body
    run = project.app.start_many(project.noop, [()] * number)
    assert run.wait_ended(150) == "success"
    counters = run.progress().counters
    assert (counters.total, counters.open, counters.success) == (number, 0, number)
    ended = (
        "SELECT count(*), count(DISTINCT position), count(*) FILTER (WHERE status = 'success') "
        "FROM orchestrator.ended_tasks WHERE run_id = :id"
    )
    assert running.sql(ended, id=run.id) == [(number, number, number)]
    assert running.scalar("SELECT count(*) FROM orchestrator.tasks WHERE run_id = :id", id=run.id) == 0
