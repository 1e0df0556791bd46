"""Runs of many tasks, and limits of runs."""

from __future__ import annotations

from sqlalchemy import Engine

from orchestrator import Settings
from orchestrator.domain.dag.definition import Concurrency, Definition, Step
from orchestrator.transport.codec import (
    Attempt,
    Order,
)
from tests.integration.stage import KEYS, System

# -- runs


def test_a_run_of_a_thousand_tasks_ends_with_its_last_task(system: System) -> None:
    worker = system.worker(slots=1_000)
    run = system.app.start_many(system.job, range(1_000), name="thousand")
    assert run.progress().status == "pending"
    system.pass_seconds()
    assert run.progress().status == "running"
    tasks = worker.take()
    assert len({task.position for task in tasks}) == 1_000
    worker.start(*tasks[:10])
    worker.succeed(*tasks[:400])
    worker.succeed(*tasks[200:999])  # some of them twice
    system.tick(3)
    progress = run.progress()
    assert (progress.status, progress.counters.open, progress.counters.success) == ("running", 1, 999)
    worker.succeed(tasks[999])
    system.tick()
    progress = run.progress()
    assert (progress.status, progress.counters.open, progress.counters.success) == ("success", 0, 1_000)
    assert run.wait_ended(0) == "success"
    assert run.results(0) == [1] * 1_000


def test_a_retry_of_many_failures_retries_each_task_once(engine: Engine, system: System) -> None:
    """In slices: one statement for all would exceed the leader's statement timeout."""
    worker = system.worker(slots=1_000)
    run = system.app.start_many(system.job, range(350))
    system.pass_seconds()
    worker.fail(*worker.take())
    system.tick()
    assert run.progress().status == "failed"
    small = System(engine, system.redis, Settings(**{**vars(system.settings), "batch": 10}))
    small.clock, small.workers = system.clock, system.workers
    small.lead()
    small.pass_seconds()
    run.retry()
    small.pass_seconds()
    assert (run.progress().status, run.progress().counters.failed) == ("running", 250)
    worker.fail(*worker.take())  # the same request must not revive these tasks a second time
    small.tick_until(lambda: small.count("inbox") == 0)
    assert small.count("attempts") == 350
    system.lead()
    system.pass_seconds()
    assert run.progress().counters.open == 350 - run.progress().counters.failed > 0
    worker.succeed(*worker.take())
    system.pass_seconds(2)
    again = run.progress().counters
    assert (again.open, again.failed + again.success) == (0, 350)
    assert system.sql("SELECT max(attempt) AS most FROM orchestrator.ended_tasks")[0]["most"] == 2
    small.close()


def test_a_retry_without_effect_leaves_the_inbox(engine: Engine, system: System) -> None:
    """The run was cancelled after hundreds of its tasks had failed."""
    worker = system.worker(slots=1_000)
    run = system.app.start_many(system.job, range(250))
    system.pass_seconds()
    worker.fail(*worker.take()[:200])
    system.tick()
    run.cancel()
    system.tick_until(lambda: run.progress().status == "cancelled")
    small = System(engine, system.redis, Settings(**{**vars(system.settings), "batch": 10}))
    small.clock = system.clock
    small.lead()
    small.sql("INSERT INTO orchestrator.inbox (kind, target) VALUES ('retry run', :target)", target=run.id)
    small.pass_seconds(2)
    assert small.count("inbox") == 0
    assert (run.progress().status, run.progress().counters.failed) == ("cancelled", 200)
    small.close()


def test_an_empty_run_succeeds(system: System) -> None:
    run = system.app.start_many(system.job, [])
    system.pass_seconds()
    assert run.progress().status == "success"


def test_a_run_succeeds_whose_tasks_end_before_it_begins(system: System) -> None:
    """Its nudge was lost, and its tasks were claimed by a tick that did not look for new runs."""
    worker = system.worker()
    system.pass_seconds()
    run = system.app.start_many(system.job, [1, 2])
    system.redis.delete(KEYS.nudges)
    system.tick()
    tasks = worker.take()
    assert (len(tasks), run.progress().status) == (2, "pending")
    worker.succeed(*tasks)
    system.tick()
    system.pass_seconds()
    assert (run.progress().status, run.progress().counters.success) == ("success", 2)


def test_cancelling_a_run_cancels_tasks_in_every_state(system: System) -> None:
    worker = system.worker(slots=4)
    run = system.app.start_many(system.job, range(3_000))
    system.pass_seconds()
    tasks = sorted(worker.take(), key=lambda task: task.position or 0)
    worker.succeed(tasks[0])
    worker.start(tasks[1])
    system.tick()
    worker.held = [(tasks[1].id, 1)]
    run.cancel()
    system.tick_until(lambda: run.progress().status == "cancelled")
    counters = run.progress().counters
    assert (counters.total, counters.open, counters.success, counters.cancelled) == (3_000, 0, 1, 2_999)
    assert system.count("tasks") == 0
    assert Order(stop=[Attempt(tasks[1].id, 1)]) in worker.orders()
    assert worker.take() == []


def test_a_run_is_cancelled_before_it_begins(system: System) -> None:
    run = system.app.start_many(system.job, range(10))
    run.cancel()
    system.tick_until(lambda: run.progress().status == "cancelled")
    assert run.progress().counters.cancelled == 10


def test_a_run_retry_runs_only_the_failed_tasks_again(system: System) -> None:
    worker = system.worker()
    run = system.app.start_many(system.job, range(10))
    system.pass_seconds()
    tasks = worker.take()
    worker.succeed(*tasks[:6])
    worker.fail(*tasks[6:])
    system.tick()
    counters = run.progress().counters
    assert (run.progress().status, counters.success, counters.failed, counters.open) == ("failed", 6, 4, 0)
    run.retry()
    system.pass_seconds()
    counters = run.progress().counters
    assert (run.progress().status, counters.success, counters.failed, counters.open) == ("running", 6, 0, 4)
    again = worker.take()
    assert {task.id for task in again} == {task.id for task in tasks[6:]}
    assert {task.attempt for task in again} == {2}
    worker.succeed(*again)
    system.tick()
    counters = run.progress().counters
    assert (run.progress().status, counters.success, counters.open) == ("success", 10, 0)
    assert system.count("attempts") == 4


# -- lanes


def test_a_waiting_run_begins_in_the_tick_that_ends_another(system: System) -> None:
    """Not at the next full check, which may come a second later."""
    definition = Definition(
        name="one-by-one", concurrency=Concurrency(limit=1), steps=(Step(name="only", task="job", input={"number": 1}),)
    )
    system.app.workflows.apply(definition)
    worker = system.worker()
    runs = [system.app.workflows["one-by-one"].start() for _ in range(2)]
    system.pass_seconds()
    assert [run.progress().status for run in runs] == ["running", "pending"]
    worker.succeed(*worker.take())
    system.tick()
    assert [run.progress().status for run in runs] == ["success", "running"]
    assert len(worker.take()) == 1
