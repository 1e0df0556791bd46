"""Run the benchmarks: `scripts/bench --help`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.benchmarks.bench.contestants import OURS, PEERS, Contestant
from tests.benchmarks.bench.environments import with_environment
from tests.benchmarks.bench.idle import idle_cpu
from tests.benchmarks.bench.million import pending_memory
from tests.benchmarks.bench.programs import Failed
from tests.benchmarks.bench.report import medians, ratios, show
from tests.benchmarks.bench.rounds import PASSES, Sizes, run_round
from tests.benchmarks.bench.services import Services, started

QUICK = {"tasks": 2_000, "singles": 300, "probes": 60, "seconds": 2.0, "rounds": 1}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description="Measure speed and memory; docs/performance.md explains."
    )
    parser.add_argument(
        "--peers",
        nargs="?",
        const=",".join(PEERS),
        default="",
        metavar="NAMES",
        help=f"compare with {', '.join(PEERS)}, or with those named",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    parser.add_argument("--rounds", type=int, default=3, help="how often each contestant goes through all passes (3)")
    parser.add_argument(
        "--tasks", type=int, default=Sizes.tasks, help=f"tasks for each throughput pass ({Sizes.tasks:,})"
    )
    parser.add_argument(
        "--singles", type=int, default=Sizes.singles, help=f"tasks enqueued one by one ({Sizes.singles:,})"
    )
    parser.add_argument("--probes", type=int, default=Sizes.probes, help=f"tasks for the idle latency ({Sizes.probes})")
    parser.add_argument(
        "--rate", type=float, default=Sizes.rate, help=f"tasks/s for the latency under load ({Sizes.rate:g})"
    )
    parser.add_argument(
        "--seconds", type=float, default=Sizes.seconds, help=f"how long that load lasts ({Sizes.seconds:g})"
    )
    parser.add_argument(
        "--million",
        type=int,
        nargs="?",
        const=1_000_000,
        default=0,
        metavar="TASKS",
        help="also: the scheduler's memory with a million tasks pending",
    )
    parser.add_argument(
        "--idle",
        type=float,
        nargs="?",
        const=60.0,
        default=0.0,
        metavar="SECONDS",
        help="also: CPU of an idle scheduler and worker over 60 s",
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=Path(f"bench-{date.today()}.json"),
        metavar="FILE",
        help="where the numbers go (bench-<date>.json)",
    )
    options = parser.parse_args(arguments)
    if options.quick:
        for name, value in QUICK.items():
            setattr(options, name, value)
    options.peers = [name for name in options.peers.split(",") if name]
    if unknown := set(options.peers) - set(PEERS):
        parser.error(f"--peers: unknown: {', '.join(sorted(unknown))}. Known: {', '.join(PEERS)}.")
    return options


def measure(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Do all that was asked for."""
    sizes = Sizes(**{name: getattr(options, name) for name in ("tasks", "singles", "probes", "rate", "seconds")})
    steps = options.rounds * (len(PASSES) * (1 + len(options.peers)) + 1) + len(options.peers)
    bar = progress.add_task("", total=steps + bool(options.million) + bool(options.idle))
    begun = False

    def say(what: str) -> None:
        nonlocal begun
        progress.update(bar, description=what, advance=1 if begun else 0)
        begun = True

    contestants = [OURS]
    for name in options.peers:
        say(f"{name}: environment")
        contestants.append(with_environment(PEERS[name]))
    with started() as services:
        rounds = run_rounds(contestants, services, sizes, options.rounds, say)
        folded = {name: medians(found) for name, found in rounds.items()}
        report: dict[str, Any] = {
            "date": date.today().isoformat(),
            "machine": machine(services),
            "options": {**vars(options), "json": None},
            "results": folded,
            "ratios": {name: ratios(folded[OURS.name], folded[name]) for name in options.peers},
            "rounds": rounds,
        }
        if options.million:
            say(f"{options.million:,} tasks pending")
            report["million"] = pending_memory(services, options.million)
        if options.idle:
            say(f"idle for {options.idle:g} s")
            report["idle"] = idle_cpu(services, options.idle)
        progress.update(bar, description="done", advance=1)
        return report


def run_rounds(
    contestants: Sequence[Contestant], services: Services, sizes: Sizes, rounds: int, say: Callable[[str], None]
) -> dict[str, list[dict[str, Any]]]:
    """Let the contestants take turns, another one first in each round, so that noise hits all alike."""
    found: dict[str, list[dict[str, Any]]] = {contestant.name: [] for contestant in contestants}
    for number in range(rounds):
        first = number % len(contestants)
        for contestant in (*contestants[first:], *contestants[:first]):
            prefix = f"round {number + 1}: {contestant.name}: "
            found[contestant.name].append(run_round(contestant, services, sizes, lambda what, p=prefix: say(p + what)))
    return found


def machine(services: Services) -> dict[str, Any]:
    """Return what the numbers depend on."""
    return {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        **services.versions(),
    }


def main() -> int:
    """Measure, print, write."""
    options = parse(sys.argv[1:])
    console = Console()
    columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            report = measure(options, progress)
    except Failed as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    show(console, report)
    options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    console.print(f"Every round is in {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
