"""Derives a plan from a seed: the faults, their times, durations and targets.

Faults are dealt like cards: each kind occurs once before any repeats. They overlap, because two simultaneous faults
reveal more errors than separate ones.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from random import Random
from typing import NamedTuple

from tests.chaos.real.faults import FAULTS


class Strike(NamedTuple):
    """A planned fault."""

    at: float
    """Seconds since the start."""
    kind: str
    seconds: float
    """Seconds until the fault is healed."""
    pick: int
    """Seed for the choice of the target."""

    def __str__(self) -> str:
        return f"{self.at:6.2f} {self.kind} for {self.seconds:.2f} s"


def chosen(groups: Sequence[str], *, without: Container[str]) -> list[str]:
    """Return the kinds of faults that `groups` (groups or kinds) name, by default all, except `without`."""
    kinds = [kind for kind in sorted(FAULTS) if kind not in without]
    if not groups:
        return kinds
    for group in groups:
        if not any(_matches(kind, group) for kind in FAULTS):
            known = ", ".join(dict.fromkeys(kind.partition("-")[0] for kind in sorted(FAULTS)))
            raise ValueError(f"No fault is called {group!r}. Groups: {known}. Kinds: {', '.join(sorted(FAULTS))}.")
    return [kind for kind in kinds if any(_matches(kind, group) for group in groups)]


def plan_for(seed: int, seconds: float, kinds: Sequence[str], *, every: float, ttl: float) -> list[Strike]:
    """Return the faults of a seed by time; each is healed before the end."""
    random = Random(f"{seed} faults")
    deck = _deal(random, kinds)
    plan: list[Strike] = []
    at = 0.5
    while kinds and at < seconds - 0.5:
        plan.append(Strike(at, next(deck), _duration(random, ttl, seconds - at), random.getrandbits(32)))
        at += random.uniform(0.2, 1.8) * every
    return plan


def _deal(random: Random, kinds: Sequence[str]) -> Iterator[str]:
    while True:
        yield from random.sample(kinds, len(kinds))


def _duration(random: Random, ttl: float, remaining: float) -> float:
    """Return a random duration: very short, below the worker TTL, or above it."""
    longest = random.choice((0.1, 0.6 * ttl, 1.5 * ttl, 2.5 * ttl))
    return min(random.uniform(0.5 * longest, longest), remaining)


def _matches(kind: str, group: str) -> bool:
    return kind == group or kind.startswith(f"{group}-")
