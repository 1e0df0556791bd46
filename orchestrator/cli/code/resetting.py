"""`orchestrator runs reset`: look at what would become of everything, then do it."""

from __future__ import annotations

from uuid import UUID

import click

from orchestrator.cli.terminal.ids import run_argument
from orchestrator.cli.terminal.options import json_option, yes_option
from orchestrator.cli.terminal.output import confirm, echo, print_json, print_table
from orchestrator.cli.terminal.sending import sending
from orchestrator.domain.code.resets import preview


@click.command()
@run_argument
@click.option("--to", type=int, required=True, metavar="EVENT", help="The last event to keep; see: runs history ID")
@click.option("--reason", default="", help="Why, for those who look at the history.")
@click.option("--dry-run", is_flag=True, help="Only show what would become of everything.")
@yes_option
@json_option
def reset(run: UUID, to: int, reason: str, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Start a run that repeats a run of a workflow as code up to an event, and print its id.

    What had ended by then is kept, and all else is done again. If the run is open, it ends, and goes on as the new one.

    \b
    Example:
      orchestrator runs history 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17
      orchestrator runs reset 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17 --to 12 --reason "the rate was wrong"
    """
    with sending() as app:
        handle = app.workflow_run(run)
        lines = preview(run.bytes, handle.history().events, to)
        if not as_json and (dry_run or not yes):
            print_table(("number>", "what…", "fate…"), lines, empty="Nothing has happened but its start.")
        confirm(f"Reset run {run} to event {to}?", yes=yes or dry_run, err=True)
        new = None if dry_run else handle.reset(to=to, reason=reason).id
    if as_json:
        print_json({"run": new, "reset_from": str(run), "to": to, "preview": [line._asdict() for line in lines]})
    elif new is not None:
        echo(new)
