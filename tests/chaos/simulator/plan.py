"""Derives a plan from a seed: the number of actors, the actions of clients, and the faults with their times.

Faults are a plain list with their own random generator, so that a failing list can be shrunk while everything else
stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any, NamedTuple

from tests.chaos.simulator.leaders import BOUNDARIES
from tests.chaos.simulator.poison import FORMS, OPERATIONS

WORK_TIME = 5.0
"""Seconds of virtual time in which clients act."""
FAULT_TIME = 9.0
"""Seconds of virtual time in which faults happen."""


class Fault(NamedTuple):
    at: float
    kind: str
    details: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return " ".join([f"{self.at:6.3f}", self.kind, *(str(detail) for detail in self.details)])


class Action(NamedTuple):
    at: float
    kind: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The parameters of a simulation."""

    seed: int
    schedulers: int
    workers: int
    slots: int
    batch: int
    actions: tuple[Action, ...]
    faults: tuple[Fault, ...]
    shards: int = 1


_CALLS = (
    ("leader", "publish"),
    ("leader", "read"),
    ("leader", "withdraw"),
    ("leader", "order"),
    ("leader", "fleet"),
    ("leader", "messages"),
    ("leader", "begin_generation"),
    ("leader", "remove_older"),
    ("leader", "claim_term"),
    ("worker", "take"),
    ("worker", "flush"),
    ("worker", "flush"),
    ("worker", "flush"),
    ("worker", "beat"),
    ("worker", "join"),
    ("worker", "orders"),
    ("worker", "leave"),
    ("client", "nudge"),
)
_SENSITIVE_BOUNDARIES = ("after commit", "before publish", "after begin_generation")
"""Boundaries at which a fault is especially harmful; drawn more often."""
_GENERATION = ("after state", "before begin_generation", "after begin_generation", "before remove_older")
_THEMES = {
    "all": ("scheduler", "scheduler", "commit", "call", "call", "server", "worker", "worker", "clock"),
    "schedulers": ("scheduler", "scheduler", "commit", "call", "clock"),
    "workers": ("worker", "worker", "worker", "worker", "call", "redis clock"),
    "server": ("server", "server", "generation", "call"),
    "poison": ("poison", "poison", "poison", "scheduler", "worker", "call"),
}
"""Groups of faults. Related faults in one plan find more errors than unrelated ones."""
_WHILE_PLANNING = (
    ("commit refused", "yes"),
    ("before commit", "4.0"),
    ("after commit", "4.0"),
    ("after commit", "crash"),
)
"""Faults that make a leader forget its plans, or another leader take over."""
_WIDE_SEED_REMAINDER = 16
"""Remainder of the seeds, modulo 20, whose plans have a run with more steps than fit into one tick."""
_LATE_OPERATIONS = ("flush", "publish", "withdraw", "take", "order")


def plan_for(seed: int) -> Plan:
    """Return the plan of a seed."""
    world, faults, flows = Random(f"{seed} world"), Random(f"{seed} faults"), Random(f"{seed} flows")
    kinds = ("task", "task", "task", "flaky", "flaky", "long", "long", "parent", "poison", "many", "dag", "dag")
    actions = [
        Action(world.uniform(0.0, WORK_TIME), world.choice(kinds), world.randint(1, 5))
        for _ in range(world.randint(3, 7))
    ]
    requests = ("cancel task", "cancel run", "retry task", "retry run", "retry run")
    actions += [Action(world.uniform(1.0, FAULT_TIME), world.choice(requests), 1) for _ in range(world.randint(0, 4))]
    if seed % 5 in (1, 2, 3):
        actions += [Action(flows.uniform(0.0, WORK_TIME), "flow", 1) for _ in range(flows.randint(1, 3))]
    plan = Plan(
        seed=seed,
        schedulers=world.choice((1, 1, 2, 3)),
        workers=world.choice((1, 2, 2, 3, 4)),
        slots=world.choice((1, 2, 4)),
        batch=world.choice((3, 10, 1000, 1000)),
        actions=tuple(sorted(actions)),
        faults=_faults(faults),
    )
    return _with_wide_run(plan) if seed % 20 == _WIDE_SEED_REMAINDER else plan


def sharded_plan_for(seed: int) -> Plan:
    """Return the plan of a seed with one, two or four shards, and with limits and keys shared by all shards."""
    plan, random = plan_for(seed), Random(f"{seed} shards")
    shards = random.choice((1, 2, 2, 4))
    kinds = ("limited", "limited", "limited", "unique", "unique", "claimant", "scarce", "scarce")
    actions = [
        Action(random.uniform(0.0, WORK_TIME), random.choice(kinds), random.randint(4, 12))
        for _ in range(random.randint(3, 7))
    ]
    faults = plan.faults
    if seed % 4 == 0:
        shard_counts = random.sample([number for number in (1, 2, 3, 4) if number != shards], 2)
        changes = [Fault(round(random.uniform(0.2, 7.0), 3), "reshard", (number,)) for number in shard_counts]
        faults = tuple(sorted([*faults, *changes]))
    return replace(plan, shards=shards, actions=tuple(sorted([*plan.actions, *actions])), faults=faults)


def _with_wide_run(plan: Plan) -> Plan:
    """Add a run that is planned over several ticks, with leaders that fail or change in between."""
    random = Random(f"{plan.seed} wide")
    at = random.uniform(0.0, WORK_TIME)
    faults = [
        Fault(round(at + random.uniform(0.0, spread), 3), "strike", random.choice(_WHILE_PLANNING))
        for spread in (0.1, 0.3, 2.0)
    ]
    return replace(
        plan,
        batch=2,
        actions=tuple(sorted([*plan.actions, Action(at, "wide", 1)])),
        faults=tuple(sorted([*plan.faults, *faults])),
    )


def _faults(random: Random) -> tuple[Fault, ...]:
    theme = random.choice(list(_THEMES))
    return tuple(sorted(_fault(random, random.choice(_THEMES[theme])) for _ in range(random.randint(1, 8))))


def _fault(random: Random, group: str) -> Fault:
    at = round(random.uniform(0.2, FAULT_TIME), 3)
    if group == "generation":
        action = random.choice(("crash", "4.0", "8.0"))
        return Fault(at, "strike", (random.choice(_GENERATION), action))
    if group == "scheduler":
        action = "crash" if random.random() < 0.5 else str(round(random.choice((0.5, 4.0, 8.0)), 1))
        return Fault(at, "strike", (random.choice((*BOUNDARIES, *_SENSITIVE_BOUNDARIES)), action))
    if group == "poison":
        return Fault(at, "poison", (random.randrange(4), random.choice(OPERATIONS), random.choice(FORMS)))
    if group == "commit":
        return Fault(at, "strike", (random.choice(("commit refused", "commit uncertain")), "yes"))
    if group == "call":
        caller, operation = random.choice(_CALLS)
        troubles = ["refused", "unanswered"] + ["late"] * (operation in _LATE_OPERATIONS)
        return Fault(at, "call", (caller, operation, random.choice(troubles)))
    if group == "server":
        kind = random.choice(("flush all", "restart", "fail over", "lose message", "lose message", "cut off"))
        if kind == "fail over":
            return Fault(at, kind, (round(random.choice((0.0, 0.0, -2.0, 2.0)), 1),))
        if kind == "cut off":
            caller = random.choice(("worker", "worker", "leader", "all"))
            return Fault(at, kind, (caller, random.randrange(4), round(random.uniform(0.5, 10.0), 1)))
        return Fault(at, kind, (random.randrange(100),) if kind == "lose message" else ())
    if group == "redis clock":
        return Fault(at, "set clock", (random.choice((-600.0, -10.0, -2.0, 2.0, 600.0)),))
    if group == "worker":
        kind = random.choice(("kill child", "kill child", "kill machine", "sleep", "sleep", "drain", "starve"))
        if kind == "starve":
            return Fault(at, "strike", ("after take", str(random.choice((0.5, 1.5, 3.0, 5.0)))))
        seconds = (round(random.choice((1.0, 2.5, 8.0, 10.0)), 1),) if kind in ("kill machine", "sleep") else ()
        return Fault(at, kind, (random.randrange(4), *seconds))
    return Fault(at, "clock", (round(random.choice((-5.0, -1.0, 1.0, 5.0, 60.0)), 1),))
