"""`orchestrator status`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import click
import msgspec

from orchestrator.cli.terminal.options import json_option
from orchestrator.cli.terminal.output import counted, echo, print_fields, print_json, print_table, state
from orchestrator.cli.terminal.reading import open_calls
from orchestrator.domain.fleet.announced import Standby
from orchestrator.errors import Unavailable
from orchestrator.monitoring import trouble
from orchestrator.monitoring.times import ago, duration, present, size
from orchestrator.monitoring.trouble import Trouble
from orchestrator.sdk.calls.interface import Calls
from orchestrator.settings import Settings, load_settings
from orchestrator.store import postgres_errors
from orchestrator.store.insights import Events, Leader, Overview, QueueCounts, RunView, Storage, TaskView
from orchestrator.store.insights.lookup import IdMatch
from orchestrator.store.shards import ShardView
from orchestrator.transport.inspection import RedisHealth, RedisView


@click.command("status")
@json_option
@click.option("--check", is_flag=True, help="Exit with 1 if there is a problem.")
def command(as_json: bool, check: bool) -> None:
    """Show the state of the system, and the problems that need a person.

    \b
    Example:
      orchestrator status
      orchestrator status --check || mail -s "orchestrator needs you" ops@example.com
      orchestrator status --json | jq '.open, .trouble[].kind'
    """
    settings = load_settings()
    with open_calls() as calls:
        overview, counts, health, held, troubles = read_status(calls, settings)
    if as_json:
        redis = msgspec.to_builtins(held) | msgspec.to_builtins(health)
        del redis["standbys"]
        print_json({**msgspec.to_builtins(overview), "redis": redis, "trouble": troubles})
    else:
        print_fields(
            {
                "scheduler": _leader(overview.leader),
                "standbys": _standbys(overview.standbys),
                "shards": _shards(overview.shards),
                "workers": _workers(overview),
                "open": _open(overview),
                "last minute": _counts(overview.ended_last_minute),
                "last hour": _counts(overview.ended_last_hour) + _retention_remark(settings, counts),
                "schedules": _counts(overview.schedules),
                "inbox": f"{overview.inbox} waiting",
                "events": _events(overview.events),
                "set aside": counted(held.quarantined, "message") if held.quarantined else None,
                "database": f"revision {overview.revision}",
                "storage": _storage(overview.storage),
                "redis": _redis(health),
            }
        )
        for trouble_ in troubles:
            echo(f"! {trouble_.message}", colour="yellow")
    if check and troubles:
        sys.exit(1)


class Status(NamedTuple):
    """Everything that `status` shows, including problems."""

    overview: Overview
    queues: Sequence[QueueCounts]
    redis: RedisHealth
    held: RedisView
    troubles: list[Trouble]


def read_status(calls: Calls, settings: Settings) -> Status:
    """Read everything that `status` shows, and find problems in it."""
    try:
        overview = calls.insights.overview()
    except (*postgres_errors.UNAVAILABLE, Unavailable) as error:
        holders = calls.insights.lock_holders()
        if not holders:
            raise
        blockers = "; ".join(f"process {pid} ({name or 'unnamed'}: {query})" for pid, name, query in holders)
        raise Unavailable(
            f"The tables cannot be read: {blockers} holds a lock. End it: SELECT pg_terminate_backend({holders[0][0]})"
        ) from error
    queues = calls.insights.list_queues()
    transactions = calls.insights.long_transactions(settings.long_transaction)
    on_postgres = trouble.of_postgres(calls.insights.connections(), transactions, calls.insights.dead_rows())
    generation = overview.events.generation if overview.events else None
    health, held = calls.insights.redis(generation, [queue.queue for queue in queues])
    troubles = (
        *trouble.of_the_system(overview, settings.lease, health.complaint),
        *(() if settings.api_url else trouble.of_shards(overview, settings.shards)),
        *trouble.of_redis(health),
        *trouble.foreign_data(held),
        *on_postgres,
        *trouble.of_payload_store(settings.payload_store),
    )
    hears = overview.hears_workers and not any(trouble_.kind in trouble.STOPPING for trouble_ in troubles)
    overview = replace(overview, standbys=held.standbys, hears_workers=hears)
    return Status(overview, queues, health, held, trouble.by_gravity(troubles))


_HOUR = 3600.0
_STATE_WORDS = {"blocked": "waiting on dependencies", "dispatched": "in flight", "running": "in flight"}
"""Printed names of states. Short tasks stay `dispatched`, because workers do not report their start."""


def _leader(leader: Leader | None) -> str:
    if leader is None:
        return "none leads"
    return f"{leader.address} leads in term {leader.term}, lease for {duration(leader.lease_remaining)}"


def _shards(shards: Sequence[ShardView]) -> str | None:
    """Return the leader of each shard, and which shards have open work or are closing."""
    return (
        "; ".join(
            f"{s.shard} led by {s.leader or 'no scheduler'}{', open work' * s.is_open}{', closing' * s.is_closing}"
            for s in shards
        )
        or None
    )


def _workers(overview: Overview) -> str:
    """Return the number of live workers; unknown without a leader, because only the leader reads their heartbeats."""
    if overview.leader is None:
        return "unknown: no scheduler leads, and only the leader reads their heartbeats"
    if not overview.hears_workers:
        return "unknown: the scheduler receives no heartbeats"
    return f"{overview.workers} live, {overview.running} of {overview.slots} slots busy"


def _standbys(standbys: Sequence[Standby] | None) -> str | None:
    return None if standbys is None else ", ".join(standby.address for standby in standbys) or "none"


def _retention_remark(settings: Settings, queues: Sequence[QueueCounts]) -> str:
    """Return a remark if the shortest retention is less than an hour: then the last hour's count is incomplete."""
    kept = [settings.retention_success, settings.retention_failed]
    kept += [seconds for queue in queues for seconds in (queue.retention_success, queue.retention_failed) if seconds]
    shortest = min((seconds for seconds in kept if seconds), default=_HOUR)
    return f" (some are kept for {duration(shortest)} only, and not counted after that)" if shortest < _HOUR else ""


def _events(events: Events | None) -> str:
    return f"applied up to {events.position} of generation {events.generation}" if events else "none yet"


def _redis(health: RedisHealth) -> str:
    if not health.reachable:
        return "refuses the user or the password" if health.is_locked else "away"
    of = f" of {health.max_memory / 1_000_000:,.1f}" if health.max_memory else ""
    return f"{health.server} {health.version}, {health.used_memory / 1_000_000:,.1f}{of} MB used"


def _storage(storage: Storage) -> str:
    largest = [f"{name} {size(bytes)}" for name, bytes in list(storage.tables.items())[:3]]
    total = f"{size(sum(storage.tables.values()))} ({', '.join(largest)})"
    if storage.oldest is None:
        return f"{total}, no ended tasks"
    about = "about " if storage.is_rough else ""
    return (
        f"{total}, {about}{counted(storage.ended_tasks, 'ended task')}, the oldest of {ago(storage.oldest, present())}"
    )


def _open(overview: Overview) -> str:
    """Return the number of open tasks by state, with `+` if the count stopped at its limit."""
    counts: Counter[str] = Counter()
    for kind, count in overview.open.items():
        counts[_STATE_WORDS.get(kind, kind)] += count
    least = {_STATE_WORDS.get(kind, kind) for kind in overview.open_least}
    return ", ".join(f"{count:,}{'+' * (kind in least)} {kind}" for kind, count in counts.items() if count) or "none"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count) or "none"


@click.command("search")
@click.argument("text")
@click.option("--limit", type=click.IntRange(1, 100), default=10, show_default=True, help="Results of each kind.")
@json_option
def search(text: str, limit: int, as_json: bool) -> None:
    """Find tasks and runs by the prefix of an id, a name, a tag, or a part of an error.

    \b
    Example:
      orchestrator search 0199b2f4
      orchestrator search "connection refused" --json | jq -r '.failures[].id'
    """
    with open_calls() as calls:
        results = calls.insights.search(text, limit)
    if as_json:
        print_json(results)
        return
    now = present()
    kinds: dict[str, tuple[IdMatch | TaskView | RunView, ...]] = {
        "task": (*results.tasks_by_id, *results.tasks),
        "run": (*results.runs_by_id, *results.runs),
        "failure": tuple(results.failures),
    }
    rows = [
        (kind, str(match.id), match.name, state(match.status), ago(match.created_at, now))
        for kind, matches in kinds.items()
        for match in matches
    ]
    if not rows:
        echo(f"No task or run has a name, tag, error or id that matches {text!r}.")
        return
    print_table(("kind", "id", "name…", "state", "created"), rows)
