"""`orchestrator search`."""

from __future__ import annotations

import click

from orchestrator.cli.terminal.options import json_option
from orchestrator.cli.terminal.output import echo, print_json, print_table, state
from orchestrator.cli.terminal.reading import looking
from orchestrator.monitoring.times import ago, present
from orchestrator.store.insights import RunView, TaskView
from orchestrator.store.insights.lookup import IdMatch


@click.command("search")
@click.argument("text")
@click.option("--limit", type=click.IntRange(1, 100), default=10, show_default=True, help="How many of each kind.")
@json_option
def command(text: str, limit: int, as_json: bool) -> None:
    """Find tasks and runs by the beginning of an id, a name, a tag, or part of an error.

    \b
    Example:
      orchestrator search 0199b2f4
      orchestrator search "connection refused" --json | jq -r '.failures[].id'
    """
    with looking() as calls:
        found = calls.insights.search(text, limit)
    if as_json:
        print_json(found)
        return
    now = present()
    kinds: dict[str, tuple[IdMatch | TaskView | RunView, ...]] = {
        "task": (*found.tasks_by_id, *found.tasks),
        "run": (*found.runs_by_id, *found.runs),
        "failure": tuple(found.failures),
    }
    rows = [
        (kind, str(one.id), one.name, state(one.status), ago(one.created_at, now))
        for kind, several in kinds.items()
        for one in several
    ]
    if not rows:
        echo(f"Nothing is called, tagged or failed with {text!r}, and no id begins so.")
        return
    print_table(("kind", "id", "name…", "state", "created"), rows)
