"""Run a soak test: `scripts/soak --minutes 30 --faults`."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.embedded import EmbeddedServices
from orchestrator.store import database
from tests.chaos.soak import project, report
from tests.chaos.soak.faults import Misfortune, World
from tests.chaos.soak.lines import LINES
from tests.chaos.soak.load import MIX, Load
from tests.chaos.soak.machines import Machines
from tests.chaos.soak.report import SoakOutcome
from tests.chaos.soak.samples import Sampler
from tests.chaos.soak.verdict import judge

_REST_TIMEOUT = 120.0
"""Seconds within which everything must come to rest after the load and the faults."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/soak",
        description="Run a steady load for long, with faults; see whether every line stays flat.",
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="how long the load lasts (30)")
    parser.add_argument("--rate", type=float, default=100.0, help="tasks a second (100)")
    parser.add_argument("--kinds", default=",".join(MIX), help=f"which of {', '.join(MIX)} (all)")
    parser.add_argument("--faults", action="store_true", help="let something go wrong every few seconds")
    parser.add_argument("--seed", type=int, default=1, help="of the load and the faults (1)")
    parser.add_argument("--schedulers", type=int, default=2, help="how many of them; the first is never ended (2)")
    parser.add_argument("--workers", type=int, default=2, help="how many, of two processes each; so, too (2)")
    parser.add_argument("--output", type=Path, metavar="PNG", help="draw the picture here; needs the extra `soak`")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples and verdicts here")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the logs of all processes here")
    options = parser.parse_args()
    for name in ("minutes", "rate", "schedulers", "workers"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name}: expected more than zero, found {getattr(options, name)}")
    options.kinds = options.kinds.split(",")
    if unknown := set(options.kinds) - set(MIX):
        parser.error(f"--kinds: expected some of {', '.join(MIX)}, found {', '.join(sorted(unknown))}")
    if options.output is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--output: matplotlib is not installed. Run: pip install '.[soak]'")
    return options


@contextmanager
def folder_for(logs: Path | None) -> Iterator[tuple[Path, Path]]:
    """Yield a temporary folder for the servers, and a folder for logs, which stays if the user named it."""
    folder = Path(tempfile.mkdtemp(prefix="orchestrator-soak-"))
    folder.chmod(0o755)  # Postgres may have to run as another user
    log_folder = logs or folder / "logs"
    log_folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder, log_folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def soak(options: argparse.Namespace) -> SoakOutcome:
    """Start everything, sample until the end, wait for rest, and judge."""
    with folder_for(options.logs) as (folder, logs), EmbeddedServices(folder / "services") as services:
        database.upgrade(services.database_url)
        os.environ["ORCHESTRATOR_DATABASE_URL"] = services.database_url
        os.environ["ORCHESTRATOR_REDIS_URL"] = services.redis_url
        machines = Machines(logs, options.schedulers, options.workers, f"{project.__name__}:app")
        load = Load(options.rate, options.seed, options.kinds)
        misfortune = Misfortune(World(services, machines), options.seed)
        sampler = Sampler(services.database_url, services.redis_url, machines, [load.tasks, load.runs])
        with machines.running():
            began = time.monotonic()
            load.start()
            if options.faults:
                misfortune.start(began)
            try:
                watch(sampler, load, misfortune, began, options.minutes * 60)
            finally:
                if options.faults:
                    misfortune.stop()
                load.stop()
            wait_for_rest(sampler)
            unfinished = sampler.unfinished()
            sampler.close()
    verdicts = [judge(line, sampler.times, sampler.samples[line.key]) for line in LINES]
    return SoakOutcome(
        minutes=options.minutes,
        rate=options.rate,
        seed=options.seed,
        times=sampler.times,
        samples=sampler.samples,
        struck=misfortune.struck,
        verdicts=[verdict for verdict in verdicts if verdict is not None],
        enqueued=load.enqueued,
        refused=load.refused,
        unfinished=unfinished,
        fell=machines.fell,
    )


def watch(sampler: Sampler, load: Load, misfortune: Misfortune, began: float, seconds: float) -> None:
    """Take a sample each second."""
    second = 0
    while (at := time.monotonic() - began) < seconds:
        sampler.sample(at)
        if misfortune.broken is not None:
            raise RuntimeError("a fault could not be healed; the reason is above")
        p99, open_tasks = sampler.latest("p99"), sampler.latest("open_tasks")
        line = (
            f"{at / 60:5.1f} of {seconds / 60:g} min   enqueued {load.enqueued:,}   "
            f"open {open_tasks or 0:,.0f}   p99 {p99 or 0:,.0f} ms   faults {len(misfortune.struck)}"
        )
        report.show_progress(second, line + (f"   last: {misfortune.struck[-1].name}" if misfortune.struck else ""))
        second += 1
        time.sleep(max(0.0, began + second - time.monotonic()))
    print(file=sys.stderr)


def wait_for_rest(sampler: Sampler) -> None:
    """Wait until no task or run is open, or for the timeout; a later check finds leftovers."""
    deadline = time.monotonic() + _REST_TIMEOUT
    while not sampler.is_idle() and time.monotonic() < deadline:
        time.sleep(0.2)


def main() -> int:
    options = parse()
    outcome = soak(options)
    if options.json is not None:
        report.write_json(outcome, options.json)
    if options.output is not None:
        from tests.chaos.soak.picture import draw  # only the picture needs matplotlib

        draw(outcome, options.output)
    print(report.table(outcome.verdicts), report.summary(outcome), sep="\n\n")
    return 0 if outcome.good else 1


if __name__ == "__main__":
    sys.exit(main())
