"""How many processes a worker has, which of them are replaced, and when. Decisions only: no clock, no processes.

    loading ──ready──▶ working ──too old, too large──▶ worn ──successor ready──▶ draining ──▶ gone
                          └────code that does not end, new code, too many processes────▲

A worn process works on until its successor is ready, and successors come one at a time, so that neither throughput
stops nor memory doubles. Whatever else drains has a successor at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

_FULL = 0.9
"""Share of the slots in use from which a worker counts as full; short tasks leave small gaps."""
_COMFORT = 0.8
"""Share of the slots in use up to which a worker with one process fewer would still be at ease."""


class Standing(Enum):
    """What a process is to its parent."""

    LOADING = "loading"
    WORKING = "working"
    WORN = "worn"
    DRAINING = "draining"


class Plan(NamedTuple):
    """What is to be done about the processes."""

    start: int
    """How many to start."""
    retire: list[int]
    """Places, in the list that was given, of those that are to retire."""


def plan(standings: Sequence[Standing], wanted: int) -> Plan:
    """Decide which of these processes, oldest first, retire, and how many are started, so that `wanted` work."""
    worn = [place for place, standing in enumerate(standings) if standing is Standing.WORN]
    working = [place for place, standing in enumerate(standings) if standing is Standing.WORKING]
    loading = sum(standing is Standing.LOADING for standing in standings)
    able = len(worn) + len(working)
    start = max(0, wanted - able - loading)
    if worn and wanted and not loading and not start and able <= wanted:
        start = 1
    surplus = max(0, able - wanted)
    return Plan(start, [*worn, *reversed(working)][:surplus])


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


def scaled(processes: int, bounds: Bounds, load: float, *, work_waits: bool, calm_for: float, patience: float) -> int:
    """Return how many processes there should be.

    More, by half, while all slots are busy and work waits; one fewer after `patience` seconds in which that would have
    done. A short lull ends nothing, and a burst is met in a few steps.
    """
    if work_waits and is_full(processes, load):
        return min(bounds.most, processes + max(1, processes // 2))
    if calm_for >= patience:
        return max(bounds.fewest, processes - 1)
    return processes
