"""How many slots each queue wants, for what scales workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from orchestrator.domain.fleet.window import mean_time, wanted_slots
from orchestrator.store import throughput
from orchestrator.store.insights.load import QueueLoad, queue_loads


@dataclass(frozen=True, kw_only=True)
class QueueDemand:
    """How many slots a queue wants, and why."""

    queue: str
    """Its name."""
    wanted: int
    """How many tasks its workers should run at once: divide it by the slots of a worker."""
    slots: int
    """How many its live workers run at once, of all their queues together."""
    busy: int
    """How many of them are used by this queue."""
    ready: int
    """Tasks that only wait for a free slot, counted up to 10000; none of a paused queue."""
    oldest: float | None
    """Seconds since the oldest of these was enqueued."""
    rate: float
    """Attempts that started each second, in the last minute."""
    run_time: float | None
    """Seconds that an attempt ran on average, in the last minute; None if none has ended."""


def queue_demands(
    connection: Connection, within: str = "", *, loads: Sequence[QueueLoad] | None = None
) -> list[QueueDemand]:
    """Return what each queue wants whose name begins so; loads that were read a moment ago need not be again."""
    lately = {row.queue: row for row in throughput.last_minute(connection)}
    found = []
    for load in queue_loads(connection) if loads is None else loads:
        if not load.queue.startswith(within):
            continue
        row = lately.get(load.queue)
        ready, oldest = (0, None) if load.paused else (load.ready, load.oldest)
        busy = min(load.in_flight, load.slots)
        rate, run_time = (row.dispatched / 60, mean_time(row.runs)) if row else (0.0, None)
        wanted = wanted_slots(ready=ready, busy=busy, oldest=oldest, rate=rate, run_time=run_time)
        found.append(
            QueueDemand(
                queue=load.queue,
                wanted=wanted,
                slots=load.slots,
                busy=busy,
                ready=ready,
                oldest=oldest,
                rate=rate,
                run_time=run_time,
            )
        )
    return found
