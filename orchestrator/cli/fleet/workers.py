"""`orchestrator workers`."""

from __future__ import annotations

import click

from orchestrator.cli.terminal.options import json_option
from orchestrator.cli.terminal.output import echo, print_json, print_table, state
from orchestrator.cli.terminal.reading import open_calls
from orchestrator.domain.fleet.announced import count_known
from orchestrator.monitoring.times import ago, duration, present
from orchestrator.monitoring.trouble import describe_stall
from orchestrator.workers.parent.processes import format_memory


@click.group("workers", invoke_without_command=True)
@json_option
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    """Show the worker processes as the leading scheduler sees them, and drain workers.

    `memory` is the RAM of a process; `knows` is the number of its tasks and workflows.

    \b
    Example:
      orchestrator workers
      orchestrator workers --json | jq '.workers[] | {host, pid, memory, names}'
      orchestrator workers drain web1-812
    """
    if context.invoked_subcommand is None:
        _show(as_json)


def _show(as_json: bool) -> None:
    with open_calls() as calls:
        workers = calls.insights.list_workers()
    if as_json:
        print_json({"workers": workers})
        return
    now = present()
    print_table(
        (
            "worker…",
            "state",
            "running>",
            "queues…",
            "last heartbeat",
            "release…?",
            "memory>?",
            "uptime>?",
            "knows>?",
            "host…?",
            "pid>?",
        ),
        [
            (
                worker.id,
                state(worker.state),
                f"{worker.running}/{worker.slots}",
                ",".join(worker.queues),
                ago(worker.seen_at, now),
                worker.release,
                "" if worker.memory is None else format_memory(worker.memory),
                duration((now - worker.started_at).total_seconds()),
                count_known(worker.names),
                worker.host,
                worker.pid,
            )
            for worker in workers
        ],
        empty="No worker has been seen. Start one: orchestrator worker --app module:app",
    )
    for worker in workers:
        if worker.state == "still":
            echo(f"{worker.id} {describe_stall(worker)}")


@command.command("drain")
@click.argument("worker")
def drain(worker: str) -> None:
    """Drain a worker: all of its processes take no more tasks, finish the running ones, and end, as with SIGTERM.

    WORKER is the id of one of its processes, its name (host and pid of its parent process), or its host if only one
    worker runs there. A service manager may start a replacement.

    \b
    Example:
      orchestrator workers drain web1-812
    """
    with open_calls() as calls:
        drained = calls.fleet.drain(worker)
    number = len(drained.processes)
    processes = "1 process" if number == 1 else f"{number} processes"
    if drained.is_heard:
        echo(f"Worker {drained.worker} ({processes}) accepts no more tasks, finishes those that it runs, and exits.")
    else:
        echo(f"Worker {drained.worker} ({processes}) is sending no heartbeats. It will drain when it reconnects.")
