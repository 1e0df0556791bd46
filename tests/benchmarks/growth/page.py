"""The chart of docs/performance.md: a panel per axis, with logarithmic scales, for light and dark pages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

from tests.benchmarks.growth.axes import AXES
from tests.benchmarks.growth.growing import Costs

LINES = {
    "leader": ("CPU of the leader, µs", "#3f51b5", "#9fa8da"),
    "postgres": ("CPU of Postgres, µs", "#c2410c", "#fb923c"),
    "worker": ("CPU of the worker, µs", "#15803d", "#4ade80"),
    "pages": ("pages read", "#7e22ce", "#d8b4fe"),
    "wal": ("bytes of WAL", "#6b7280", "#9ca3af"),
    "memory": ("memory of the leader, MB", "#be185d", "#f472b6"),
}
"""The lines: title, and colors on light and dark pages."""
IMAGES = Path("docs/images")
_COLUMNS, _WIDTH, _HEIGHT, _TOP, _MARGIN = 3, 180, 140, 82, 74
_LABEL_DISTANCE = 36
"""Minimum distance of two size labels in pixels."""


def write(report: Mapping[str, Any], repository: Path) -> None:
    """Write the chart, and the figures behind it."""
    growth = report["growth"]
    (repository / IMAGES / "growth.svg").write_text(chart(growth), encoding="utf-8")
    rounded = {
        axis: {size: {name: float(f"{cost:.3g}") for name, cost in costs.items()} for size, costs in points.items()}
        for axis, points in growth.items()
    }
    text = json.dumps({**report, "growth": rounded}, indent=1)
    (repository / IMAGES / "growth.json").write_text(text + "\n", encoding="utf-8")


def chart(growth: Mapping[str, Mapping[int, Costs]]) -> str:
    """Return an SVG with a panel for each axis."""
    rows = ceil(len(growth) / _COLUMNS)
    width, height = _COLUMNS * (_WIDTH + _MARGIN) + 24, _TOP + rows * (_HEIGHT + 56)
    title = "What a task, a step or a fire costs, by how much else there is"
    lines = opening(title, width, height, LINES)
    for number, (line, (name, _, _)) in enumerate(LINES.items()):
        x, y = 16 + 235 * (number % 3), 42 + 18 * (number // 3)
        lines.append(f'<rect class="{line}" x="{x}" y="{y}" width="14" height="3"/>')
        lines.append(f'<text x="{x + 20}" y="{y + 6}">{name}</text>')
    for number, (axis, points) in enumerate(growth.items()):
        left = _MARGIN + (number % _COLUMNS) * (_WIDTH + _MARGIN)
        lines += _panel(axis, points, left, _TOP + 26 + (number // _COLUMNS) * (_HEIGHT + 56))
    return "\n".join((*lines, "</svg>\n"))


def opening(title: str, width: int, height: int, colored: Mapping[str, tuple[str, str, str]]) -> list[str]:
    """Return the beginning of a chart with lines in the given colors, in the format of `LINES`."""
    light = " ".join(f".{line} {{ stroke: {color}; fill: {color} }}" for line, (_, color, _) in colored.items())
    dark = " ".join(f".{line} {{ stroke: {color}; fill: {color} }}" for line, (_, _, color) in colored.items())
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' role="img" aria-label="{title}" font-family="system-ui, sans-serif" font-size="11">',
        f"<title>{title}</title>",
        "<style>\n.back { fill: #ffffff } text { fill: #374151 } .grid { stroke: #e5e7eb } .strong { font-weight: 600;",
        f"font-size: 14px }} polyline {{ fill: none !important; stroke-width: 1.5 }} {light}",
        "@media (prefers-color-scheme: dark) {\n  .back { fill: #161b22 } text { fill: #d1d5db }",
        f"  .grid {{ stroke: #30363d }} {dark}\n}}\n</style>",
        f'<rect class="back" width="{width}" height="{height}" rx="6"/>',
        f'<text class="strong" x="16" y="24">{title}</text>',
    ]


def _panel(axis: str, points: Mapping[int, Costs], left: int, top: int) -> list[str]:
    first, last = log10(min(points)), log10(max(points))
    costs = [point[line] for point in points.values() for line in LINES if line in point]
    low, high = floor(log10(max(1.0, min(costs)))), ceil(log10(max(costs)))

    def across(size: int) -> float:
        return round(left + _WIDTH * (log10(size) - first) / max(last - first, 1e-9), 1)

    def down(cost: float) -> float:
        return round(top + _HEIGHT * (high - log10(max(cost, 10.0**low))) / (high - low), 1)

    axis_details = AXES[axis]
    lines = [
        f'<text x="{left}" y="{top - 8}" font-weight="600">{escape(axis_details.title)}: per {axis_details.unit}</text>'
    ]
    for power in range(low, high + 1):
        y = down(10.0**power)
        lines.append(f'<line class="grid" x1="{left}" y1="{y}" x2="{left + _WIDTH}" y2="{y}"/>')
        lines.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{10**power:,}</text>')
    label_positions: list[float] = []
    for size in sorted(points, reverse=True):
        if not label_positions or label_positions[-1] - across(size) >= _LABEL_DISTANCE:
            label_positions.append(across(size))
            lines.append(
                f'<text x="{label_positions[-1]}" y="{top + _HEIGHT + 15}" text-anchor="middle">{_short(size)}</text>'
            )
    for line in LINES:
        plotted = [(across(size), down(point[line])) for size, point in points.items() if line in point]
        if plotted:
            lines.append(f'<polyline class="{line}" points="{" ".join(f"{x},{y}" for x, y in plotted)}"/>')
            lines += [f'<circle class="{line}" cx="{x}" cy="{y}" r="2"/>' for x, y in plotted]
    return lines


def _short(size: int) -> str:
    return f"{size // 1_000_000} M" if size >= 1_000_000 else f"{size // 1_000} k" if size >= 1_000 else str(size)
