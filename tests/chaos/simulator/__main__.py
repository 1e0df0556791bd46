"""The simulator without pytest, for those who only want to know which seed fails."""

from __future__ import annotations

import logging
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import click

from orchestrator.embedded import EmbeddedServices
from orchestrator.store import database
from tests.chaos.simulator.plan import plan_for
from tests.chaos.simulator.postgres import SimulatedDatabase
from tests.chaos.simulator.run import simulate

_SHOWN = 5
"""Of what is wrong with a seed."""


@click.command()
@click.argument("seeds", nargs=-1, required=True, metavar="SEED|FIRST-LAST...")
@click.option("--database-url", help="Of an empty database with the current schema; by default, a server is started.")
def main(seeds: Sequence[str], database_url: str | None) -> None:
    """Run seeds until one fails; say which, and what is wrong. The exit code is 1 then."""
    numbers = list(_numbers(seeds))
    logging.getLogger("orchestrator").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    with nullcontext(database_url) if database_url else _server() as url:
        simulated = SimulatedDatabase(url)
        failed = any(_fails(simulated, seed) for seed in numbers)
        simulated.close()
    if not failed:
        click.echo(f"every promise kept in {len(numbers)} seeds")
    sys.exit(1 if failed else 0)


@contextmanager
def _server() -> Iterator[str]:
    folder = Path(tempfile.mkdtemp(prefix="orchestrator-simulator-"))
    folder.chmod(0o755)  # Postgres may run as another user
    try:
        with EmbeddedServices(folder / "services") as services:
            database.upgrade(services.database_url)
            yield services.database_url
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fails(simulated: SimulatedDatabase, seed: int) -> bool:
    violations = simulate(simulated, plan_for(seed)).violations
    for violation in violations[:_SHOWN]:
        click.echo(f"seed {seed}: {violation}")
    return bool(violations)


def _numbers(seeds: Sequence[str]) -> Iterator[int]:
    for text in seeds:
        first, _, last = text.partition("-")
        if not (first.isdecimal() and (last.isdecimal() or text == first)):
            raise click.BadParameter(f"Expected a number such as 7, or two such as 0-59; found {text!r}.")
        yield from range(int(first), int(last or first) + 1)


if __name__ == "__main__":
    main(prog_name="python -m tests.chaos.simulator")
