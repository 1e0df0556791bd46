"""Run a seed, and explain its failures."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.chaos.simulator.checker import check
from tests.chaos.simulator.plan import Fault, Plan, plan_for
from tests.chaos.simulator.postgres import SimulatedDatabase
from tests.chaos.simulator.shrink import shrink
from tests.chaos.simulator.world import World


class Outcome(NamedTuple):
    """The result of a simulation."""

    violations: list[str]
    history: list[str]
    digest: str
    """Digest of the history and the audit table; always equal for the same seed."""


def simulate(database: SimulatedDatabase, plan: Plan) -> Outcome:
    """Run a plan to its end, and check it."""
    world = World(database, plan)
    world.run()
    violations = world.violations if world.was_stopped else [*world.violations, *check(world)]
    audit = [
        f"{row['operation']} {row['id'].hex} {row['before']} {row['after']} {row['attempt']}"
        for row in database.sql("SELECT * FROM simulated.audit ORDER BY number")
    ]
    digest = hashlib.blake2b("\n".join([*world.history, *audit]).encode(), digest_size=8).hexdigest()
    return Outcome(violations, world.history, digest)


def explain(
    database: SimulatedDatabase, seed: int, plan_of: Callable[[int], Plan] = plan_for, more: str = ""
) -> str | None:
    """Run a seed. Return None without violations, else a report with the smallest failing list of faults."""
    plan = plan_of(seed)
    outcome = simulate(database, plan)
    if not outcome.violations:
        return None

    def fails(faults: Sequence[Fault]) -> bool:
        return bool(simulate(database, dataclasses.replace(plan, faults=tuple(faults))).violations)

    shortest = shrink(plan.faults, fails)
    last = simulate(database, dataclasses.replace(plan, faults=tuple(shortest)))
    lines = [
        f"seed {seed}: {len(outcome.violations)} violations",
        *(f"  {violation}" for violation in outcome.violations[:10]),
        f"with {plan.shards} shards, {plan.schedulers} schedulers, {plan.workers} workers of {plan.slots} slots, "
        f"batches of {plan.batch};",
        f"{len(plan.faults)} faults, of which {len(shortest)} are enough:",
        *(f"  {fault}" for fault in shortest),
        "and then:",
        *(f"  {violation}" for violation in last.violations[:10]),
        "to see it again, with all that happened (shortest list of faults):",
        f"  .venv/bin/pytest tests/chaos/test_simulator.py --seed {seed}{more}",
    ]
    return "\n".join(lines)
