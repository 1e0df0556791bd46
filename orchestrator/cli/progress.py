"""A run's progress, while it lasts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from orchestrator.cli.output import console
from orchestrator.domain.states import ENDED_RUN_STATES
from orchestrator.store.insights import RunView

_INTERVAL = 0.25


def watch_run(look: Callable[[], RunView], *, quiet: bool = False) -> RunView:
    """Show a run until it ends: a bar on a terminal, else a line for every change; return how it ended."""
    if quiet:
        return _follow(look, lambda _: None)
    if sys.stdout.isatty():
        return _with_bar(look)
    return _follow(look, lambda run: click.echo(_line(run)))


def _with_bar(look: Callable[[], RunView]) -> RunView:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[remark]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console()) as progress:
        bar = progress.add_task("", remark="")

        def show(run: RunView) -> None:
            progress.update(
                bar, description=run.name, total=run.total, completed=run.total - run.open, remark=_remark(run)
            )

        return _follow(look, show)


def _follow(look: Callable[[], RunView], show: Callable[[RunView], None]) -> RunView:
    shown: RunView | None = None
    while True:
        run = look()
        if run != shown:
            show(run)
            shown = run
        if run.status in ENDED_RUN_STATES:
            return run
        time.sleep(_INTERVAL)


def _line(run: RunView) -> str:
    return f"{run.name} {run.total - run.open}/{run.total} {_remark(run)}"


def _remark(run: RunView) -> str:
    troubles = [
        f"{count} {what}"
        for what, count in (("failed", run.failed), ("cancelled", run.cancelled), ("skipped", run.skipped))
        if count
    ]
    return ", ".join([run.status, *troubles])
