"""A tick that only claims, or only applies reports, is one round trip to Postgres, with all that belongs to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.scheduler.leadership import TermOver
from orchestrator.store.driver import statements_sent
from orchestrator.store.leases import Cursor
from tests.integration.stage import System, Worker


@pytest.fixture
def worker(system: System) -> Worker:
    """A worker that has completed a single task, so that all statements are prepared, and another single task is
    expected."""
    worker = system.worker(knows=("job", "after"))
    system.settle()
    system.job.enqueue()
    work(system, worker)
    return worker


def work(system: System, worker: Worker) -> None:
    """Claim ready tasks, let them succeed, and apply the reports."""
    system.tick()
    worker.succeed(*worker.take())
    system.tick()


def sent(do: Callable[[], object]) -> int:
    before = statements_sent()
    do()
    return statements_sent() - before


def saved(system: System) -> Cursor | None:
    return system.scheduler._leadership.cursor()


def test_a_claim_and_a_success_take_one_round_trip_each(system: System, worker: Worker) -> None:
    claims, ends = [], []
    for _ in range(3):  # a tick that writes the counters of the last ten seconds takes more
        handle = system.job.enqueue()
        claims.append(sent(system.tick))
        worker.succeed(*worker.take())
        ends.append(sent(system.tick))
        assert system.states(handle) == ["success"]
        assert saved(system) == system.scheduler.term.generations.cursor
    assert (min(claims), min(ends)) == (1, 1)


def dispatched(system: System, worker: Worker, task: Any) -> tuple[Any, Any]:
    """Enqueue a task and dispatch it; return its handle and its message."""
    handle = task.enqueue()
    system.tick()
    (message,) = worker.take()
    return handle, message


def test_a_success_and_a_claim_together_take_one_round_trip(system: System, worker: Worker) -> None:
    both = []
    for _ in range(3):
        first, message = dispatched(system, worker, system.job)
        worker.succeed(message)
        second = system.job.enqueue()
        both.append(sent(system.tick))
        assert system.states(first, second) == ["success", "dispatched"]
        assert saved(system) == system.scheduler.term.generations.cursor
        worker.succeed(*worker.take())
        system.tick()
    assert min(both) == 1


def test_an_obsolete_success_beside_a_claim_changes_nothing(system: System, worker: Worker) -> None:
    handle, message = dispatched(system, worker, system.job)
    system.sql(
        "UPDATE orchestrator.tasks SET status = 'pending' WHERE id = CAST(:id AS uuid) RETURNING 1", id=message.id.hex()
    )
    worker.succeed(message)
    other = system.job.enqueue()
    failed = system.scheduler.meter.failed_ticks
    system.tick()
    assert system.states(handle, other) == ["dispatched", "dispatched"]
    assert system.scheduler.meter.failed_ticks == failed
    assert saved(system) == system.scheduler.term.generations.cursor
    assert {(task.id, task.attempt) for task in worker.take()} >= {(message.id, message.attempt + 1)}


@pytest.mark.parametrize("option", ["unique_key", "on_success", "concurrency_key"])
def test_effects_of_a_success_are_committed_with_it_beside_a_claim(system: System, worker: Worker, option: str) -> None:
    after = system.app.task(name="after")(lambda: None)
    options: dict[str, dict[str, Any]] = {
        "unique_key": {"unique_key": "a"},
        "on_success": {"on_success": after},
        "concurrency_key": {"concurrency": 1, "concurrency_key": "a"},
    }
    task = system.job.options(**options[option])
    handle, message = dispatched(system, worker, task)
    worker.succeed(message)
    system.job.enqueue()
    system.tick()
    assert system.states(handle) == ["success"]
    assert saved(system) == system.scheduler.term.generations.cursor
    other = task.enqueue()
    assert other.id != handle.id
    system.tick(2)
    names = sorted(message.name for message in worker.take())
    assert names == (["after", "job", "job"] if option == "on_success" else ["job", "job"])


@pytest.mark.parametrize("option", ["unique_key", "on_success", "concurrency_key"])
def test_effects_of_a_success_are_committed_with_it(system: System, worker: Worker, option: str) -> None:
    after = system.app.task(name="after")(lambda: None)
    options: dict[str, dict[str, Any]] = {
        "unique_key": {"unique_key": "a"},
        "on_success": {"on_success": after},
        "concurrency_key": {"concurrency": 1, "concurrency_key": "a"},
    }
    task = system.job.options(**options[option])
    handle = task.enqueue()
    work(system, worker)
    assert system.states(handle) == ["success"]
    assert saved(system) == system.scheduler.term.generations.cursor
    other = task.enqueue()
    assert other.id != handle.id
    system.tick(2)
    assert {task.name for task in worker.take()} == ({"job", "after"} if option == "on_success" else {"job"})


def test_a_run_ends_with_its_last_success(system: System, worker: Worker) -> None:
    run = system.app.start_many(system.job, [(1,)])
    work(system, worker)
    assert run.status() == "success"


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    """Let the next call of a method raise."""

    def fail(*_: Any) -> None:
        monkeypatch.undo()
        raise ZeroDivisionError

    monkeypatch.setattr(owner, name, fail)


def test_claims_of_a_tick_that_fails_later_are_dispatched_again(
    system: System, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = system.job.enqueue()
    fail_once(monkeypatch, system.scheduler.term.code, "attach_events")
    system.tick()
    assert system.states(handle) == ["dispatched"]
    assert not system.messages()
    assert system.scheduler.term.dispatcher.in_flight == 1
    system.make_old()
    system.tick_until(system.messages)
    work(system, worker)
    assert system.states(handle) == ["success"]
    assert system.scheduler.term.dispatcher.in_flight == 0


def test_successes_of_a_tick_that_fails_later_are_kept(
    system: System, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = system.job.enqueue()
    system.tick()
    worker.succeed(*worker.take())
    fail_once(monkeypatch, system.scheduler.term.watch, "record")
    system.tick()
    assert system.states(handle) == ["success"]
    assert saved(system) == system.scheduler.term.generations.cursor
    assert system.scheduler.term.dispatcher.in_flight == 0
    other = system.job.enqueue()
    work(system, worker)
    assert system.states(other) == ["success"]


@pytest.mark.parametrize("ends", [False, True])
def test_a_deposed_leader_claims_nothing_and_applies_no_reports(system: System, worker: Worker, ends: bool) -> None:
    handle = system.job.enqueue()
    if ends:
        system.tick()
        worker.succeed(*worker.take())
    before, state = saved(system), system.states(handle)
    system.sql("UPDATE orchestrator.leases SET term = term + 1")
    with pytest.raises(TermOver):
        system.tick()
    assert system.states(handle) == state
    assert saved(system) == before
