"""A foreseen step is one message to Postgres; after a wrong forecast of the leader, nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator import RunHandle, WorkflowContext, chain
from orchestrator.domain.tasks.outcomes import Flush
from orchestrator.domain.tasks.task import Dispatch, Succeeded
from orchestrator.scheduler.leadership import TermOver
from orchestrator.sdk.code.engine import Engine
from orchestrator.store.driver import statements_sent
from orchestrator.transport.codec import encode
from tests.integration.code_stage import act, kinds
from tests.integration.stage import ONE, System, Worker
from tests.integration.test_short_ticks import fail_once, saved

LENGTH = 8


@pytest.fixture
def worker(system: System) -> Worker:
    return system.worker(knows=("job", "steps"))


def begun(system: System, worker: Worker) -> tuple[RunHandle[Any], Dispatch]:
    """Start a chain and run its first steps, so that everything is prepared; return the run and its next task."""
    run = chain([system.job.si(number) for number in range(LENGTH)]).start()
    system.settle()
    for _ in range(2):
        worker.succeed(taken(system, worker))
        system.tick()
    return run, taken(system, worker)


def taken(system: System, worker: Worker) -> Dispatch:
    system.tick_until(system.messages)
    (task,) = worker.take()
    return task


def finish(system: System, worker: Worker, run: RunHandle[Any]) -> None:
    """Report dispatched tasks as successful until the run has ended."""
    for _ in range(3 * LENGTH):
        worker.succeed(*worker.take())
        system.pass_seconds()
    assert run.status() == "success"
    done = system.sql("SELECT count(*) AS number FROM orchestrator.ended_tasks WHERE status = 'success'")
    assert done[0]["number"] == LENGTH


def test_a_step_of_a_chain_is_one_round_trip(system: System, worker: Worker) -> None:
    run, task = begun(system, worker)
    sent = []
    for _ in range(3):  # a tick that writes the counts of the last ten seconds needs more round trips
        worker.succeed(task)
        before = statements_sent()
        system.tick()
        sent.append(statements_sent() - before)
        assert saved(system) == system.scheduler.term.generations.cursor
        task = taken(system, worker)
    assert min(sent) == 1
    worker.succeed(task)
    finish(system, worker, run)


def lose(system: System, task: Dispatch) -> None:
    """Set a task back to pending without the leader's knowledge."""
    system.sql(
        "UPDATE orchestrator.tasks SET status = 'pending' WHERE id = CAST(:id AS uuid) RETURNING 1", id=task.id.hex()
    )


def test_an_outdated_success_changes_nothing(system: System, worker: Worker) -> None:
    run, task = begun(system, worker)
    lose(system, task)
    worker.succeed(task)
    failed = system.scheduler.meter.failed_ticks
    before = system.scheduler.term.generations.cursor
    system.tick()
    assert system.scheduler.meter.failed_ticks == failed
    assert before != saved(system) == system.scheduler.term.generations.cursor
    again = taken(system, worker)
    assert (again.id, again.attempt) == (task.id, task.attempt + 1)
    worker.succeed(again)
    finish(system, worker, run)


def test_a_tick_that_fails_after_its_commit_dispatches_the_step_again(
    system: System, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, task = begun(system, worker)
    fail_once(monkeypatch, system.scheduler.term.code, "attach_events")
    worker.succeed(task)
    system.tick()
    assert saved(system) == system.scheduler.term.generations.cursor
    assert not worker.take()
    system.make_old()
    system.tick_until(system.messages)
    finish(system, worker, run)


def test_a_deposed_leader_applies_no_step(system: System, worker: Worker) -> None:
    _, task = begun(system, worker)
    worker.succeed(task)
    before = saved(system)
    system.sql("UPDATE orchestrator.leases SET term = term + 1 RETURNING 1")
    with pytest.raises(TermOver):
        system.tick()
    assert saved(system) == before
    found = system.sql("SELECT id, status FROM orchestrator.tasks")
    assert [(row["id"].bytes, row["status"]) for row in found] == [(task.id, "dispatched")]


@pytest.mark.parametrize("is_foreseen", [True, False])
def test_a_turn_sent_with_its_step_counts_only_if_foreseen(
    system: System, worker: Worker, engine_: Engine, is_foreseen: bool
) -> None:
    @system.app.workflow(name="steps")
    async def steps(ctx: WorkflowContext, count: int) -> int:
        return sum([await system.job.schedule() for _ in range(count)])

    handle: Any = system.app.code_workflows["steps"].start(3)
    system.settle()
    worker.report(act(engine_, taken(system, worker)))
    system.tick()
    for number in range(2):
        (task,) = worker.take()  # waits in the queue of this worker
        assert task.run_id is not None
        turn = engine_.follow(task.run_id, task.id, ONE, lambda attempt: attempt, task.at)
        assert turn is not None
        if number and not is_foreseen:
            system.sql("UPDATE orchestrator.runs SET stuck = '{}' WHERE stuck IS NULL RETURNING 1")
        worker.held.clear()
        worker.flush(encode(Flush(worker.name, [Succeeded(task.id, task.attempt, 0.1, ONE)], [turn])))
        before = statements_sent()
        system.tick()
    if is_foreseen:
        assert statements_sent() - before == 1
    applied = kinds(system, handle).count("activation_applied")
    assert (kinds(system, handle).count("task_completed"), applied) == ((2, 3) if is_foreseen else (2, 2))
    assert saved(system) == system.scheduler.term.generations.cursor
