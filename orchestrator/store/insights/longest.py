"""Tasks that ran longest lately, and the last hour of one worker."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.domain.states import ENDED_TASK_STATES
from orchestrator.store.insights.tasks import MOST_LOOKED_AT, TaskView, find_tasks
from orchestrator.store.sql import Row, Statement
from orchestrator.store.throughput import Throughput

# In the order of their ends, which an index has; a bounded number of them is looked at.
_LATELY = f"""(SELECT * FROM orchestrator.ended_tasks WHERE ended_at >= %(since)s::timestamptz
          ORDER BY ended_at DESC LIMIT {MOST_LOOKED_AT}) AS lately
 WHERE (%(queue)s::text IS NULL OR queue = %(queue)s::text)
   AND (%(worker)s::text IS NULL OR worker = %(worker)s::text)"""
_SLOWEST = Statement[UUID](f"""
SELECT /* insights.slowest */ id FROM {_LATELY} AND started_at IS NOT NULL
 ORDER BY ended_at - started_at DESC LIMIT %(limit)s
""")


def slowest(
    connection: Connection, since: datetime, *, queue: str | None = None, worker: str | None = None, limit: int = 10
) -> list[TaskView]:
    """Return the tasks that ran longest, of a queue or a worker, among the last ten thousand that have ended."""
    ids = _SLOWEST(connection, since=since, queue=queue, worker=worker, limit=limit)
    found = {task.id: task for task in find_tasks(connection, [id.bytes for id in ids])}
    return [found[id] for id in ids if id in found]


_COUNTS = ", ".join(f"count(*) FILTER (WHERE status = '{state}') AS {state}" for state in ENDED_TASK_STATES)
_MINUTES = Statement[Row](f"""
SELECT /* insights.minutes_of_worker */ date_trunc('minute', ended_at) AS bucket, {_COUNTS},
       array_agg(width_bucket(extract(epoch FROM ended_at - started_at), %(bounds)s::numeric[]))
           FILTER (WHERE started_at IS NOT NULL) AS runs
  FROM {_LATELY} GROUP BY 1 ORDER BY 1
""")


def minutes_of_worker(
    connection: Connection, worker: str, since: datetime, bounds: tuple[float, ...]
) -> list[Throughput]:
    """Return what a worker has ended, by the minute, with run times by these bounds."""
    found = []
    for row in _MINUTES(connection, worker=worker, queue=None, since=since, bounds=list(bounds)):
        runs = [0] * (len(bounds) + 1)
        for place in row.runs or ():
            runs[place] += 1
        counts = {str(state): getattr(row, state) for state in ENDED_TASK_STATES}
        known = {"bucket": row.bucket, "queue": "", "waits": (), "runs": runs, **counts}
        found.append(Throughput(dispatched=0, retried=0, lost=0, **known))
    return found
