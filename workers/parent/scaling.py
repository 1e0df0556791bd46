"""Decides how many processes a worker has, which are replaced, and when. Pure functions: no clock, no processes.

    loading ──ready──▶ working ──too old, too large──▶ worn ──successor ready──▶ draining ──▶ gone
                          └────code that does not end, new code, too many processes────▲

A worn process works until its successor is ready. Successors start one at a time, so that throughput does not stop and
memory does not double. Other draining processes get a successor at once. Draining takes as long as the longest task, so
draining processes may pile up. Then worn ones go on working; in the end capacity drops rather than memory runs out.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

_FULL_LOAD = 0.9
"""Share of busy slots at which a worker counts as full; short tasks leave small gaps."""
_CALM_LOAD = 0.8
"""Share of busy slots up to which a worker could do with one process fewer."""


_MAX_PER_WANTED = 3
"""Limit of all processes, as a multiple of the wanted number."""
_MIN_LIMIT = 8
"""Limit of all processes for small workers."""


class ChildState(Enum):
    """The state of a process, as its parent sees it."""

    LOADING = "loading"
    WORKING = "working"
    WORN = "worn"
    DRAINING = "draining"


class ScalingPlan(NamedTuple):
    """The processes to start and to retire."""

    start: int
    """Number of processes to start."""
    retire: list[int]
    """Indices, in the given list, of the processes to retire."""


def max_processes(wanted: int) -> int:
    """Return the maximum number of processes, draining ones included, for a wanted number of working ones."""
    return max(_MIN_LIMIT, _MAX_PER_WANTED * wanted)


def plan(states: Sequence[ChildState], wanted: int, limit: int) -> ScalingPlan:
    """Decide which processes retire and how many start, so that `wanted` work. `states` begins with the oldest process.

    The total, including loading and draining processes, does not exceed the limit.
    """
    worn = [index for index, state in enumerate(states) if state is ChildState.WORN]
    working = [index for index, state in enumerate(states) if state is ChildState.WORKING]
    loading = sum(state is ChildState.LOADING for state in states)
    active = len(worn) + len(working)
    draining = len(states) - active - loading
    missing = max(0, wanted - active - loading)
    if worn and active == wanted and not loading and draining < wanted:
        missing = 1
    start = min(missing, max(0, limit - len(states)))
    surplus = max(0, active - wanted)
    return ScalingPlan(start, [*worn, *reversed(working)][:surplus])


class Bounds(NamedTuple):
    """Minimum and maximum number of processes."""

    fewest: int
    most: int


def is_full(processes: int, load: float) -> bool:
    """Return whether all slots are busy. `load` is the number of busy slots, divided by the slots per process."""
    return load >= _FULL_LOAD * processes


def is_calm(processes: int, load: float) -> bool:
    """Return whether one process fewer could handle the current load."""
    return load <= _CALM_LOAD * (processes - 1)


def scaled(
    processes: int, bounds: Bounds, load: float, *, work_waits: bool, calm_for: float, scale_down_after: float
) -> int:
    """Return how many processes there should be.

    Add half of them while all slots are busy and work waits. Remove one after `scale_down_after` seconds in which one
    fewer would have done. So a short lull removes none, and a burst is met in a few steps.
    """
    if work_waits and is_full(processes, load):
        return min(bounds.most, processes + max(1, processes // 2))
    if calm_for >= scale_down_after:
        return max(bounds.fewest, processes - 1)
    return processes


class Autoscaler:
    """Computes the wanted number of processes from the load."""

    def __init__(self, bounds: Bounds, scale_down_after: float) -> None:
        self._bounds = bounds
        self._scale_down_after = scale_down_after
        self._calm_since = float("inf")
        self.wanted = bounds.fewest

    def note(self, working: int, load: float, now: float, *, work_waits: bool = False) -> bool:
        """Update the wanted number from the number of working processes and their load. Return whether it changed.

        While processes start or end, the load is ignored.
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
        """Return whether the worker would grow if work waits."""
        return working == self.wanted < self._bounds.most and is_full(working, load)
