"""`orchestrator runs`."""

from __future__ import annotations

import sys
from uuid import UUID

import click
from rich.text import Text
from sqlalchemy import Connection

from orchestrator.cli.options import json_option, page_options, status_option
from orchestrator.cli.output import print_fields, print_json, print_table, state
from orchestrator.cli.progress import watch_run
from orchestrator.cli.reading import reading
from orchestrator.cli.sending import sending
from orchestrator.cli.times import ago, between, present, when
from orchestrator.domain.states import RunState
from orchestrator.errors import NotFound
from orchestrator.store import insights
from orchestrator.store.insights import RunFilter, RunView


@click.group("runs")
def command() -> None:
    """Look at runs, watch, cancel and retry them.

    \b
    Example:
      orchestrator runs list --status running
    """


@command.command("list")
@status_option(RunState)
@click.option("--name", help="Only of this name.")
@page_options
@json_option
def list_(statuses: tuple[str, ...], name: str | None, limit: int, before: UUID | None, as_json: bool) -> None:
    """List runs, newest first.

    \b
    Example:
      orchestrator runs list --status running --name thumbs
    """
    wanted = RunFilter(statuses=tuple(RunState(status) for status in statuses), name=name)
    with reading() as connection:
        runs = insights.list_runs(connection, wanted, limit=limit, before=before)
    more = runs[-1].id if len(runs) == limit else None
    if as_json:
        print_json({"runs": runs, "next": more})
        return
    now = present()
    print_table(
        ("id", "name…", "status…", "ended>", "failed>", "total>", "created", "took>"),
        [
            (
                str(run.id),
                run.name,
                _state(run),
                run.total - run.open,
                run.failed,
                run.total,
                ago(run.created_at, now),
                between(run.started_at, run.ended_at or now),
            )
            for run in runs
        ],
        empty="No run matches.",
    )
    if more:
        click.echo(f"Older ones: add --before {more}", err=True)


@command.command()
@click.argument("run", type=click.UUID, metavar="ID")
@json_option
def show(run: UUID, as_json: bool) -> None:
    """Show one run: its state, and how many of its tasks stand where.

    \b
    Example:
      orchestrator runs show 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17
    """
    with reading() as connection:
        found = _found(connection, run)
    if as_json:
        print_json(found)
    else:
        _print(found)


@command.command()
@click.argument("run", type=click.UUID, metavar="ID")
@json_option
def watch(run: UUID, as_json: bool) -> None:
    """Show a run's progress until it ends; exit with 1 unless it succeeds.

    Where the output is no terminal, every change is a line. With --json, the run is printed once, at its end.

    \b
    Example:
      orchestrator runs watch 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17
    """
    with reading() as connection:
        try:
            ended = watch_run(lambda: _found(connection, run), quiet=as_json)
        except KeyboardInterrupt:
            click.echo(f"\nThe run goes on. To cancel it: orchestrator runs cancel {run}", err=True)
            sys.exit(130)
    if as_json:
        print_json(ended)
    sys.exit(0 if ended.status == RunState.SUCCESS else 1)


@command.command()
@click.argument("runs", type=click.UUID, metavar="ID…", nargs=-1, required=True)
def cancel(runs: tuple[UUID, ...]) -> None:
    """Cancel runs and all of their open tasks.

    \b
    Example:
      orchestrator runs cancel 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17
    """
    with sending() as app:
        for run in runs:
            app.run(run).cancel()
            click.echo(f"Asked to cancel run {run}.")


@command.command()
@click.argument("runs", type=click.UUID, metavar="ID…", nargs=-1, required=True)
def retry(runs: tuple[UUID, ...]) -> None:
    """Open the failed tasks of failed runs again.

    \b
    Example:
      orchestrator runs retry 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17
    """
    with sending() as app:
        for run in runs:
            app.run(run).retry()
            click.echo(f"Asked to retry run {run}.")


def _found(connection: Connection, run: UUID) -> RunView:
    found = insights.show_run(connection, run)
    if found is None:
        raise NotFound(f"No run has the id {run}.")
    return found


def _state(run: RunView) -> Text:
    return state(run.status, "cancelling" if run.cancelling and run.ended_at is None else "")


def _print(run: RunView) -> None:
    now = present()
    counters = {
        "open": run.open,
        "success": run.success,
        "failed": run.failed,
        "cancelled": run.cancelled,
        "skipped": run.skipped,
    }
    print_fields(
        {
            "run": str(run.id),
            "name": run.name,
            "status": _state(run),
            "tasks": f"{run.total:,}: " + ", ".join(f"{count:,} {what}" for what, count in counters.items() if count),
            "created": when(run.created_at, now),
            "started": when(run.started_at, now),
            "ended": when(run.ended_at, now),
            "took": between(run.started_at, run.ended_at or now),
        }
    )
    if run.failed:
        click.echo(f"\nIts failures: orchestrator tasks list --run {run.id} --status failed", err=True)
