"""Command line of the simulator: find failing seeds without pytest."""

from __future__ import annotations

import gc
import logging
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from itertools import islice
from pathlib import Path

import click
import psycopg2

from orchestrator.embedded import EmbeddedServices
from orchestrator.store import database
from tests.chaos.simulator.plan import Plan, plan_for, sharded_plan_for
from tests.chaos.simulator.postgres import SimulatedDatabase
from tests.chaos.simulator.run import simulate

_MAX_VIOLATIONS = 5
"""Violations printed per seed, at most."""


@click.command()
@click.argument("seeds", nargs=-1, required=True, metavar="SEED|FIRST-LAST...")
@click.option("--database-url", help="URL of an empty, current database; by default, a server is started.")
@click.option("--shards", is_flag=True, help="Use one, two or four shards, whose number may change.")
@click.option("--all", "go_on", is_flag=True, help="Continue after a failing seed.")
def main(seeds: Sequence[str], database_url: str | None, shards: bool, go_on: bool) -> None:
    """Run seeds until one fails. Print the failing seeds and their violations, and exit with code 1."""
    plans = [(sharded_plan_for if shards else plan_for)(number) for number in _numbers(seeds)]
    plans.sort(key=_shards)  # creating or removing a shard takes as long as many seeds
    logging.getLogger("orchestrator").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped
    with nullcontext(database_url) if database_url else _server() as url:
        simulated = SimulatedDatabase(url)
        gc.freeze()  # loaded modules stay in memory
        fail = (plan.seed for plan in plans if _fails(simulated, plan))
        failed = [*fail] if go_on else [*islice(fail, 1)]
        simulated.close()
    click.echo(f"promises are broken in seeds {failed}" if failed else f"every promise kept in {len(plans)} seeds")
    sys.exit(1 if failed else 0)


def _shards(plan: Plan) -> tuple[bool, int]:
    return any(fault.kind == "reshard" for fault in plan.faults), plan.shards


@contextmanager
def _server() -> Iterator[str]:
    folder = Path(tempfile.mkdtemp(prefix="orchestrator-simulator-"))
    folder.chmod(0o755)  # Postgres may run as another user
    try:
        with EmbeddedServices(folder / "services") as services:
            database.upgrade(services.database_url)
            with closing(psycopg2.connect(services.database_url)) as connection, connection.cursor() as cursor:
                connection.autocommit = True
                cursor.execute("ALTER SYSTEM SET fsync = off")  # truncating creates new files for each seed
                cursor.execute("SELECT pg_reload_conf()")
            yield services.database_url
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fails(simulated: SimulatedDatabase, plan: Plan) -> bool:
    violations = simulate(simulated, plan).violations
    for violation in violations[:_MAX_VIOLATIONS]:
        click.echo(f"seed {plan.seed}: {violation}")
    return bool(violations)


def _numbers(seeds: Sequence[str]) -> Iterator[int]:
    for text in seeds:
        first, _, last = text.partition("-")
        if not (first.isdecimal() and (last.isdecimal() or text == first)):
            raise click.BadParameter(f"Expected a number such as 7, or two such as 0-59; found {text!r}.")
        yield from range(int(first), int(last or first) + 1)


if __name__ == "__main__":
    main(prog_name="python -m tests.chaos.simulator")
