"""Steps read outputs of earlier steps: each once for all steps, and not again in the next tick."""

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
    """Return a workflow whose lower steps each read the outputs of all upper steps."""
    upper = ", ".join(f"{name}: {{task: job}}" for name in UPPERS)
    below = ", ".join(f"{name}: {{task: job, depends_on: [{', '.join(UPPERS)}], {lower}}}" for name in LOWERS)
    return f"name: join\ntasks: {{{upper}, {below}}}"


WHEN = join('when: "${u0 == u1 and u1 == u2}"')
INPUT = join('input: {number: "${u0 == u1 and u1 == u2}"}')


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Key]:
    """The keys of all outputs read from Postgres, once for each read."""
    found: list[Key] = []
    outputs = dags.outputs

    def record_keys(connection: Connection, keys: Sequence[Key]) -> dict[Key, Results]:
        found.extend(keys)
        return outputs(connection, keys)

    monkeypatch.setattr(dags, "outputs", record_keys)
    return found


def reach_lower_steps(system: System, text: str) -> tuple[RunHandle[Any], Worker]:
    """Start a run, and complete all its upper steps; the last one ends in a later tick than the others."""
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


def count_cached(system: System) -> int:
    outputs: Outputs = system.scheduler.term.runs.dags._outputs
    return len(outputs._cache)


@pytest.mark.parametrize("text", [WHEN, INPUT], ids=["conditions", "inputs"])
def test_outputs_are_read_once_although_steps_start_in_many_ticks(
    system: System, monkeypatch: pytest.MonkeyPatch, read: list[Key], text: str
) -> None:
    monkeypatch.setattr("orchestrator.domain.dag.scope.WORK_PER_TICK", 0)  # so that a tick has time for one step
    run, worker = reach_lower_steps(system, text)
    started: list[Dispatch] = []
    for number in range(1, LOWER + 1):
        system.tick()
        started += worker.take()
        assert len(started) == number
        assert count_cached(system) == (UPPER if number < LOWER else 0)
    assert sorted(steps_of(started)) == LOWERS
    assert len(read) <= UPPER, "the last of them ended in the tick that read it"
    worker.succeed(*started)
    finish(system, worker)
    assert run.status() == "success"


def test_outputs_are_read_again_after_a_failed_tick(
    system: System, monkeypatch: pytest.MonkeyPatch, read: list[Key]
) -> None:
    monkeypatch.setattr("orchestrator.domain.dag.scope.WORK_PER_TICK", 0)
    run, worker = reach_lower_steps(system, WHEN)
    system.tick()
    before = len(read)
    system.scheduler.term._rolled_back()
    assert count_cached(system) == 0
    finish(system, worker)
    assert len(read) == before + UPPER
    assert run.status() == "success"


def test_outputs_of_a_cancelled_run_leave_the_cache(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.domain.dag.scope.WORK_PER_TICK", 0)
    run, _ = reach_lower_steps(system, WHEN)
    system.tick()
    assert count_cached(system) == UPPER
    run.cancel()
    system.tick_until(lambda: row(system, run)["cancelling"])
    assert count_cached(system) == 0


def test_a_run_with_more_steps_to_start_continues_at_once(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that a report had put in this state used to wait for the next fleet check, up to a second."""
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


def test_steps_with_many_references_are_evaluated_over_several_ticks(
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
