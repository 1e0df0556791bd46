"""`orchestrator keys rotate-data`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import click

from orchestrator.cli.terminal.output import counted, echo
from orchestrator.cli.terminal.reading import reading
from orchestrator.errors import ConfigurationError, OrchestratorError
from orchestrator.sealing import Vault, key_name, vault_of
from orchestrator.settings import Settings, load_settings
from orchestrator.store import insights, rotation

_MOST_PASSES = 5
_AT_WORK = ("live", "draining", "still")
_MOST_NAMED = 5
"""Workers that a warning names."""


@click.command("rotate-data")
def rotate_data() -> None:
    """Seal everything that is stored with the first of the data keys: what older keys have sealed, and what is plain.

    Everything goes on meanwhile. It can be broken off at any time, and goes on when it is started again. When it has
    ended, nothing needs the older keys but what was on its way: take them out of data_keys an hour later.

    \b
    Example:
      orchestrator keys rotate-data
    """
    settings = load_settings()
    vault = vault_of(settings)
    if vault is None:
        raise ConfigurationError(
            "Setting data_keys: there is no key to seal with. Make one with: orchestrator keys generate-data"
        )
    _warn_of_workers(vault)
    changed = 0
    for _ in range(_MOST_PASSES):
        skipped, problem = 0, ""
        for shard in range(settings.shards):
            done, left, said = _pass(vault, replace(settings.of_shard(shard), shards=1))
            changed, skipped, problem = changed + done, skipped + left, said or problem
        if not skipped:
            break
    echo(f"Sealed {counted(changed, 'value')} with key {vault.key}.")
    if skipped:
        raise OrchestratorError(
            f"{counted(skipped, 'value')} could not be sealed: they were changed or locked meanwhile, or no key opens "
            f"them. Start this again.{f' The last: {problem}' if problem else ''}"
        )


def _warn_of_workers(vault: Vault) -> None:
    """Say which live workers have not got the key: what is sealed with it, they cannot run."""
    with reading() as connection:
        workers = insights.list_workers(connection)
    name = key_name(vault.key)
    lacking = [worker for worker in workers if worker.state in _AT_WORK and name not in worker.names]
    if not lacking:
        return
    named = ", ".join(f"{worker.host} pid {worker.pid}" for worker in lacking[:_MOST_NAMED])
    others = f" and {len(lacking) - _MOST_NAMED:,} more" if len(lacking) > _MOST_NAMED else ""
    echo(
        f"Warning: {counted(len(lacking), 'live worker')} without the key {vault.key}: {named}{others}. Tasks that are "
        f"sealed with it wait until a worker of their queue has it. Add the key to data_keys of every worker, in any "
        f"place, restart them, and start this again when all have it.",
        err=True,
        colour="yellow",
    )


def _pass(vault: Vault, settings: Settings) -> tuple[int, int, str]:
    changed = skipped = 0
    problem = ""
    with reading(settings) as connection, _progress(rotation.estimate(connection)) as advance:
        for step in rotation.rotate(connection, vault):
            changed, skipped, problem = changed + step.changed, skipped + step.skipped, step.problem or problem
            advance(step.table, step.seen)
    return changed, skipped, problem


def _progress(total: int) -> AbstractContextManager[Callable[[str, int], None]]:
    """Return a bar on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        return nullcontext(lambda _table, _rows: None)
    return _Bar(total)


class _Bar:
    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._progress = Progress(console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("looking", total=max(1, total))

    def __enter__(self) -> Callable[[str, int], None]:
        self._progress.start()
        return lambda table, rows: self._progress.update(self._task, description=table, advance=rows)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
