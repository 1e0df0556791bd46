"""`orchestrator workers`."""

from __future__ import annotations

import click

from orchestrator.cli.terminal.options import json_option
from orchestrator.cli.terminal.output import echo, print_json, print_table, state
from orchestrator.cli.terminal.reading import looking
from orchestrator.cli.terminal.times import ago, present
from orchestrator.monitoring.trouble import stands_still


@click.command("workers")
@json_option
def command(as_json: bool) -> None:
    """Show the fleet, as the leading scheduler sees it; `knows` is how many tasks and workflows a worker has.

    \b
    Example:
      orchestrator workers
      orchestrator workers --json | jq '.workers[] | {host, pid, names}'
    """
    with looking() as calls:
        workers = calls.insights.list_workers()
    if as_json:
        print_json({"workers": workers})
        return
    now = present()
    print_table(
        ("worker…", "state", "running>", "queues…", "seen", "started?", "knows>?", "host…?", "pid>?"),
        [
            (
                worker.id,
                state(worker.state),
                f"{worker.running}/{worker.slots}",
                ",".join(worker.queues),
                ago(worker.seen_at, now),
                ago(worker.started_at, now),
                len(worker.names),
                worker.host,
                worker.pid,
            )
            for worker in workers
        ],
        empty="No worker has been seen. Start one: orchestrator worker --app module:app",
    )
    for worker in workers:
        if worker.state == "still":
            echo(f"{worker.id} {stands_still(worker)}")
