"""Medians over the rounds, ratios to the peers, and tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.benchmarks.growth.axes import AXES

MEASURES = {
    "backlog_rate": "throughput, backlog, /s",
    "running_rate": "throughput, running, /s",
    "bulk_rate": "enqueue, bulk, /s",
    "single_rate": "enqueue, one by one, /s",
    "idle_p50": "latency idle, p50, ms",
    "idle_p99": "latency idle, p99, ms",
    "load_p50": "latency loaded, p50, ms",
    "load_p99": "latency loaded, p99, ms",
    "chain": "chain of 100, s",
    "chord": "chord of 1,000, s",
    "steps": "100 workflow steps in sequence, s",
    "fibonacci": "40 × fibonacci(10) in sequence, s",
    "busy": "others' CPU before, %",
}
"""Titles of the measures, in the order of the table."""


def medians(rounds: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the medians of a contestant's rounds; a failed round makes the whole result failed."""
    rounds = list(rounds)
    if failed := [found for found in rounds if "failed" in found]:
        return dict(failed[0])
    folded: dict[str, Any] = {name: median(found[name] for found in rounds) for name in MEASURES if name in rounds[0]}
    folded["memory"] = {
        process: median(found["memory"][process] for found in rounds)
        for process in rounds[0]["memory"]
        if all(process in found["memory"] for found in rounds)
    }
    folded["versions"] = rounds[0]["versions"]
    return folded


def ratios(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, float]:
    """Return ours ÷ theirs for each measure that both have."""
    return {name: ours[name] / theirs[name] for name in MEASURES if name != "busy" and name in ours and name in theirs}


def show(console: Console, report: Mapping[str, Any]) -> None:
    results = {name: found for name, found in report["results"].items() if "failed" not in found}
    options = report["options"]
    title = f"Medians of {options['rounds']} rounds, {options['tasks']:,} tasks, {report['machine']['cores']} cores"
    titles = [f"{name}\n{next(iter(found['versions'].values()))}" for name, found in results.items()]
    rows = [[MEASURES[name], *(_number(found.get(name)) for found in results.values())] for name in MEASURES]
    rows.append(["memory, all, MB", *(_number(sum(r["memory"].values())) for r in results.values())])
    _print(console, title, ["", *titles], rows)
    if report["ratios"]:
        ratio_rows = [
            [MEASURES[name], *(f"{found[name]:.2f}" if name in found else "" for found in report["ratios"].values())]
            for name in MEASURES
            if any(name in found for found in report["ratios"].values())
        ]
        _print(console, "Ours ÷ theirs (more is better for rates, less for times)", ["", *report["ratios"]], ratio_rows)
    if "orchestrator" in results:
        _print_pairs(console, "Memory, PSS, after the passes", "MB", results["orchestrator"]["memory"])
    if report.get("steps"):
        _print_pairs(console, "Workflows as code", "", report["steps"])
    if report.get("idle"):
        _print_pairs(console, f"Idle for {options['idle']:g} s", "% of a core", report["idle"])
    for name, found in report["results"].items():
        if "failed" in found:
            console.print(f"\n{name} {found['failed']}: {found['why']}", highlight=False, markup=False)


def show_growth(console: Console, report: Mapping[str, Any]) -> None:
    """Print the costs of a unit of work at each size."""
    for axis, points in report["growth"].items():
        names = sorted({name for costs in points.values() for name in costs})
        rows = [[f"{size:,}", *(_number(costs.get(name)) for name in names)] for size, costs in points.items()]
        _print(console, f"Per {AXES[axis].unit}, by {AXES[axis].title}", ["", *names], rows)


def _print_pairs(console: Console, title: str, unit: str, pairs: Mapping[str, float]) -> None:
    _print(console, title, ["", unit], [[name, _number(value)] for name, value in pairs.items()])


def _print(console: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table()
    for position, name in enumerate(header):
        table.add_column(name, justify="left" if position == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(f"\n{title}", highlight=False)
    console.print(table)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
