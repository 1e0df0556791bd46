"""What a seed means: which faults strike when, for how long, and whom.

Faults are dealt like cards, so that none is left out for long, and they overlap: two that meet find more than two
that do not.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from random import Random
from typing import NamedTuple

from tests.chaos.real.faults import FAULTS


class Strike(NamedTuple):
    """One fault of a plan."""

    at: float
    """Seconds from the beginning."""
    kind: str
    seconds: float
    """How long until it is healed."""
    pick: int
    """Decides the victim."""

    def __str__(self) -> str:
        return f"{self.at:6.2f} {self.kind} for {self.seconds:.2f} s"


def chosen(groups: Sequence[str], *, without: Container[str]) -> list[str]:
    """Return the kinds of faults that are meant by groups or kinds, by default all but those that are not possible."""
    kinds = [kind for kind in sorted(FAULTS) if kind not in without]
    if not groups:
        return kinds
    for group in groups:
        if not any(_is_of(kind, group) for kind in FAULTS):
            known = ", ".join(dict.fromkeys(kind.partition("-")[0] for kind in sorted(FAULTS)))
            raise ValueError(f"No fault is called {group!r}. Groups: {known}. Kinds: {', '.join(sorted(FAULTS))}.")
    return [kind for kind in kinds if any(_is_of(kind, group) for group in groups)]


def plan_for(seed: int, seconds: float, kinds: Sequence[str], *, every: float, ttl: float) -> list[Strike]:
    """Return the faults of a seed, in order, each healed before the time is over."""
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


def _duration(random: Random, ttl: float, left: float) -> float:
    """Return a moment, a while that nobody need notice, or one after which everybody has."""
    most = random.choice((0.1, 0.6 * ttl, 1.5 * ttl, 2.5 * ttl))
    return min(random.uniform(0.5 * most, most), left)


def _is_of(kind: str, group: str) -> bool:
    return kind == group or kind.startswith(f"{group}-")
