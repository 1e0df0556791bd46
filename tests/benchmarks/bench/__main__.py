"""Run the benchmarks: `scripts/bench --help`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.benchmarks.bench.environments import with_environment
from tests.benchmarks.bench.idle import idle_cpu
from tests.benchmarks.bench.options import parse
from tests.benchmarks.bench.programs import Failed
from tests.benchmarks.bench.report import medians, ratios, show, show_growth
from tests.benchmarks.bench.rounds import PASSES, Sizes, run_round
from tests.benchmarks.bench.services import REPOSITORY, Services, started
from tests.benchmarks.bench.steps import stepping
from tests.benchmarks.growth import page as growth_page
from tests.benchmarks.growth.axes import AXES
from tests.benchmarks.growth.growing import grow
from tests.benchmarks.peers import page
from tests.benchmarks.peers.contestants import ALL, OURS, Contestant


def measure(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Run the measurements that the options request."""
    sizes = Sizes(**{field.name: getattr(options, field.name) for field in fields(Sizes)})
    steps = options.rounds * (len(PASSES) * (1 + len(options.peers)) + 1) + len(options.peers)
    also = (options.steps, options.idle)
    bar = progress.add_task("", total=steps + sum(map(bool, also)))
    begun = False

    def announce(step: str) -> None:
        nonlocal begun
        progress.update(bar, description=step, advance=1 if begun else 0)
        begun = True

    contestants, missing = [OURS], {}
    for name in options.peers:
        announce(f"{name}: environment")
        try:
            contestants.append(with_environment(ALL[name]))
        except Failed as error:
            missing[name] = [{"failed": "could not be installed", "why": str(error)}]
    with started() as services:
        rounds = run_rounds(contestants, services, sizes, options.rounds, announce) | missing
        medians_by_name = {name: medians(found) for name, found in rounds.items()}
        report: dict[str, Any] = {
            "date": date.today().isoformat(),
            "machine": machine(services),
            "options": {**vars(options), "json": None},
            "results": medians_by_name,
            "ratios": {name: ratios(medians_by_name[OURS.name], medians_by_name[name]) for name in options.peers},
            "rounds": rounds,
        }
        if options.steps:
            announce("workflows as code")
            report["steps"] = stepping(services)
        if options.idle:
            announce(f"idle for {options.idle:g} s")
            report["idle"] = idle_cpu(services, options.idle)
        progress.update(bar, description="done", advance=1)
        return report


def measure_growth(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Run only the growth measurements."""
    points = sum(len(AXES[axis].sizes) for axis in options.growth)
    bar = progress.add_task("", total=points)
    with started() as services:
        return {
            "date": date.today().isoformat(),
            "machine": machine(services),
            "growth": grow(
                services, options.growth, lambda step: progress.update(bar, description=step, advance=1), options.quick
            ),
        }


def run_rounds(
    contestants: Sequence[Contestant], services: Services, sizes: Sizes, rounds: int, announce: Callable[[str], None]
) -> dict[str, list[dict[str, Any]]]:
    """Let the contestants take turns in an order that rotates each round, so that noise affects all equally."""
    found: dict[str, list[dict[str, Any]]] = {contestant.name: [] for contestant in contestants}
    for number in range(rounds):
        first = number % len(contestants)
        for contestant in (*contestants[first:], *contestants[:first]):
            say_turn = partial(_announce_turn, announce, f"round {number + 1}: {contestant.name}")
            try:
                found[contestant.name].append(run_round(contestant, services, sizes, say_turn))
            except Failed as error:
                found[contestant.name].append({"failed": "failed", "why": str(error)})
    return found


def _announce_turn(announce: Callable[[str], None], turn: str, step: str) -> None:
    announce(f"{turn}: {step}")


def machine(services: Services) -> dict[str, Any]:
    """Return the properties of the machine that affect the figures."""
    return {
        "cores": os.cpu_count(),
        "processor": processor(),
        "system": platform.system(),
        "python": platform.python_version(),
        **services.versions(),
    }


def processor() -> str:
    """Return the model of the processor, or its architecture if the model is unknown."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def main() -> int:
    options = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs every `finally`: all processes are stopped
    console = Console()
    columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            report = (measure_growth if options.growth else measure)(options, progress)
    except Failed as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    (show_growth if options.growth else show)(console, report)
    is_complete = bool(options.growth) or "failed" not in report["results"][OURS.name]
    if options.write and is_complete:
        (growth_page if options.growth else page).write(report, REPOSITORY)
    options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    console.print(f"Every round is in {options.json}")
    return 0 if is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
