"""The backlog, for callers that ask every few seconds: each number costs a walk along an index, and no more.

`fleet.list_queues` counts every open task, which takes long where there are millions. Here nothing is counted beyond
`MOST_COUNTED`, and the oldest task of a queue is found at the front of its priorities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from orchestrator.domain.fleet.window import mean_time, wanted_slots
from orchestrator.store import throughput
from orchestrator.store.fleet import IS_FRESH
from orchestrator.store.insights.many import MOST_QUEUES, oldest_in_lane, oldest_plain, walk
from orchestrator.store.namespaces import root_of
from orchestrator.store.shards import ours
from orchestrator.store.sql import Statement
from orchestrator.store.tables.tasks import READY_IN_LANE, READY_PLAIN

MOST_COUNTED = 10_000
"""Counts stop at this number; Postgres estimates the total."""


@dataclass(frozen=True, kw_only=True)
class QueueLoad:
    """The open tasks of one queue, waiting and in flight."""

    queue: str
    """Its name."""
    ready: int
    """Tasks that only wait for a free slot."""
    delayed: int
    """Tasks that wait for their time, or for a worker that knows them."""
    in_flight: int
    """Tasks that are with the workers, or on their way."""
    oldest: float | None
    """Seconds since the oldest ready task was enqueued, its delays included."""
    slots: int
    """How many tasks its live workers run at once."""
    paused: bool
    """Nothing of it is handed out."""


def _front(name: str, condition: str, oldest: Callable[[str], str]) -> str:
    return f"""
        SELECT queue,
               (SELECT count(*) FROM (SELECT FROM orchestrator.tasks t WHERE t.queue = {name}.queue AND {condition}
                                       LIMIT {MOST_COUNTED}) AS counted) AS number,
               ({oldest(f"{name}.queue")}) AS oldest
          FROM (SELECT queue FROM {name} WHERE queue IS NOT NULL LIMIT {MOST_QUEUES}) AS {name}"""


def use_indexes(connection: Connection, seconds: float) -> None:
    """Have these statements take the indexes, also where Postgres has no statistics yet, and no longer than this."""
    connection.exec_driver_sql(
        f"SET statement_timeout = {int(1_000 * seconds)}; SET jit = off; "
        "SET enable_seqscan = off; SET enable_bitmapscan = off"
    )


@Statement.function(f"""
WITH /* insights.load.queues */ RECURSIVE {walk("plain", READY_PLAIN)}, {walk("in_lanes", READY_IN_LANE)}, waiting AS (
    SELECT queue, sum(number) AS ready, min(oldest) AS oldest
      FROM ({_front("plain", READY_PLAIN, oldest_plain)}
             UNION ALL {_front("in_lanes", READY_IN_LANE, oldest_in_lane)}) AS kinds GROUP BY queue
), later AS (
    SELECT queue, count(*) AS delayed
      FROM (SELECT queue FROM orchestrator.tasks WHERE wake_at IS NOT NULL LIMIT {MOST_COUNTED}) AS counted
     GROUP BY queue
), moving AS (
    SELECT queue, count(*) AS in_flight
      FROM (SELECT queue FROM orchestrator.tasks WHERE status IN ('dispatched', 'running')
             LIMIT {MOST_COUNTED}) AS counted
     GROUP BY queue
), serving AS (
    SELECT queue, sum(slots) AS slots FROM orchestrator.workers CROSS JOIN LATERAL unnest(queues) AS queue
     WHERE state = 'live' AND still_since IS NULL AND {IS_FRESH} GROUP BY queue
)
SELECT queue, coalesce(ready, 0)::int AS ready, coalesce(delayed, 0)::int AS delayed,
       coalesce(in_flight, 0)::int AS in_flight,
       extract(epoch FROM now() - oldest)::double precision AS oldest, coalesce(slots, 0)::int AS slots,
       coalesce(paused, false) AS paused
  FROM waiting FULL JOIN later USING (queue) FULL JOIN moving USING (queue) FULL JOIN serving USING (queue)
  FULL JOIN (SELECT name AS queue, paused FROM orchestrator.queues WHERE paused) AS chosen USING (queue)
 ORDER BY queue LIMIT {MOST_QUEUES}
""")
def queue_loads(connection: Connection) -> list[QueueLoad]:
    """Return the queues that have something to do, a live worker, or are paused."""


@dataclass(frozen=True, kw_only=True)
class SystemLoad:
    """Numbers about the whole."""

    term: int | None
    """The number of the present term; None before the first."""
    lease_remaining: float | None
    """Seconds until the lease runs out, unless it is renewed; below zero without a leader."""
    leader_idle: float | None
    """Seconds since the leader last did all of its work."""
    inbox: int
    """Requests that the leader has not applied yet."""
    stuck_runs: int
    """Runs that cannot go on."""
    late_schedules: int
    """Schedules that should have fired more than a minute ago."""
    lateness: float
    """Seconds since the first of these should have fired."""
    live_workers: int
    """Worker processes that take tasks."""
    slots: int
    """How many tasks they run at once."""
    running: int
    """How many they run now."""
    open_tasks: int
    """About how many tasks are open."""
    dead_rows: int
    """About how many dead rows the table of open tasks carries along."""
    transaction_age: float
    """Seconds for which the oldest transaction of this database has been open."""
    connections: int
    """Connections to Postgres, of all its databases and programs."""
    max_connections: int
    """How many there may be."""
    size: int
    """Bytes of our tables on disk, with their indexes."""


_SYSTEM_LOAD = Statement[SystemLoad](f"""
SELECT /* insights.load.system */ lease.term,
       extract(epoch FROM lease.expires_at - clock_timestamp())::double precision AS lease_remaining,
       (SELECT extract(epoch FROM clock_timestamp() - min(useful_at)) FROM orchestrator.leases
         WHERE useful_term = term AND expires_at > clock_timestamp())::double precision AS leader_idle,
       (SELECT count(*) FROM (SELECT FROM orchestrator.inbox LIMIT {MOST_COUNTED}) AS counted)::int AS inbox,
       (SELECT count(*) FROM (SELECT FROM orchestrator.runs WHERE stuck IS NOT NULL AND ended_at IS NULL
                               LIMIT {MOST_COUNTED}) AS counted)::int AS stuck_runs,
       late.schedules::int AS late_schedules, coalesce(late.seconds, 0)::double precision AS lateness,
       fleet.workers::int AS live_workers, fleet.slots::int AS slots, fleet.running::int AS running,
       coalesce(kept.n_live_tup, 0)::bigint AS open_tasks, coalesce(kept.n_dead_tup, 0)::bigint AS dead_rows,
       coalesce((SELECT extract(epoch FROM clock_timestamp() - min(xact_start)) FROM pg_stat_activity
                  WHERE datname = current_database() AND backend_type = 'client backend'
                    AND pid <> pg_backend_pid() AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
                    AND query NOT ILIKE 'vacuum%%'), 0)::double precision AS transaction_age,
       (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend')::int AS connections,
       current_setting('max_connections')::int AS max_connections,
       (SELECT coalesce(sum(pg_total_relation_size(tables.oid)), 0)
          FROM pg_class AS tables JOIN pg_namespace AS schemas ON schemas.oid = relnamespace
         WHERE relkind = 'r' AND {ours("nspname")})::bigint AS size
  FROM (SELECT count(*) AS schedules, max(extract(epoch FROM now() - due_at)) AS seconds FROM (
            SELECT due_at FROM orchestrator.schedules
             WHERE due_at IS NOT NULL AND NOT paused AND due_at < now() - interval '1 minute'
             ORDER BY due_at LIMIT {MOST_COUNTED}) AS due) AS late
 CROSS JOIN (SELECT count(*) AS workers, coalesce(sum(slots), 0) AS slots, coalesce(sum(running), 0) AS running
               FROM orchestrator.workers WHERE state = 'live' AND still_since IS NULL AND {IS_FRESH}) AS fleet
  LEFT JOIN (SELECT * FROM orchestrator.leases ORDER BY expires_at LIMIT 1) AS lease ON true
 CROSS JOIN (SELECT sum(n_live_tup) AS n_live_tup, sum(n_dead_tup) AS n_dead_tup FROM pg_stat_user_tables
              WHERE relname = 'tasks' AND {ours("schemaname")}) AS kept
""")


def system_load(connection: Connection) -> SystemLoad:
    """Return numbers about the whole; with several shards, of the worst lease and the worst leader."""
    return _SYSTEM_LOAD.one(connection, root=root_of(connection))


# -- how many slots each queue wants, for what scales workers


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
