"""`orchestrator queues`."""

from __future__ import annotations

import click

from orchestrator.cli.options import json_option
from orchestrator.cli.output import print_json, print_table
from orchestrator.cli.reading import reading
from orchestrator.cli.times import duration
from orchestrator.store import insights


@click.command("queues")
@json_option
def command(as_json: bool) -> None:
    """Show what stands in each queue, and who serves it.

    \b
    Example:
      orchestrator queues
      orchestrator queues --json | jq '.queues[] | select(.workers == 0)'
    """
    with reading() as connection:
        queues = insights.list_queues(connection)
    if as_json:
        print_json({"queues": queues})
        return
    print_table(
        ("queue…", "ready>", "delayed>", "unknown>", "blocked>", "in flight>", "oldest>", "workers>", "slots>"),
        [
            (
                queue.queue,
                queue.ready,
                queue.delayed,
                queue.unknown,
                queue.blocked,
                queue.dispatched + queue.running,
                duration(queue.oldest_ready),
                queue.workers,
                queue.slots,
            )
            for queue in queues
        ],
        empty="No queue holds a task or has a worker.",
    )
