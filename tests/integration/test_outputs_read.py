"""What steps read of those above them: once, whoever asks, and not again in the next tick."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection

from orchestrator import RunHandle
from orchestrator.domain.tasks.task import Dispatch
from orchestrator.scheduler.dag.outputs import Outputs
from orchestrator.store.dag import plans as dags
from orchestrator.store.dag.plans import Key, Results
from tests.integration.stage import System, Worker
from tests.integration.test_dag_runs import apply, finish, row, steps_of

UPPER, LOWER = 3, 8
UPPERS = [f"u{number}" for number in range(UPPER)]
LOWERS = [f"l{number}" for number in range(LOWER)]


def join(lower: str) -> str:
    """Return a workflow whose lower steps all read what the upper ones return."""
    upper = ", ".join(f"{name}: {{task: job}}" for name in UPPERS)
    below = ", ".join(f"{name}: {{task: job, depends_on: [{', '.join(UPPERS)}], {lower}}}" for name in LOWERS)
    return f"name: join\ntasks: {{{upper}, {below}}}"


WHEN = join('when: "${u0 == u1 and u1 == u2}"')
INPUT = join('input: {number: "${u0 == u1 and u1 == u2}"}')


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Key]:
    """Every output that is read from Postgres, as often as it is."""
    found: list[Key] = []
    outputs = dags.outputs

    def reading(connection: Connection, keys: Sequence[Key]) -> dict[Key, Results]:
        found.extend(keys)
        return outputs(connection, keys)

    monkeypatch.setattr(dags, "outputs", reading)
    return found


def reach_lower_steps(system: System, text: str) -> tuple[RunHandle[Any], Worker]:
    """Start a run, and let all but the last of its upper steps have ended, in ticks before."""
    worker = system.worker(slots=50)
    system.pass_seconds()
    apply(system, text)
    run = system.app.workflows["join"].start()
    system.tick(2)
    *first, last = worker.take()
    value = msgspec.msgpack.encode("x" * 1000)
    worker.succeed(*first, result=value)
    system.tick()
    worker.succeed(last, result=value)
    return run, worker


def kept(system: System) -> int:
    outputs: Outputs = system.scheduler.term.runs.dags._outputs
    return len(outputs._cache)


@pytest.mark.parametrize("text", [WHEN, INPUT], ids=["conditions", "inputs"])
def test_what_steps_read_is_read_once_though_they_start_in_many_ticks(
    system: System, monkeypatch: pytest.MonkeyPatch, read: list[Key], text: str
) -> None:
    monkeypatch.setattr("orchestrator.domain.dag.scope.WORK_PER_TICK", 0)  # so that a tick has room for a step
    run, worker = reach_lower_steps(system, text)
    started: list[Dispatch] = []
    for number in range(1, LOWER + 1):
        system.tick()
        started += worker.take()
        assert len(started) == number
        assert kept(system) == (UPPER if number < LOWER else 0)
    assert sorted(steps_of(started)) == LOWERS
    assert len(read) <= UPPER, "the last of them ended in the tick that read it"
    worker.succeed(*started)
    finish(system, worker)
    assert run.status() == "success"


def test_what_was_read_is_read_again_after_a_tick_that_failed(
    system: System, monkeypatch: pytest.MonkeyPatch, read: list[Key]
) -> None:
    monkeypatch.setattr("orchestrator.domain.dag.scope.WORK_PER_TICK", 0)
    run, worker = reach_lower_steps(system, WHEN)
    system.tick()
    before = len(read)
    system.scheduler.term._rolled_back()
    assert kept(system) == 0
    finish(system, worker)
    assert len(read) == before + UPPER
    assert run.status() == "success"


def test_of_a_run_that_is_cancelled_nothing_is_kept(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.domain.dag.scope.WORK_PER_TICK", 0)
    run, _ = reach_lower_steps(system, WHEN)
    system.tick()
    assert kept(system) == UPPER
    run.cancel()
    system.tick_until(lambda: row(system, run)["cancelling"])
    assert kept(system) == 0


def test_a_run_that_has_more_to_start_goes_on_at_once(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, one that had so because of a report waited for the next look at the fleet, up to a second."""
    monkeypatch.setattr("orchestrator.domain.dag.scope.WORK_PER_TICK", 0)
    run, worker = reach_lower_steps(system, WHEN)
    term = system.scheduler.term
    for _ in range(LOWER - 1):
        system.tick()
        assert row(system, run)["expanding"]
        assert term.due_in == 0.0
    system.tick()
    assert not row(system, run)["expanding"]
    assert term.due_in > 0.0
    assert len(worker.take()) == LOWER


def test_steps_that_name_very_much_are_looked_at_in_several_ticks(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.scheduler.dag.outputs._MAX_REFERENCES", UPPER)
    run, worker = reach_lower_steps(system, WHEN)
    system.tick()
    first = worker.take()
    assert 0 < len(first) < LOWER
    worker.succeed(*first)
    finish(system, worker)
    assert run.status() == "success"
    assert row(system, run)["success"] == UPPER + LOWER
