"""How many processes a worker has, which of them are replaced, and when. Decisions only: no clock, no processes.

    loading ──ready──▶ working ──too old, too large──▶ worn ──successor ready──▶ draining ──▶ gone
                          └────code that does not end, new code, too many processes────▲

A worn process works on until its successor is ready, and successors come one at a time, so that neither throughput
stops nor memory doubles. Whatever else drains has a successor at once. A process drains for as long as its longest task
takes, so draining ones may pile up: worn ones then work on, and in the end capacity is given up rather than memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

_FULL = 0.9
"""Share of the slots in use from which a worker counts as full; short tasks leave small gaps."""
_COMFORT = 0.8
"""Share of the slots in use up to which a worker with one process fewer would still be at ease."""


_PROCESSES_PER_WANTED = 3
"""Times as many processes as are wanted, beyond which none is started."""
_LEAST_PROCESSES = 8
"""Processes that there may be in any case."""


class ChildState(Enum):
    """The state of a process for its parent."""

    LOADING = "loading"
    WORKING = "working"
    WORN = "worn"
    DRAINING = "draining"


class ScalingPlan(NamedTuple):
    """Changes of the processes."""

    start: int
    """How many to start."""
    retire: list[int]
    """Places, in the list that was given, of those that are to retire."""


def most_processes(wanted: int) -> int:
    """Return how many processes there may be in all, so that `wanted` work."""
    return max(_LEAST_PROCESSES, _PROCESSES_PER_WANTED * wanted)


def plan(states: Sequence[ChildState], wanted: int, most: int) -> ScalingPlan:
    """Decide which of these processes, oldest first, retire, and how many are started, so that `wanted` work.

    With those that load and drain there are never more than `most`.
    """
    worn = [place for place, state in enumerate(states) if state is ChildState.WORN]
    working = [place for place, state in enumerate(states) if state is ChildState.WORKING]
    loading = sum(state is ChildState.LOADING for state in states)
    able = len(worn) + len(working)
    draining = len(states) - able - loading
    missing = max(0, wanted - able - loading)
    if worn and able == wanted and not loading and draining < wanted:
        missing = 1
    start = min(missing, max(0, most - len(states)))
    surplus = max(0, able - wanted)
    return ScalingPlan(start, [*worn, *reversed(working)][:surplus])


class Bounds(NamedTuple):
    """Fewest and most processes."""

    fewest: int
    most: int


def is_full(processes: int, load: float) -> bool:
    """Say whether all slots are busy; `load` is how many processes' worth of slots are in use."""
    return load >= _FULL * processes


def is_calm(processes: int, load: float) -> bool:
    """Say whether one process fewer could do what is done now."""
    return load <= _COMFORT * (processes - 1)


def scaled(
    processes: int, bounds: Bounds, load: float, *, work_waits: bool, calm_for: float, scale_down_after: float
) -> int:
    """Return how many processes there should be.

    More, by half, while all slots are busy and work waits; one fewer after `scale_down_after` s in which it would have
    done. A short lull ends nothing, and a burst is met in a few steps.
    """
    if work_waits and is_full(processes, load):
        return min(bounds.most, processes + max(1, processes // 2))
    if calm_for >= scale_down_after:
        return max(bounds.fewest, processes - 1)
    return processes


class Autoscaler:
    """How many processes are wanted, as load comes and goes."""

    def __init__(self, bounds: Bounds, scale_down_after: float) -> None:
        self._bounds = bounds
        self._scale_down_after = scale_down_after
        self._calm_since = float("inf")
        self.wanted = bounds.fewest

    def note(self, working: int, load: float, now: float, *, work_waits: bool = False) -> bool:
        """Take in how many processes work at this moment and how busy they are; say whether another number is wanted.

        While processes come or go, the load says nothing yet.
        """
        if working != self.wanted:
            return False
        self._calm_since = min(self._calm_since, now) if is_calm(working, load) else float("inf")
        calm_for = now - self._calm_since
        wanted = scaled(
            working,
            self._bounds,
            load,
            work_waits=work_waits,
            calm_for=calm_for,
            scale_down_after=self._scale_down_after,
        )
        if wanted == self.wanted:
            return False
        self.wanted = wanted
        self._calm_since = float("inf")
        return True

    def could_use_more(self, working: int, load: float) -> bool:
        """Say whether it matters if work waits."""
        return working == self.wanted < self._bounds.most and is_full(working, load)
