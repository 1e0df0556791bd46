"""`orchestrator status`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import fields

import click

from orchestrator.cli.options import json_option
from orchestrator.cli.output import print_fields, print_json
from orchestrator.cli.reading import reading
from orchestrator.cli.times import ago, duration, present
from orchestrator.errors import ConfigurationError
from orchestrator.settings import load_settings
from orchestrator.store import insights
from orchestrator.store.insights import Events, Leader, Overview
from orchestrator.transport.connection import UNAVAILABLE, connect
from orchestrator.transport.inspection import RedisView, inspect
from orchestrator.transport.keys import Keys


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
        queues = [queue.queue for queue in insights.list_queues(connection)]
    redis = _look_at_redis(overview.events, queues)
    if as_json:
        print_json({field.name: getattr(overview, field.name) for field in fields(overview)} | {"redis": redis})
        return
    print_fields(
        {
            "scheduler": _leader(overview.leader),
            "workers": f"{overview.workers} live, {overview.slots} slots, {overview.running} running",
            "open": _counts(overview.open),
            "last minute": _counts(overview.ended_last_minute),
            "last hour": _counts(overview.ended_last_hour),
            "schedules": _counts(overview.schedules),
            "inbox": f"{overview.inbox} waiting",
            "events": _events(overview.events),
            "set aside": f"{redis.quarantined:,} messages" if redis.quarantined else None,
            "database": f"revision {overview.revision}",
        }
    )
    for warning in (*_warnings(overview), *_redis_warnings(redis)):
        click.secho(f"! {warning}", fg="yellow")


def _look_at_redis(events: Events | None, queues: Sequence[str]) -> RedisView:
    """Return how Redis is doing; that it cannot be used is part of the answer."""
    try:
        with closing(connect(load_settings().require_redis(), patience=3.0)) as redis:
            return inspect(redis, Keys(), events.generation if events else None, queues)
    except (*UNAVAILABLE, ConfigurationError) as error:
        return RedisView(error=str(error))


def _leader(leader: Leader | None) -> str:
    if leader is None:
        return "none leads"
    return f"{leader.address} leads in term {leader.term}, lease for {duration(leader.lease_remaining)}"


def _events(events: Events | None) -> str:
    return f"applied up to {events.position} of generation {events.generation}" if events else "none yet"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count) or "none"


def _redis_warnings(redis: RedisView) -> Iterator[str]:
    if redis.error is not None:
        yield f"Redis cannot be used, so nothing is dispatched: {redis.error}"
    for foreign in redis.foreign_keys:
        yield (
            f"Redis key {foreign.key} holds a {foreign.found} where a {foreign.expected} of ours belongs, and whatever "
            f"needs it fails. Find out who wrote it, then: redis-cli DEL '{foreign.key}'"
        )
    if redis.quarantined:
        yield (
            f"{redis.quarantined:,} messages could not be understood or applied, and were set aside. Look at them: "
            f"orchestrator quarantine list"
        )


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
    for failing in overview.failing_schedules:
        yield f"Schedule {failing.key} starts nothing: {failing.error}"
