"""Metrics of Postgres and Redis: read on request, at most every few seconds, and in bounded time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from redis import Redis
from sqlalchemy import Connection, Engine, exc

from orchestrator.monitoring.exposition import MAX_QUEUES, OTHER_QUEUES, Family, gauge
from orchestrator.settings import Settings
from orchestrator.store import database, postgres_errors
from orchestrator.store.load import (
    QueueDemand,
    QueueLoad,
    SystemLoad,
    queue_demands,
    queue_loads,
    system_load,
    use_indexes,
)
from orchestrator.transport.connection import UNAVAILABLE, connect
from orchestrator.transport.inspection import Shards, connected_shards

_CACHE_SECONDS = 5.0
"""Seconds for which the last values are served again."""
_TIMEOUT = 2.0
"""Seconds that a read may take."""


class SystemGauges:
    """Metrics of the whole system. All processes that read them report the same values: aggregate with `max`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._redis: Redis | None = None
        self._closing = ExitStack()
        self._shards: Shards = []
        self._read_at = float("-inf")
        self._cached: list[Family] = []

    def metrics(self) -> Sequence[Family]:
        """Return the metrics of Postgres and Redis, at most some seconds old."""
        with self._lock:
            if time.monotonic() - self._read_at > _CACHE_SECONDS:
                self._cached = [*self._of_postgres(), *self._of_redis()]
                self._read_at = time.monotonic()
            return self._cached

    def close(self) -> None:
        if self._engine is not None:
            self._engine.dispose()
        if self._redis is not None:
            self._redis.close()
        self._closing.close()

    def redis_trouble(self) -> str | None:
        """Return why Redis does not answer, or None."""
        try:
            self._connected().ping()
        except UNAVAILABLE as error:
            return str(error)
        return None

    def _of_postgres(self) -> Iterator[Family]:
        began = time.monotonic()
        queues: list[QueueLoad] | None = None
        with suppress(*postgres_errors.UNAVAILABLE, exc.DBAPIError), self._connection() as connection:
            use_indexes(connection, _TIMEOUT)
            queues, system = queue_loads(connection), system_load(connection)
            demands = queue_demands(connection, loads=queues)
        took = time.monotonic() - began
        up = {"server": "postgres"}, float(queues is not None)
        yield gauge("orchestrator_stats_up", "Whether the numbers about the whole system could be read.", up)
        yield gauge("orchestrator_stats_seconds", "How long it took to read them.", ({"server": "postgres"}, took))
        if queues is not None:
            yield from of_queues(queues)
            yield of_demands(demands)
            yield from of_system(system)

    def _connection(self) -> Connection:
        if self._engine is None:
            self._engine = database.probe_engine(self._settings, "orchestrator metrics", _TIMEOUT + 1.0)
        return self._engine.connect()

    def _connected(self) -> Redis:
        if self._redis is None:
            self._redis = connect(self._settings.require_redis(), timeout=1.0)
        return self._redis

    def _of_redis(self) -> Iterator[Family]:
        memory: dict[str, Any] = {}
        quarantined = 0
        try:
            self._shards = self._shards or self._closing.enter_context(connected_shards(self._settings, 1.0))
            for redis, keys in self._shards:
                pipeline = redis.pipeline(transaction=False)
                pipeline.info("memory")
                pipeline.xlen(keys.quarantine)
                found, waiting = pipeline.execute(raise_on_error=False)
                if isinstance(found, Exception):
                    raise found
                memory = max(memory, found, key=_fullness)
                quarantined += waiting if isinstance(waiting, int) else 0
        except UNAVAILABLE:
            yield gauge("orchestrator_redis_up", "Whether Redis answers.", ({}, 0))
            return
        yield gauge("orchestrator_redis_up", "Whether Redis answers.", ({}, 1))
        yield gauge("orchestrator_redis_memory_bytes", "Memory that Redis uses.", ({}, memory["used_memory"]))
        limit = memory.get("maxmemory", 0)
        yield gauge(
            "orchestrator_redis_memory_limit_bytes", "Memory that Redis may use; 0 means unlimited.", ({}, limit)
        )
        help = "Messages in quarantine, which could not be decoded or applied."
        yield gauge("orchestrator_quarantined_messages", help, ({}, quarantined))


def _fullness(memory: Mapping[str, Any]) -> float:
    """Return how full a server is. Without memory limits, the largest server counts as the fullest."""
    used = float(memory.get("used_memory", -1))
    return used / memory["maxmemory"] if memory.get("maxmemory") else used * 1e-18


def bounded(queues: Sequence[QueueLoad]) -> list[QueueLoad]:
    """Return the queues with the most work, and all others combined."""
    if len(queues) <= MAX_QUEUES:
        return list(queues)
    by_load = sorted(queues, key=lambda queue: (-queue.ready - queue.in_flight, queue.queue))
    rest = by_load[MAX_QUEUES:]
    other = QueueLoad(
        queue=OTHER_QUEUES,
        ready=sum(queue.ready for queue in rest),
        delayed=sum(queue.delayed for queue in rest),
        in_flight=sum(queue.in_flight for queue in rest),
        oldest=max((queue.oldest for queue in rest if queue.oldest is not None), default=None),
        slots=max(queue.slots for queue in rest),
        paused=any(queue.paused for queue in rest),
    )
    return [*by_load[:MAX_QUEUES], other]


def of_queues(queues: Sequence[QueueLoad]) -> Iterator[Family]:
    """Yield the metrics of each queue."""
    samples = [({"queue": queue.queue}, queue) for queue in bounded(queues)]
    yield gauge(
        "orchestrator_queue_tasks",
        "Open tasks of a queue by state, counted up to 10000.",
        *(({**labels, "state": "ready"}, queue.ready) for labels, queue in samples),
        *(({**labels, "state": "delayed"}, queue.delayed) for labels, queue in samples),
        *(({**labels, "state": "in_flight"}, queue.in_flight) for labels, queue in samples),
    )
    for name, (field, help) in _OF_QUEUES.items():
        yield gauge(name, help, *((labels, float(getattr(queue, field) or 0)) for labels, queue in samples))


def of_demands(demands: Sequence[QueueDemand]) -> Family:
    """Return the demand of each queue in slots. Queues with the least demand are combined."""
    by_size = sorted(demands, key=lambda demand: (-demand.wanted, demand.queue))
    samples = [({"queue": demand.queue}, float(demand.wanted)) for demand in by_size[:MAX_QUEUES]]
    if rest := by_size[MAX_QUEUES:]:
        samples.append(({"queue": OTHER_QUEUES}, float(sum(demand.wanted for demand in rest))))
    return gauge(WANTED, "Slots that a queue needs to start its tasks in time.", *samples)


WANTED = "orchestrator_queue_wanted_slots"
_OF_QUEUES = {
    "orchestrator_queue_oldest_seconds": (
        "oldest",
        "Age of the oldest task of a queue that only waits for a free slot; 0 where none does.",
    ),
    "orchestrator_queue_slots": (
        "slots",
        "Slots of the live workers of a queue, shared by all their queues.",
    ),
    "orchestrator_queue_paused": ("paused", "Whether a queue is paused."),
}
_OF_SYSTEM = {
    "orchestrator_lease_term": ("term", "Number of the current leader's term."),
    "orchestrator_lease_remaining_seconds": ("lease_remaining", "Time until the lease runs out unless it is renewed."),
    "orchestrator_leader_idle_seconds": ("leader_idle", "Time since the leader last did all of its work."),
    "orchestrator_inbox_requests": ("inbox", "Requests that the leader has not applied yet, counted up to 10000."),
    "orchestrator_stuck_runs": ("stuck_runs", "Runs that are stuck."),
    "orchestrator_late_schedules": ("late_schedules", "Schedules that should have fired more than a minute ago."),
    "orchestrator_schedule_lateness_seconds": (
        "lateness",
        "Time since the first of the late schedules should have fired.",
    ),
    "orchestrator_workers": ("live_workers", "Live worker processes."),
    "orchestrator_slots": ("slots", "Slots of the live workers."),
    "orchestrator_slots_used": ("running", "Tasks that the live workers run now."),
    "orchestrator_open_tasks": ("open_tasks", "Open tasks in total, as Postgres estimates."),
    "orchestrator_postgres_dead_rows": ("dead_rows", "Dead rows of open tasks that vacuum has not removed."),
    "orchestrator_postgres_oldest_transaction_seconds": (
        "transaction_age",
        "Age of the oldest open transaction, behind which vacuum removes nothing.",
    ),
    "orchestrator_postgres_connections": ("connections", "Open connections to Postgres, of all programs."),
    "orchestrator_postgres_connections_limit": ("max_connections", "Maximum number of connections to Postgres."),
    "orchestrator_postgres_size_bytes": ("size", "Size of the tables on disk, with their indexes."),
}


def of_system(load: SystemLoad) -> Iterator[Family]:
    """Yield the metrics of the whole system."""
    for name, (field, help) in _OF_SYSTEM.items():
        value = getattr(load, field)
        if value is not None:
            yield gauge(name, help, ({}, value))
