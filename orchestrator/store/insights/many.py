"""What stands in each queue where there is so much of it that counting all would keep people waiting.

Each number costs a walk along an index, and the walks of all queues together are of a bounded length. A number that
has come to the end of its walk is the least that there is.
"""

from __future__ import annotations

from sqlalchemy import Connection

from orchestrator.store.sql import Statement
from orchestrator.store.tables.tasks import DELAYED, NOBODY, READY_IN_LANE, READY_PLAIN

FEW = 20_000
"""Up to so many open tasks, all are counted."""
MOST_COUNTED = 50_000
"""Ready tasks that are counted, of all queues together; each has the same share."""
_LEAST_SHARE = 100
_MOST_OTHERS = 10_000
"""Tasks of each other kind that are looked at."""
MOST_QUEUES = 1_000
_MOST_PRIORITIES = 20
_MOST_LOOKED_AT = 1_000
"""Tasks with keys whose ages are looked at, in each queue."""

_MANY = Statement[bool]("""
SELECT /* insights.many.is_much */ count(*) > %(few)s::int
  FROM (SELECT FROM orchestrator.tasks LIMIT %(few)s::int + 1) AS counted
""")


def is_much(connection: Connection) -> bool:
    """Say whether there are so many open tasks that they are not all counted."""
    return _MANY.one(connection, few=FEW)


def walk(name: str, condition: str) -> str:
    """Return a recursive query of the queues that have such a task: from each in the index to the next one."""
    return f"""
{name}(queue) AS (
    (SELECT queue FROM orchestrator.tasks WHERE {condition} ORDER BY queue LIMIT 1)
     UNION ALL
    SELECT (SELECT t.queue FROM orchestrator.tasks t WHERE {condition} AND t.queue > {name}.queue
             ORDER BY t.queue LIMIT 1)
      FROM {name} WHERE {name}.queue IS NOT NULL
)"""


def oldest_plain(queue: str) -> str:
    """Return a query of the time of the oldest ready task of a queue without a lane: at the front of a priority."""
    return f"""
    WITH RECURSIVE front(priority, created_at) AS (
        (SELECT t.priority, t.created_at FROM orchestrator.tasks t
          WHERE t.queue = {queue} AND {READY_PLAIN} ORDER BY t.priority DESC, t.seq LIMIT 1)
         UNION ALL
        SELECT next.priority, next.created_at FROM front CROSS JOIN LATERAL (
            SELECT t.priority, t.created_at FROM orchestrator.tasks t
             WHERE t.queue = {queue} AND {READY_PLAIN} AND t.priority < front.priority
             ORDER BY t.priority DESC, t.seq LIMIT 1) AS next
    ) SELECT min(created_at) AS oldest FROM (SELECT created_at FROM front LIMIT {_MOST_PRIORITIES}) AS fronts"""


def oldest_in_lane(queue: str) -> str:
    """Return a query of the time of the oldest of the first ready tasks of a queue with lanes."""
    return f"""
    SELECT min(created_at) AS oldest FROM (
        SELECT t.created_at FROM orchestrator.tasks t WHERE t.queue = {queue} AND {READY_IN_LANE}
         ORDER BY t.lane, t.priority DESC, t.seq LIMIT {_MOST_LOOKED_AT}) AS looked_at"""


def _walked(name: str, condition: str) -> str:
    return f"""{walk(name, condition)}, of_{name} AS MATERIALIZED (
    SELECT queue FROM {name} WHERE starts_with(queue, %(within)s::text) LIMIT {MOST_QUEUES}
)"""


def _counted(name: str, condition: str, oldest: str) -> str:
    return f"""
SELECT queue, number, number >= share.size AS is_least, oldest FROM of_{name} CROSS JOIN share CROSS JOIN LATERAL (
    SELECT count(*) AS number FROM (SELECT FROM orchestrator.tasks t WHERE t.queue = of_{name}.queue AND {condition}
                                     LIMIT (SELECT size FROM share)) AS walked) AS ready
       CROSS JOIN LATERAL ({oldest}) AS first"""


COUNTS = f"""
{_walked("plain", READY_PLAIN)}, {_walked("laned", READY_IN_LANE)}, share AS MATERIALIZED (
    SELECT greatest({_LEAST_SHARE}, {MOST_COUNTED} / greatest(1,
               (SELECT count(*) FROM of_plain) + (SELECT count(*) FROM of_laned)))::int AS size
), free AS (
    SELECT queue, sum(number)::int AS ready, bool_or(is_least) AS is_least, min(oldest) AS oldest
      FROM ({_counted("plain", READY_PLAIN, oldest_plain("of_plain.queue"))}
             UNION ALL {_counted("laned", READY_IN_LANE, oldest_in_lane("of_laned.queue"))}) AS kinds GROUP BY queue
), woken AS MATERIALIZED (
    SELECT queue, status, blockers, hold, wake_at FROM orchestrator.tasks WHERE wake_at IS NOT NULL
     LIMIT {_MOST_OTHERS}
), held AS MATERIALIZED (
    SELECT queue, status, blockers, hold, wake_at FROM orchestrator.tasks WHERE hold IS NOT NULL LIMIT {_MOST_OTHERS}
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
     WHERE run_id IS NOT NULL LIMIT {_MOST_OTHERS}
), others AS (
    SELECT queue, count(*) FILTER (WHERE status = 'pending' AND blockers > 0 AND NOT is_turn)::int AS blocked
      FROM of_runs GROUP BY queue
), flying AS MATERIALIZED (
    SELECT queue, status FROM orchestrator.tasks WHERE status IN ('dispatched', 'running') LIMIT {_MOST_OTHERS}
), moving AS (
    SELECT queue, count(*) FILTER (WHERE status = 'dispatched')::int AS dispatched,
           count(*) FILTER (WHERE status = 'running')::int AS running FROM flying GROUP BY queue
), waiting AS (
    SELECT queue, coalesce(ready, 0) + coalesce(crowded, 0) AS ready, delayed, unknown, blocked, dispatched, running,
           extract(epoch FROM now() - oldest)::double precision AS oldest_ready,
           array_remove(ARRAY[
               CASE WHEN is_least THEN 'ready' END,
               CASE WHEN (SELECT count(*) FROM woken) >= {_MOST_OTHERS} THEN 'delayed' END,
               CASE WHEN (SELECT count(*) FROM held) >= {_MOST_OTHERS} THEN 'unknown' END,
               CASE WHEN (SELECT count(*) FROM of_runs) >= {_MOST_OTHERS} THEN 'blocked' END,
               CASE WHEN (SELECT count(*) FROM flying) >= {_MOST_OTHERS} THEN 'dispatched' END,
               CASE WHEN (SELECT count(*) FROM flying) >= {_MOST_OTHERS} THEN 'running' END], NULL) AS least
      FROM free FULL JOIN later USING (queue) FULL JOIN kept_back USING (queue) FULL JOIN others USING (queue)
      FULL JOIN moving USING (queue)
)"""
"""What stands for one pass over the open tasks: a list of WITH that is RECURSIVE, and ends with `waiting`."""
