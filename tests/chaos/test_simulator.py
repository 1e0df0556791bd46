"""Seeded faults against the promises of the design: nothing is lost, nothing counts twice, everything comes to rest.

.venv/bin/pytest tests/chaos/test_simulator.py                  the seeds of every build
.venv/bin/pytest tests/chaos/test_simulator.py --seeds 5000     many more
.venv/bin/pytest tests/chaos/test_simulator.py --seed 42 -s     one seed, with its trace
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence

import pytest

from orchestrator.scheduler.limits import LaneService
from orchestrator.store.runs import transitions as runs
from orchestrator.transport.leader.streams import LeaderStreams
from orchestrator.transport.worker import WorkerStreams
from tests.chaos.simulator.memory import MemoryLeaderStreams, MemoryWorkerStreams
from tests.chaos.simulator.plan import Action, Fault, Plan, plan_for, sharded_plan_for
from tests.chaos.simulator.poison import FORMS, OPERATIONS
from tests.chaos.simulator.postgres import SimulatedDatabase
from tests.chaos.simulator.run import explain, simulate
from tests.chaos.simulator.shrink import shrink

SEEDS_OF_A_BUILD = 30
SEEDS_OF_A_NIGHT = 300
SEEDS_WITH_SHARDS = 3
"""Sharded seeds of a build; each takes as long as several others."""
SLICE = 30
"""Seeds per test, so that a slow machine does not exceed the timeout of a test."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" not in metafunc.fixturenames:
        return
    seed = metafunc.config.getoption("--seed", None)
    if seed is not None:
        metafunc.parametrize("seeds", [range(seed, seed + 1)], ids=[f"seed {seed}"])
        return
    requested = metafunc.config.getoption("--seeds", None)
    number, per_build = (requested, requested) if requested else (SEEDS_OF_A_NIGHT, SEEDS_OF_A_BUILD)
    size = SEEDS_WITH_SHARDS if "shards" in metafunc.function.__name__ else SLICE
    per_build = min(per_build, requested or size)
    seed_ranges = [range(start, min(start + size, number)) for start in range(0, number, size)]
    parts = [
        pytest.param(
            part, id=f"seeds {part.start}-{part.stop - 1}", marks=[] if part.start < per_build else pytest.mark.long
        )
        for part in seed_ranges
    ]
    metafunc.parametrize("seeds", parts)


@pytest.fixture(scope="module")
def simulated(database_url: str) -> Iterator[SimulatedDatabase]:
    logger = logging.getLogger("orchestrator")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    database = SimulatedDatabase(database_url)
    yield database
    database.close()
    logger.setLevel(level)


def test_guarantees_hold_under_simulated_faults(
    simulated: SimulatedDatabase, seeds: range, request: pytest.FixtureRequest
) -> None:
    if request.config.getoption("--seed", None) is not None:
        print("", *simulate(simulated, plan_for(seeds.start)).history, sep="\n")
    failures = [found for seed in seeds if (found := explain(simulated, seed)) is not None]
    assert not failures, "\n\n".join(["", *failures])


def test_guarantees_hold_across_several_shards(
    simulated: SimulatedDatabase, seeds: range, request: pytest.FixtureRequest
) -> None:
    """One, two or four leaders, whose number may change: limits, rates and keys hold across all of their shards."""
    if request.config.getoption("--seed", None) is not None:
        print("", *simulate(simulated, sharded_plan_for(seeds.start)).history, sep="\n")
    failures = [found for seed in seeds if (found := explain(simulated, seed, sharded_plan_for, " -k shards"))]
    assert not failures, "\n\n".join(["", *failures])


def test_the_checker_finds_limits_that_shards_do_not_share(
    simulated: SimulatedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Violations that are possible only with several shards."""
    monkeypatch.setattr(LaneService, "_share", lambda *_: None)
    monkeypatch.setattr(LaneService, "_publish_usage", lambda *_: None)
    monkeypatch.setattr(runs, "_BEGIN_SHARED", runs._BEGIN_ALONE)
    world = dataclasses.replace(plan_for(0), faults=(), shards=2, workers=4, slots=4, batch=1000)
    actions = (Action(0.5, "limited", 60), Action(0.5, "scarce", 10))
    violations = simulate(simulated, dataclasses.replace(world, actions=actions)).violations
    assert {violation.split(" tasks of ")[-1].split(" ")[0] for violation in violations} >= {"narrow", "queue"}
    assert any("the rate allows" in violation for violation in violations)
    assert any("runs of a scarce workflow" in violation for violation in violations)


def test_a_second_shard_respects_limits_used_by_the_first(simulated: SimulatedDatabase) -> None:
    """A lone shard's leader does not publish its usage of limits before it restarts as one of two shards."""
    world = dataclasses.replace(plan_for(0), schedulers=1, workers=2, slots=4, batch=1000)
    actions = (Action(0.5, "limited", 40), Action(2.0, "limited", 40))
    plan = dataclasses.replace(world, actions=actions, faults=(Fault(0.8, "reshard", (2,)),))
    assert simulate(simulated, plan).violations == []


@pytest.mark.parametrize(
    "seed",
    [
        575,  # one of several runs without a plan in one tick takes too long
        20501,  # a stuck run is cancelled and cannot end
        20604,  # a stuck run cannot end by its timeout before a retry
    ],
)
def test_seeds_that_once_failed_pass(simulated: SimulatedDatabase, seed: int) -> None:
    assert explain(simulated, seed) is None


@pytest.mark.parametrize(
    "seed",
    [
        2016,  # runs wait for a limit held by a shard that is given up
        2104,  # a shard is closed while all leases have expired
        2464,  # a leader without writes does not notice that another has replaced it
        10267,  # a poisoned run is not stuck yet; another run of its group is stuck, and a slot is free
        23556,  # a poisoned flow has ended, and keeps its signal for a retry
    ],
)
@pytest.mark.long_for("10267", "23556")
def test_sharded_seeds_that_once_failed_pass(simulated: SimulatedDatabase, seed: int) -> None:
    assert explain(simulated, seed, sharded_plan_for, " -k shards") is None


@pytest.mark.parametrize("plan_of", [plan_for, sharded_plan_for])
@pytest.mark.parametrize("seed", [3, 11, 71, 153])
@pytest.mark.long_for("3", "11", "153")
def test_a_seed_is_deterministic(simulated: SimulatedDatabase, seed: int, plan_of: Callable[[int], Plan]) -> None:
    assert simulate(simulated, plan_of(seed)) == simulate(simulated, plan_of(seed))


def test_a_seed_does_not_depend_on_earlier_simulations(simulated: SimulatedDatabase) -> None:
    """Shards of the previous simulation are removed, not only closing."""
    alone = simulate(simulated, sharded_plan_for(2364))
    simulate(simulated, dataclasses.replace(plan_for(0), actions=(), faults=(), shards=4))
    assert simulate(simulated, sharded_plan_for(2364)) == alone


def test_simulations_without_faults_have_no_violations(simulated: SimulatedDatabase) -> None:
    for seed in range(5):
        outcome = simulate(simulated, dataclasses.replace(plan_for(seed), faults=()))
        assert not outcome.violations
        assert not any("FAULT" in line for line in outcome.history)


_SEEDS_OF_POISON = dict.fromkeys(OPERATIONS, 15) | {"expand": 36, "stop": 20, "reopen": 67, "request": 20}
"""Seeds whose clients apply the poisoned operation to the first run."""


@pytest.mark.parametrize("form", FORMS)
def test_every_poisoned_operation_makes_only_its_run_stuck(simulated: SimulatedDatabase, form: str) -> None:
    """Other runs end; the poisoned run is stuck with a reason, and has exact counters after its retry."""
    for operation, seed in _SEEDS_OF_POISON.items():
        plan = dataclasses.replace(plan_for(seed), faults=(Fault(0.2, "poison", (0, operation, form)),))
        outcome = simulate(simulated, plan)
        assert not outcome.violations, (operation, outcome.violations)
        assert any(f"poison: {operation}" in line for line in outcome.history), f"nobody met the poison: {operation}"


@pytest.mark.parametrize(("kind", "operations"), [("dag", ("create", "count")), ("flow", ("advance", "count"))])
def test_poison_harms_no_other_run_of_the_same_tick(
    simulated: SimulatedDatabase, kind: str, operations: Sequence[str]
) -> None:
    """The leader rolls back all plans of the tick, and plans the other runs again as for the first time."""
    world = dataclasses.replace(plan_for(15), schedulers=1, workers=2, slots=4, batch=1_000)
    for operation in operations:
        plan = dataclasses.replace(
            world,
            actions=(Action(0.3, kind, 3),) * 4,
            faults=(Fault(0.2, "poison", (1, operation, "defect")),),
        )
        outcome = simulate(simulated, plan)
        assert not outcome.violations, (operation, outcome.violations)
        assert any(f"poison: {operation}" in line for line in outcome.history), f"nobody met the poison: {operation}"


def test_shrinking_finds_a_minimal_list_of_faults() -> None:
    attempts: list[list[int]] = []

    def fails(items: object) -> bool:
        assert isinstance(items, list)
        attempts.append(items)
        return 3 in items and 7 in items

    assert shrink(range(10), fails) == [3, 7]
    assert len(attempts) < 40


@pytest.mark.parametrize(
    ("real", "memory"), [(LeaderStreams, MemoryLeaderStreams), (WorkerStreams, MemoryWorkerStreams)]
)
def test_in_memory_streams_match_the_signatures_of_real_streams(real: type, memory: type) -> None:
    def methods(kind: type) -> dict[str, str]:
        found = inspect.getmembers(kind, inspect.isfunction)
        return {name: str(inspect.signature(function)) for name, function in found if not name.startswith("_")}

    requested = methods(real)
    requested.pop("listen_applied", None)  # uses a thread of its own; receipts carry the same information
    assert requested.items() <= methods(memory).items()
