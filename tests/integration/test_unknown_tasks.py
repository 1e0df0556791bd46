"""Tasks that no live worker knows."""

from __future__ import annotations

import pytest

from orchestrator import TaskFailed
from orchestrator.domain.executors.record import announced, decode_record, execution_name
from orchestrator.domain.executors.registry import call_of
from orchestrator.domain.tasks.task import Returned, parse_options
from orchestrator.executors import Rq
from orchestrator.sealing import key_name
from tests.integration.stage import System


def test_an_unknown_task_is_held_until_a_worker_knows_its_name(system: System) -> None:
    worker = system.worker()
    other = system.app.task(name="other")(lambda: None)
    handle = other.enqueue()
    system.pass_seconds(2)
    row = system.row(handle)
    assert (row["status"], row["hold"], row["failures"]) == ("pending", "unknown", 0)
    assert worker.take() == []
    newer = system.worker("w2", knows=["job", "other"])
    system.pass_seconds(2)
    row = system.row(handle)
    assert (row["status"], row["hold"]) == ("dispatched", None)
    newer.succeed(*newer.take())
    system.tick()
    assert handle.status() == "success"


def test_a_worker_returns_an_unknown_task_without_a_failure(system: System) -> None:
    """The worker may have announced the name, or be of a release whose report does not name what it lacks."""
    old = system.worker("old", knows=["job", "other"])
    handle = system.app.task(name="other")(lambda: None).enqueue()
    system.pass_seconds()
    (task,) = old.take()
    old.report(Returned(task.id, task.attempt, "unknown task", 0.5))
    system.tick()
    row = system.row(handle)
    assert (row["status"], row["failures"], row["hold"]) == ("pending", 0, None)
    system.lead(offset=1)
    system.pass_seconds()
    old.succeed(*old.take())
    system.tick()
    row = system.row(handle)
    assert (row["status"], row["attempt"]) == ("success", 2)


KEYED = ["job", key_name("2026-11")]


def test_a_missing_data_key_holds_only_the_tasks_that_need_it(system: System) -> None:
    worker = system.worker(knows=KEYED)
    stray = system.job.enqueue()
    system.pass_seconds()
    (task,) = worker.take()
    worker.report(Returned(task.id, task.attempt, "no data key", 0.5, data_key="stray"))
    system.tick()
    row = system.row(stray)
    assert (row["status"], row["failures"], row["hold"]) == ("pending", 0, "no data key: stray")
    healthy = system.job.enqueue()
    system.pass_seconds(5)
    worker.succeed(*worker.take())
    system.tick()
    assert healthy.status() == "success", "it has the same name, and another key"
    system.lead(offset=10)  # the next leader continues from the stored state
    newer = system.worker("w2", knows=[*KEYED, key_name("stray")])
    system.pass_seconds(2)
    row = system.row(stray)
    assert (row["status"], row["hold"]) == ("dispatched", None)
    for each in (worker, newer):
        each.succeed(*each.take())
    system.tick()
    assert stray.status() == "success"


def test_a_task_fails_and_names_its_missing_data_key_after_the_timeout(system: System) -> None:
    worker = system.worker(knows=[*KEYED, "*:*"])
    stray = system.job.enqueue()
    system.pass_seconds()
    (task,) = worker.take()
    worker.report(Returned(task.id, task.attempt, "no data key", 0.5, data_key="stray"))
    system.tick()
    system.lead(offset=system.settings.unknown_task_timeout - 100)
    system.pass_seconds(2)
    assert stray.status() == "pending"
    system.lead(offset=system.settings.unknown_task_timeout + 10)
    system.pass_seconds()
    assert system.row(stray)["reason"] == "no data key"
    with pytest.raises(TaskFailed, match=r"No live worker of queue 'default' has data key 'stray'"):
        stray.result(0)


def test_an_unknown_task_fails_after_the_timeout_and_lists_known_names(system: System) -> None:
    beside = ["--database", "*:*", "@executor:process", key_name("old"), "orchestrator.webhook", "trip", "trip@2"]
    system.worker(knows=["job", "jobs.more", *beside])
    system.worker("w2", knows=["job", "elsewhere"], queue="elsewhere")
    handle = system.app.task(name="other")(lambda: None).enqueue()
    system.pass_seconds(2)
    system.lead(offset=system.settings.unknown_task_timeout - 100)
    system.pass_seconds(2)
    assert handle.status() == "pending"
    system.lead(offset=system.settings.unknown_task_timeout + 10)
    system.pass_seconds()
    assert system.row(handle)["reason"] == "unknown task"
    with pytest.raises(TaskFailed, match=r"queue 'default' knows the task 'other'. They know: job, jobs.more\."):
        handle.result(0)


def test_a_worker_that_learns_a_name_just_in_time_saves_the_task(system: System) -> None:
    worker = system.worker()
    handle = system.app.task(name="other")(lambda: None).enqueue()
    system.pass_seconds(2)
    worker.learn("other")
    system.lead(offset=system.settings.unknown_task_timeout + 10)
    system.pass_seconds()
    assert handle.status() == "dispatched"


def test_a_held_task_can_be_cancelled(system: System) -> None:
    system.worker()
    handle = system.app.task(name="other")(lambda: None).enqueue()
    system.pass_seconds(2)
    handle.cancel()
    system.pass_seconds()
    assert handle.status() == "cancelled"


def test_a_task_is_held_when_its_executor_cannot_run_on_the_worker(system: System) -> None:
    """The worker announced the executor and then finds that it lacks it: equal workers are not asked again."""
    means = announced("rq MINE")
    old = system.worker("old", knows=["job", means], executions=10)
    task = system.app.task(name="other", executor=Rq(function="a:b", url_variable="MINE"))(lambda: None)
    handle = task.enqueue()
    for _ in range(2):  # dispatched again by the tick that applies the return
        system.pass_seconds()
        (sent,) = old.take()
        old.report(Returned(sent.id, sent.attempt, "its executor cannot run on this worker", 0.0, means))
    system.pass_seconds(5)
    row = system.row(handle)
    assert (row["status"], row["failures"], row["hold"]) == ("pending", 0, "no executor: rq MINE")
    assert old.take() == []
    newer = system.worker("new", knows=["job", "more", means], executions=10)
    system.pass_seconds(2)
    newer.succeed(*newer.take())
    system.tick()
    assert handle.status() == "success"


def test_a_task_enqueued_by_name_runs_on_the_executor_its_worker_knows(system: System) -> None:
    call = Rq(function="a:b", url_variable="MINE")
    means = announced("rq MINE")
    worker = system.worker("w1", knows=["job", "other", means], executions=10)
    handle = system.app.task(name="other", timeout=60)(lambda: None).enqueue()
    system.pass_seconds()
    (sent,) = worker.take()
    worker.report(Returned(sent.id, sent.attempt, "an executor runs it", 0.5, executor=call_of(call)))
    worker.report(Returned(sent.id, sent.attempt, "an executor runs it", 0.5, executor=call_of(call)))
    system.tick()
    (again,) = worker.take()
    options = parse_options(again.options)
    assert (options.executor, options.timeout) == (call_of(call), 60)
    record = decode_record(again.details)
    assert record is not None
    assert record.name == execution_name(again.id, again.attempt)
    assert system.row(handle)["failures"] == 0
    worker.succeed(again)
    system.tick()
    assert handle.status() == "success"
