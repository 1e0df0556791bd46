"""Tasks with limits, rates and unique keys, and checks that these hold across all shards together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import msgspec

from orchestrator.domain.limits.buckets import Rate, interval
from orchestrator.domain.tasks.task import TaskOptions
from orchestrator.store import inbox
from orchestrator.store.inbox import RequestKind
from orchestrator.store.limits import queues

if TYPE_CHECKING:
    from tests.chaos.simulator.workers import Execution
    from tests.chaos.simulator.world import World

RATE = Rate(4, per=1.0, burst=2)
OPTIONS = {
    "narrow": TaskOptions(total_concurrency=2),
    "keyed": TaskOptions(concurrency=1),
    "rated": TaskOptions(total_rate=RATE),
    "unique": TaskOptions(unique_for="running"),
}
STORED = {name: msgspec.json.encode(options).decode() for name, options in OPTIONS.items()}
KEYS = ("red", "green", "blue")
LIMITED = "limited"
"""A queue with a limit."""
_MAX_IN_QUEUE = 2
_MAX_SCARCE = 2
_IN_FLIGHT = ("dispatched", "running")
_CLOCK_TOLERANCE = 0.15
"""Seconds by which the clocks of two leaders may differ: each extrapolates from its last reading."""


def limit_queue(world: World) -> None:
    """Set the limit of the queue, as a client does: every leader is notified."""
    queues.set_limits(world.database.connection_of(0), LIMITED, _MAX_IN_QUEUE, None)
    for shard in range(1, len(world.redis)):
        inbox.add(world.database.connection_of(shard), RequestKind.QUEUES, bytes(16))


def _limits_of(row: Any) -> Iterator[tuple[str, int]]:
    """Yield the names and sizes of the limits that apply to a task."""
    if row["name"] == "narrow":
        yield "narrow", 2
    elif row["name"] == "keyed":
        yield row["lane"], 1
    if row["queue"] == LIMITED:
        yield f"queue {LIMITED}", _MAX_IN_QUEUE


def check_limits(world: World, audit: list[Any]) -> Iterator[str]:
    """Check that no limit and no rate was exceeded, and that no unique key had two holders."""
    in_flight: dict[str, set[bytes]] = defaultdict(set)
    holders: dict[str, set[bytes]] = defaultdict(set)
    dispatched: list[float] = []
    for row in audit:
        task = row["id"].bytes
        if row["operation"].startswith("leave"):
            continue
        for limit, limit_size in _limits_of(row):
            if row["after"] in _IN_FLIGHT:
                in_flight[limit].add(task)
                if len(in_flight[limit]) > limit_size:
                    yield f"{len(in_flight[limit])} tasks of {limit} are in flight (audit {row['number']})"
            else:
                in_flight[limit].discard(task)
        if row["name"] == "rated" and row["after"] == "dispatched":
            dispatched.append(row["at"].timestamp())
        if row["key"] is not None:
            if row["operation"] == "enter ended_tasks":
                holders[row["key"]].discard(task)
            else:
                holders[row["key"]].add(task)
            if len(holders[row["key"]]) > 1:
                yield f"{len(holders[row['key']])} open tasks have the key {row['key']} (audit {row['number']})"
    if not any(fault.kind == "clock" for fault in world.plan.faults):
        yield from _check_rate(dispatched)


def _check_rate(moments: list[float]) -> Iterator[str]:
    for first, start in enumerate(moments):
        for last, end in enumerate(moments[first:], first):
            allowed = (RATE.burst or 1) + (end - start + _CLOCK_TOLERANCE) / interval(RATE)
            if last - first + 1 > allowed:
                yield f"{last - first + 1} were dispatched in {end - start:.3f} s, and the rate allows {allowed:.1f}"
                return


def too_many(world: World, execution: Execution) -> str | None:
    """Return an error if too many executions of a limited task run at once, on live workers whose heartbeats arrive."""
    if execution.name != "narrow" or not execution.heard:
        return None
    living = {worker.child.id for worker in world.workers if not worker.is_silent}
    running = [
        candidate
        for candidate in (*world.executions, execution)
        if candidate.name == "narrow" and candidate.ended is None and candidate.heard and candidate.worker in living
    ]
    return f"{len(running)} narrow tasks run at once" if len(running) > 2 else None


def check_scarce(world: World) -> Iterator[str]:
    """Check that no transaction leaves more runs of a limited workflow running than allowed."""
    running: set[bytes] = set()
    changes = world.database.sql("SELECT * FROM simulated.scarce ORDER BY number")
    for transaction, rows in groupby(changes, itemgetter("transaction")):
        for row in rows:
            (running.add if row["status"] == "running" else running.discard)(row["id"].bytes)
        if len(running) > _MAX_SCARCE:
            yield f"{len(running)} runs of a scarce workflow are running (transaction {transaction})"
