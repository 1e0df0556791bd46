"""`orchestrator schedules backfill`: start, list and cancel backfills."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime

import click
import msgspec

from orchestrator.cli.runs.progress import watch_backfill
from orchestrator.cli.terminal.options import json_option
from orchestrator.cli.terminal.output import counted, echo, print_json, print_table
from orchestrator.cli.terminal.reading import open_app, open_calls
from orchestrator.store.schedules.backfills import BackfillView, NewBackfill

_HEADERS = (
    *("id>", "schedule…", "done>", "running>", "waiting>", "total>", "started>", "failed>"),
    *("note…?", "from?", "to?", "at once>?"),
)
_MAX_FIRES_SHOWN = 50
"""Fires that the preview of a backfill prints, at most."""
key_argument = click.argument("key", metavar="WORKFLOW[/NAME]")


@click.command()
@key_argument
@click.option(
    "--from", "start", metavar="TIME", required=True, help="The first moment: 2026-01-01, in the schedule's zone."
)
@click.option("--to", "end", metavar="TIME", help="The end of the range, exclusive.  [default: now]")
@click.option("--concurrency", type=click.IntRange(1), help="How many runs at once.  [default: 1]")
@click.option("--again", is_flag=True, help="Also run fires that already have a run.")
@click.option("--watch", is_flag=True, help="Show the progress until the end; exit with 1 if a run fails.")
@click.option("--dry-run", is_flag=True, help="Only print the fires, and which of them would get a run.")
def backfill(
    key: str, start: str, end: str | None, concurrency: int | None, again: bool, watch: bool, dry_run: bool
) -> None:
    """Start a run for each fire in a range of the past, a few at a time, and print the number of the backfill.

    A fire that has had its run is skipped, so repeating the command only fills the gaps.

    \b
    Example:
      orchestrator schedules backfill nightly --from 2026-01-01 --to 2026-02-01 --concurrency 4 --watch
    """
    with open_app() as app:
        if dry_run:
            _print_preview(*app._client.backend.schedules.preview_backfill(key, start, end, concurrency, again))
            return
        started = app.schedules[key].backfill(start, end, concurrency=concurrency, again=again)
        echo(str(started.id), err=watch)
        if not watch:
            return
        try:
            ended = watch_backfill(started.progress)
        except KeyboardInterrupt:
            echo(
                f"\nThe backfill continues. To cancel it: orchestrator schedules cancel-backfill {started.id}", err=True
            )
            sys.exit(130)
    sys.exit(1 if ended.failed or ended.error else 0)


@click.command("backfills")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="How many to show.")
@json_option
def backfills_(limit: int, as_json: bool) -> None:
    """List backfills and their progress, newest first.

    \b
    Example:
      orchestrator schedules backfills
    """
    with open_calls() as calls:
        backfills = calls.schedules.list_backfills(limit)
    if as_json:
        print_json(
            {
                "backfills": [
                    msgspec.to_builtins(view) | {"done": view.done, "waiting": view.waiting, "had_run": view.had_run}
                    for view in backfills
                ]
            }
        )
        return
    print_table(
        _HEADERS,
        [_row(view) for view in backfills],
        empty="There is no backfill. Start one: orchestrator schedules backfill WORKFLOW --from 2026-01-01",
    )


@click.command("cancel-backfill")
@click.argument("number", type=int, metavar="ID")
def cancel_backfill(number: int) -> None:
    """Cancel a backfill: start no more of its runs, and cancel the open ones.

    \b
    Example:
      orchestrator schedules cancel-backfill 7
    """
    with open_app() as app:
        app._client.backend.schedules.cancel_backfill(number)
    echo(f"Asked to cancel backfill {number}.")


COMMANDS = (backfill, backfills_, cancel_backfill)


def _print_preview(new: NewBackfill, fires: Sequence[tuple[datetime, bool]]) -> None:
    """Print the fires that a backfill would process, shortened in the middle, and their number."""
    for index, (fire, is_missing) in enumerate(fires):
        if index == _MAX_FIRES_SHOWN and len(fires) > _MAX_FIRES_SHOWN + 1:
            echo(f"… and {len(fires) - _MAX_FIRES_SHOWN - 1:,} more, up to:")
        if index < _MAX_FIRES_SHOWN or index == len(fires) - 1:
            local = f"{fire.astimezone(new.schedule.zone):%a %Y-%m-%d %H:%M:%S %Z}"
            echo(local if is_missing else f"{local}  (already has a run)")
    missing = sum(is_missing for _, is_missing in fires)
    already_run = len(fires) - missing
    skipped = f", {already_run:,} already have one" if already_run else ""
    echo(f"{counted(len(fires), 'fire')}: {missing:,} would get a run, {new.concurrency:,} at once{skipped}.")


def _row(view: BackfillView) -> tuple[str | int | None, ...]:
    return (
        view.id,
        f"{view.workflow}/{view.name}",
        view.done,
        view.running,
        view.waiting,
        view.total,
        view.started,
        view.failed,
        view.error or (f"{view.stuck} stuck" if view.stuck else None),
        f"{view.start_at:%Y-%m-%d %H:%M}",
        f"{view.end_at:%Y-%m-%d %H:%M}",
        view.concurrency,
    )
