"""The backlog, for callers that poll every few seconds: each number costs one bounded index scan.

`fleet.list_queues` counts every open task, which is slow with millions. Here counts stop at `MAX_COUNTED`, and the
oldest task of a queue is found at the front of each priority.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from orchestrator.domain.fleet.window import mean_time, wanted_slots
from orchestrator.store import throughput
from orchestrator.store.fleet import IS_FRESH
from orchestrator.store.namespaces import root_of
from orchestrator.store.shards import ours
from orchestrator.store.sql import Statement
from orchestrator.store.tables.tasks import DELAYED, NOBODY, READY_IN_LANE, READY_PLAIN

MAX_COUNTED_EXACTLY = 20_000
"""Up to this number of open tasks, all tasks are counted."""
MAX_READY_COUNTED = 50_000
"""Ready tasks to count over all queues; each queue has the same share."""
_MIN_SHARE = 100
_MAX_SCANNED = 10_000
"""Tasks to scan of each other kind: delayed, held, of runs, in flight."""
MAX_QUEUES = 1_000
_MAX_PRIORITIES = 20
_MAX_AGES_COMPARED = 1_000
"""Tasks with keys whose age is compared, for each queue."""

_MANY = Statement[bool]("""
SELECT /* insights.many.is_much */ count(*) > %(few)s::int
  FROM (SELECT FROM orchestrator.tasks LIMIT %(few)s::int + 1) AS counted
""")


def has_many_open_tasks(connection: Connection) -> bool:
    """Return whether there are more open tasks than are counted exactly."""
    return _MANY.one(connection, few=MAX_COUNTED_EXACTLY)


def walk(name: str, condition: str) -> str:
    """Return a recursive query of the queues that have matching tasks: one index probe for each queue."""
    return f"""
{name}(queue) AS (
    (SELECT queue FROM orchestrator.tasks WHERE {condition} ORDER BY queue LIMIT 1)
     UNION ALL
    SELECT (SELECT t.queue FROM orchestrator.tasks t WHERE {condition} AND t.queue > {name}.queue
             ORDER BY t.queue LIMIT 1)
      FROM {name} WHERE {name}.queue IS NOT NULL
)"""


def oldest_plain(queue: str) -> str:
    """Return a query of the creation time of the oldest ready task without a lane, at the front of some priority."""
    return f"""
    WITH RECURSIVE front(priority, created_at) AS (
        (SELECT t.priority, t.created_at FROM orchestrator.tasks t
          WHERE t.queue = {queue} AND {READY_PLAIN} ORDER BY t.priority DESC, t.seq LIMIT 1)
         UNION ALL
        SELECT next.priority, next.created_at FROM front CROSS JOIN LATERAL (
            SELECT t.priority, t.created_at FROM orchestrator.tasks t
             WHERE t.queue = {queue} AND {READY_PLAIN} AND t.priority < front.priority
             ORDER BY t.priority DESC, t.seq LIMIT 1) AS next
    ) SELECT min(created_at) AS oldest FROM (SELECT created_at FROM front LIMIT {_MAX_PRIORITIES}) AS fronts"""


def oldest_in_lane(queue: str) -> str:
    """Return a query of the creation time of the oldest ready task at the front of some lane."""
    return f"""
    SELECT min(created_at) AS oldest FROM (
        SELECT t.created_at FROM orchestrator.tasks t WHERE t.queue = {queue} AND {READY_IN_LANE}
         ORDER BY t.lane, t.priority DESC, t.seq LIMIT {_MAX_AGES_COMPARED}) AS looked_at"""


def _matching_queues(name: str, condition: str) -> str:
    return f"""{walk(name, condition)}, of_{name} AS MATERIALIZED (
    SELECT queue FROM {name} WHERE starts_with(queue, %(within)s::text) LIMIT {MAX_QUEUES}
)"""


def _ready_rows(name: str, condition: str, oldest: str) -> str:
    return f"""
SELECT queue, number, number >= share.size AS is_least, oldest FROM of_{name} CROSS JOIN share CROSS JOIN LATERAL (
    SELECT count(*) AS number FROM (SELECT FROM orchestrator.tasks t WHERE t.queue = of_{name}.queue AND {condition}
                                     LIMIT (SELECT size FROM share)) AS walked) AS ready
       CROSS JOIN LATERAL ({oldest}) AS first"""


COUNTS = f"""
{_matching_queues("plain", READY_PLAIN)}, {_matching_queues("laned", READY_IN_LANE)}, share AS MATERIALIZED (
    SELECT greatest({_MIN_SHARE}, {MAX_READY_COUNTED} / greatest(1,
               (SELECT count(*) FROM of_plain) + (SELECT count(*) FROM of_laned)))::int AS size
), free AS (
    SELECT queue, sum(number)::int AS ready, bool_or(is_least) AS is_least, min(oldest) AS oldest
      FROM ({_ready_rows("plain", READY_PLAIN, oldest_plain("of_plain.queue"))}
             UNION ALL {_ready_rows("laned", READY_IN_LANE, oldest_in_lane("of_laned.queue"))}) AS kinds GROUP BY queue
), woken AS MATERIALIZED (
    SELECT queue, status, blockers, hold, wake_at FROM orchestrator.tasks WHERE wake_at IS NOT NULL
     LIMIT {_MAX_SCANNED}
), held AS MATERIALIZED (
    SELECT queue, status, blockers, hold, wake_at FROM orchestrator.tasks WHERE hold IS NOT NULL LIMIT {_MAX_SCANNED}
), later AS (
    SELECT queue, count(*) FILTER (WHERE {DELAYED})::int AS delayed FROM woken GROUP BY queue
), kept_back AS (
    SELECT queue,
           count(*) FILTER (WHERE status = 'pending' AND blockers = 0 AND wake_at IS NOT NULL AND {NOBODY})::int
               AS unknown,
           count(*) FILTER (WHERE status = 'pending' AND blockers = 0 AND wake_at IS NOT NULL AND NOT {NOBODY})::int
               AS crowded
      FROM held GROUP BY queue
), of_runs AS MATERIALIZED (
    SELECT queue, status, blockers, id = run_id AS is_turn FROM orchestrator.tasks
     WHERE run_id IS NOT NULL LIMIT {_MAX_SCANNED}
), others AS (
    SELECT queue, count(*) FILTER (WHERE status = 'pending' AND blockers > 0 AND NOT is_turn)::int AS blocked
      FROM of_runs GROUP BY queue
), flying AS MATERIALIZED (
    SELECT queue, status FROM orchestrator.tasks WHERE status IN ('dispatched', 'running') LIMIT {_MAX_SCANNED}
), moving AS (
    SELECT queue, count(*) FILTER (WHERE status = 'dispatched')::int AS dispatched,
           count(*) FILTER (WHERE status = 'running')::int AS running FROM flying GROUP BY queue
), capped AS (
    SELECT array_remove(ARRAY[
               CASE WHEN (SELECT count(*) FROM woken) >= {_MAX_SCANNED} THEN 'delayed' END,
               CASE WHEN (SELECT count(*) FROM held) >= {_MAX_SCANNED} THEN 'unknown' END,
               CASE WHEN (SELECT count(*) FROM of_runs) >= {_MAX_SCANNED} THEN 'blocked' END,
               CASE WHEN (SELECT count(*) FROM flying) >= {_MAX_SCANNED} THEN 'dispatched' END,
               CASE WHEN (SELECT count(*) FROM flying) >= {_MAX_SCANNED} THEN 'running' END], NULL) AS least
), waiting AS (
    SELECT queue, coalesce(ready, 0) + coalesce(crowded, 0) AS ready, delayed, unknown, blocked, dispatched, running,
           extract(epoch FROM now() - oldest)::double precision AS oldest_ready,
           CASE WHEN is_least THEN '{{ready}}'::text[] ELSE '{{}}' END || (SELECT least FROM capped) AS least
      FROM free FULL JOIN later USING (queue) FULL JOIN kept_back USING (queue) FULL JOIN others USING (queue)
      FULL JOIN moving USING (queue)
)"""
"""A WITH RECURSIVE list that counts the open tasks in one pass; its last part is `waiting`.

`least` names the columns that are lower bounds because their scans were capped.
"""


MAX_COUNTED = 10_000
"""Counts stop at this number; Postgres estimates the total."""


@dataclass(frozen=True, kw_only=True)
class QueueLoad:
    """The open tasks of one queue, waiting and in flight."""

    queue: str
    """The name of the queue."""
    ready: int
    """Tasks that wait only for a free slot."""
    delayed: int
    """Tasks that wait for their time, or for a worker that knows them."""
    in_flight: int
    """Dispatched or running tasks."""
    oldest: float | None
    """Seconds since the oldest ready task was enqueued, its delays included."""
    slots: int
    """The number of tasks that the queue's live workers run at once."""
    paused: bool
    """Whether the queue is paused."""


def _ready_and_oldest(name: str, condition: str, oldest: Callable[[str], str]) -> str:
    return f"""
        SELECT queue,
               (SELECT count(*) FROM (SELECT FROM orchestrator.tasks t WHERE t.queue = {name}.queue AND {condition}
                                       LIMIT {MAX_COUNTED}) AS counted) AS number,
               ({oldest(f"{name}.queue")}) AS oldest
          FROM (SELECT queue FROM {name} WHERE queue IS NOT NULL LIMIT {MAX_QUEUES}) AS {name}"""


def use_indexes(connection: Connection, seconds: float) -> None:
    """Make the statements use indexes, even without statistics, and set a timeout of `seconds`."""
    connection.exec_driver_sql(
        f"SET statement_timeout = {int(1_000 * seconds)}; SET jit = off; "
        "SET enable_seqscan = off; SET enable_bitmapscan = off"
    )


@Statement.function(f"""
WITH /* load.queues */ RECURSIVE {walk("plain", READY_PLAIN)}, {walk("in_lanes", READY_IN_LANE)}, waiting AS (
    SELECT queue, sum(number) AS ready, min(oldest) AS oldest
      FROM ({_ready_and_oldest("plain", READY_PLAIN, oldest_plain)}
             UNION ALL {_ready_and_oldest("in_lanes", READY_IN_LANE, oldest_in_lane)}) AS kinds GROUP BY queue
), later AS (
    SELECT queue, count(*) AS delayed
      FROM (SELECT queue FROM orchestrator.tasks WHERE wake_at IS NOT NULL LIMIT {MAX_COUNTED}) AS counted
     GROUP BY queue
), moving AS (
    SELECT queue, count(*) AS in_flight
      FROM (SELECT queue FROM orchestrator.tasks WHERE status IN ('dispatched', 'running')
             LIMIT {MAX_COUNTED}) AS counted
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
 ORDER BY queue LIMIT {MAX_QUEUES}
""")
def queue_loads(connection: Connection) -> list[QueueLoad]:
    """Return the queues that have open tasks or a live worker, or are paused."""


@dataclass(frozen=True, kw_only=True)
class SystemLoad:
    """Figures about the whole system."""

    term: int | None
    """The number of the current term; None before the first."""
    lease_remaining: float | None
    """Seconds until the lease expires, unless it is renewed; negative without a leader."""
    leader_idle: float | None
    """Seconds since the leader last did all of its work."""
    inbox: int
    """Requests that the leader has not applied yet."""
    stuck_runs: int
    """Runs that are stuck."""
    late_schedules: int
    """Schedules whose time to fire was more than a minute ago."""
    lateness: float
    """Seconds since the first late schedule's time to fire."""
    live_workers: int
    """Worker processes that take tasks."""
    slots: int
    """The number of tasks that the live workers run at once."""
    running: int
    """Tasks that the live workers are running."""
    open_tasks: int
    """An estimate of the number of open tasks."""
    dead_rows: int
    """An estimate of the dead rows in the table of open tasks."""
    transaction_age: float
    """The age of the oldest open transaction in this database, in seconds."""
    connections: int
    """Connections to the Postgres server, of all databases and programs."""
    max_connections: int
    """The server's limit on connections."""
    size: int
    """Bytes of the tables on disk, with their indexes."""


_SYSTEM_LOAD = Statement[SystemLoad](f"""
SELECT /* load.system */ lease.term,
       extract(epoch FROM lease.expires_at - clock_timestamp())::double precision AS lease_remaining,
       (SELECT extract(epoch FROM clock_timestamp() - min(useful_at)) FROM orchestrator.leases
         WHERE useful_term = term AND expires_at > clock_timestamp())::double precision AS leader_idle,
       (SELECT count(*) FROM (SELECT FROM orchestrator.inbox LIMIT {MAX_COUNTED}) AS counted)::int AS inbox,
       (SELECT count(*) FROM (SELECT FROM orchestrator.runs WHERE stuck IS NOT NULL AND ended_at IS NULL
                               LIMIT {MAX_COUNTED}) AS counted)::int AS stuck_runs,
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
             ORDER BY due_at LIMIT {MAX_COUNTED}) AS due) AS late
 CROSS JOIN (SELECT count(*) AS workers, coalesce(sum(slots), 0) AS slots, coalesce(sum(running), 0) AS running
               FROM orchestrator.workers WHERE state = 'live' AND still_since IS NULL AND {IS_FRESH}) AS fleet
  LEFT JOIN (SELECT * FROM orchestrator.leases ORDER BY expires_at LIMIT 1) AS lease ON true
 CROSS JOIN (SELECT sum(n_live_tup) AS n_live_tup, sum(n_dead_tup) AS n_dead_tup FROM pg_stat_user_tables
              WHERE relname = 'tasks' AND {ours("schemaname")}) AS kept
""")


def system_load(connection: Connection) -> SystemLoad:
    """Return figures about the whole system; with several shards, of the worst lease and the worst leader."""
    return _SYSTEM_LOAD.one(connection, root=root_of(connection))


# -- the number of slots that each queue needs, for autoscalers of workers


@dataclass(frozen=True, kw_only=True)
class QueueDemand:
    """The number of slots that a queue needs, and why."""

    queue: str
    """The name of the queue."""
    wanted: int
    """The number of tasks that the queue's workers should run at once: divide it by the slots of a worker."""
    slots: int
    """The number of tasks that the queue's live workers run at once, over all of their queues."""
    busy: int
    """Slots in use by this queue."""
    ready: int
    """Tasks that wait only for a free slot, counted up to 10000; 0 if the queue is paused."""
    oldest: float | None
    """Seconds since the oldest ready task was enqueued."""
    rate: float
    """Attempts started per second, in the last minute."""
    run_time: float | None
    """The average run time of an attempt in the last minute, in seconds; None if none has ended."""


def queue_demands(
    connection: Connection, within: str = "", *, loads: Sequence[QueueLoad] | None = None
) -> list[QueueDemand]:
    """Return the demand of queues whose name begins with `within`. Pass `loads` that were just read, if any."""
    last_minute = {counts.queue: counts for counts in throughput.last_minute(connection)}
    demands = []
    for load in queue_loads(connection) if loads is None else loads:
        if not load.queue.startswith(within):
            continue
        counts = last_minute.get(load.queue)
        ready, oldest = (0, None) if load.paused else (load.ready, load.oldest)
        busy = min(load.in_flight, load.slots)
        rate, run_time = (counts.dispatched / 60, mean_time(counts.runs)) if counts else (0.0, None)
        slots_needed = wanted_slots(ready=ready, busy=busy, oldest=oldest, rate=rate, run_time=run_time)
        demands.append(
            QueueDemand(
                queue=load.queue,
                wanted=slots_needed,
                slots=load.slots,
                busy=busy,
                ready=ready,
                oldest=oldest,
                rate=rate,
                run_time=run_time,
            )
        )
    return demands
