"""The command line of `scripts/bench`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from tests.benchmarks.bench.rounds import Sizes
from tests.benchmarks.growth.axes import AXES
from tests.benchmarks.peers.contestants import ALL, LAYER, PEERS

QUICK = {"tasks": 2_000, "singles": 300, "probes": 60, "seconds": 2.0, "rounds": 1, "budget": 1.0, "patience": 0.0}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description="Measure speed and memory; docs/performance.md explains."
    )
    parser.add_argument(
        "--peers",
        nargs="?",
        const=",".join(PEERS),
        default="",
        metavar="NAMES",
        help=f"compare with {', '.join(PEERS)}, or with those named; {LAYER.name} is ours by Celery's API",
    )
    parser.add_argument("--write", action="store_true", help="write the tables and charts of docs/performance.md")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    parser.add_argument(
        "--rounds", type=int, help="how often each contestant goes through all passes (3, or 2 with peers)"
    )
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
        "--budget",
        type=float,
        default=Sizes.budget,
        metavar="SECONDS",
        help=f"the most for the idle latency and for each composition ({Sizes.budget:g})",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=Sizes.patience,
        metavar="SECONDS",
        help="how long to wait for a quiet machine before each turn (60)",
    )
    parser.add_argument(
        "--steps", action="store_true", help="also: workflows as code, one step after another and many at once"
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
        "--growth",
        nargs="?",
        const=",".join(AXES),
        default="",
        metavar="AXES",
        help=f"instead: how costs grow with {', '.join(AXES)}, or with those named; takes about half an hour",
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
    options.growth = [name for name in options.growth.split(",") if name]
    options.rounds = options.rounds or (2 if options.peers else 3)
    if unknown := set(options.peers) - set(ALL):
        parser.error(f"--peers: unknown: {', '.join(sorted(unknown))}. Known: {', '.join(PEERS)}.")
    if unknown := set(options.growth) - set(AXES):
        parser.error(f"--growth: unknown: {', '.join(sorted(unknown))}. Known: {', '.join(AXES)}.")
    return options
