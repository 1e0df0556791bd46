"""`orchestrator status`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import click

from orchestrator.cli.options import json_option
from orchestrator.cli.output import print_fields, print_json
from orchestrator.cli.reading import reading
from orchestrator.cli.times import ago, duration, present
from orchestrator.store import insights
from orchestrator.store.insights import Events, Leader, Overview


@click.command("status")
@json_option
def command(as_json: bool) -> None:
    """Show how the system is doing, and what needs a person.

    \b
    Example:
      orchestrator status
      orchestrator status --json | jq .open
    """
    with reading() as connection:
        overview = insights.overview(connection)
    if as_json:
        print_json(overview)
        return
    print_fields(
        {
            "scheduler": _leader(overview.leader),
            "workers": f"{overview.workers} live, {overview.slots} slots, {overview.running} running",
            "open": _counts(overview.open),
            "last minute": _counts(overview.ended_last_minute),
            "last hour": _counts(overview.ended_last_hour),
            "inbox": f"{overview.inbox} waiting",
            "events": _events(overview.events),
            "database": f"revision {overview.revision}",
        }
    )
    for warning in _warnings(overview):
        click.secho(f"! {warning}", fg="yellow")


def _leader(leader: Leader | None) -> str:
    if leader is None:
        return "none leads"
    return f"{leader.address} leads in term {leader.term}, lease for {duration(leader.lease_remaining)}"


def _events(events: Events | None) -> str:
    return f"applied up to {events.position} of generation {events.generation}" if events else "none yet"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count) or "none"


def _warnings(overview: Overview) -> Iterator[str]:
    if overview.leader is None:
        yield "No scheduler leads, so nothing moves. Start one: orchestrator scheduler"
    for queue in overview.unserved_queues:
        yield (
            f"Queue {queue!r} has ready tasks and no live worker. Start one: "
            f"orchestrator worker --app module:app --queues {queue}"
        )
    now = present()
    for unknown in overview.unknown_tasks:
        yield (
            f"No live worker of queue {unknown.queue!r} knows {unknown.name!r}: {unknown.tasks:,} wait"
            f"{f', the first fails {ago(unknown.fails_at, now)}' if unknown.fails_at else ''}. "
            f"Start a worker whose application has it."
        )
