"""Checks that limits of concurrency and rate were never exceeded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from orchestrator import Rate
from tests.chaos.real.arena import Arena
from tests.chaos.real.journal import Execution
from tests.chaos.real.project.limits import RATE, TOTAL_RATE

_ROUNDING = 1e-3
"""Seconds by which recorded times may be inexact."""
_STARTS = (
    "SELECT lane, extract(epoch FROM at)::double precision AS at FROM chaos.starts WHERE lane IS NOT NULL ORDER BY at"
)


def check_limits(arena: Arena, executions: list[Execution]) -> Iterator[str]:
    """Check limits of concurrency. Executions on workers that the leader could not hear do not count."""
    journal = arena.journal
    heartbeat_gap = arena.settings.worker_ttl - arena.settings.heartbeat
    limits: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for task, name, number in journal.of_tasks("limit"):
        limits[task].add((name, int(number)))
    changes: dict[tuple[str, int], list[tuple[float, int, Execution]]] = defaultdict(list)
    for execution in executions:
        ended = journal.end_of(execution)
        if execution.task in limits and not journal.was_unheard(
            execution.worker, execution.began, ended, heartbeat_gap
        ):
            for limit_key in limits[execution.task]:
                changes[limit_key] += [(execution.began, 1, execution), (ended, -1, execution)]
    for (name, limit), found in changes.items():
        running = 0
        for _, change, execution in sorted(found, key=lambda change: change[:2]):  # ends sort before starts
            running += change
            if running > limit:
                yield f"{running} of {name} ran at once, and {limit} may: {execution}"


def check_rates(arena: Arena) -> Iterator[str]:
    """Check rates: no window has more starts than the bucket's size plus its refill, by Postgres's clock."""
    starts: dict[tuple[str, Rate], list[float]] = defaultdict(list)
    for row in arena.sql(_STARTS):
        starts[row["lane"], RATE].append(row["at"])
        starts["all", TOTAL_RATE].append(row["at"])
    for (lane, rate), times in starts.items():
        interval, size = rate.per / rate.count, int(rate.count)
        due = times[0]
        for at in times:
            due = max(due, at) + interval
            if due - at > size * interval + _ROUNDING:
                yield f"{lane} started at {at:.3f} one more than {size} and {rate.count:g} in {rate.per:g} s"
