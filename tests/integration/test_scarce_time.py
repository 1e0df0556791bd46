"""On a shared machine, work that needs little CPU time may take long, so a tick checks the wall clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from orchestrator import RunHandle
from orchestrator.domain.dag.definition import Definition, Param, Step
from orchestrator.domain.dag.steps import StepProgram
from orchestrator.scheduler import budget
from tests.integration.stage import System

LIST = {"list": Param(type="list")}
EXPENSIVE = "${" + " and ".join(["params.list == params.list"] * 5) + "}"
ITEMS = list(range(10_000))
RUNS = 8


@pytest.fixture
def evaluated(system: System, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of steps that were decided or instantiated; each takes as long as a tick may spend on planning."""
    found: list[str] = []
    share = budget.SHARE * system.settings.lease

    def slow(original: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def slowly(self: StepProgram, *given: Any) -> Any:
            if self.step.name == "expensive":
                system.clock.now += share
            found.append(f"{kind} {self.step.name}")
            return original(self, *given)

        return slowly

    monkeypatch.setattr(StepProgram, "decide", slow(StepProgram.decide, "decide"))
    monkeypatch.setattr(StepProgram, "instances", slow(StepProgram.instances, "create"))
    return found


def apply(system: System, name: str, *steps: Step) -> None:
    system.app.workflows.apply(Definition(name=name, params=LIST if name != "cheap" else {}, steps=steps))


def ended(runs: list[RunHandle[Any]]) -> int:
    return sum(run.progress().status == "success" for run in runs)


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("decide", Step(name="expensive", task="job", when=EXPENSIVE)),
        ("create", Step(name="expensive", task="job", input={"number": EXPENSIVE})),
    ],
)
def test_a_tick_evaluates_only_few_expensive_expressions(
    system: System, evaluated: list[str], kind: str, step: Step
) -> None:
    """They used to be evaluated in one tick while CPU time was left, and took longer than the lease."""
    apply(system, "expensive", step)
    apply(system, "cheap", Step(name="a", task="job", when="${1 > 0}"))
    worker = system.worker(slots=100)
    runs = [system.app.workflows["expensive"].start(list=ITEMS) for _ in range(RUNS)]
    system.tick()
    cheap = system.app.workflows["cheap"].start()
    most, ticks = 0, 0
    while ended([*runs, cheap]) <= RUNS:
        evaluated.clear()
        system.tick()
        most = max(most, evaluated.count(f"{kind} expensive"))
        worker.beat()
        worker.succeed(*worker.take())
        ticks += 1
        assert ticks < 8 or ended([cheap]), "which does not wait for the others"
        assert ticks < 5 * RUNS
    assert most <= 2, "one for the time there is, and one for those whose turn it is"
    assert system.count("untold") == 0


def test_a_run_with_expensive_steps_progresses_step_by_step(system: System, evaluated: list[str]) -> None:
    """Deciding and creating are both expensive here; a decided step must not be postponed forever."""
    apply(system, "expensive", Step(name="expensive", task="job", when=EXPENSIVE, input={"number": EXPENSIVE}))
    worker = system.worker(slots=100)
    runs = [system.app.workflows["expensive"].start(list=ITEMS) for _ in range(4)]
    for _ in range(30):
        system.tick()
        worker.beat()
        worker.succeed(*worker.take())
        if ended(runs) == 4:
            break
    assert ended(runs) == 4


def test_new_runs_and_running_runs_take_turns(system: System, evaluated: list[str]) -> None:
    """When a tick has time for one expression, new runs do not starve older ones."""
    apply(system, "expensive", Step(name="expensive", task="job", when=EXPENSIVE))
    first = [system.app.workflows["expensive"].start(list=ITEMS) for _ in range(3)]
    worker = system.worker(slots=100)
    for _ in range(30):
        system.app.workflows["expensive"].start(list=ITEMS)
        system.tick()
        worker.beat()
        worker.succeed(*worker.take())
        if ended(first) == 3:
            break
    assert ended(first) == 3
