"""Judges whether a line is flat, by the slope over its second half; single spikes have no effect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

from tests.chaos.soak.lines import Line

_MAX_POINTS = 100
"""Points that are compared in pairs, at most; more points are merged by their medians."""


class Verdict(NamedTuple):
    """The verdict on a line."""

    line: Line
    median: float
    """Median over the second half of the soak test."""
    growth: float
    """Growth over the second half of the soak test; negative for a falling line."""
    allowed: float | None

    @property
    def flat(self) -> bool:
        """Whether the growth is within the limit. A falling line is flat, and so is a line that is only displayed."""
        return self.allowed is None or self.growth <= self.allowed


def judge(line: Line, times: Sequence[float], values: Sequence[float | None]) -> Verdict | None:
    """Judge a line; return None with fewer than three points."""
    if not times:
        return None
    half = times[0] + (times[-1] - times[0]) / 2
    points = [(at, value) for at, value in zip(times, values, strict=True) if value is not None and at >= half]
    if len(points) < 3:
        return None
    middle = median(value for _, value in points)
    growth = slope(_thinned(points)) * (points[-1][0] - points[0][0])
    allowed = None if line.may_grow is None else max(line.may_grow, line.may_grow_share * middle)
    return Verdict(line, middle, growth, allowed)


def slope(points: Iterable[tuple[float, float]]) -> float:
    """Return the median slope of all pairs (Theil-Sen estimator), which tolerates outliers."""
    slopes = [
        (second_value - first_value) / (second_time - first_time)
        for (first_time, first_value), (second_time, second_value) in combinations(points, 2)
        if second_time > first_time
    ]
    return median(slopes) if slopes else 0.0


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    size = -(-len(points) // _MAX_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(median(at for at, _ in group), median(value for _, value in group)) for group in groups]
