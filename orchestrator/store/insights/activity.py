"""Current activity: each statement reads a bounded number of rows along an index."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.domain.states import ENDED_TASK_STATES
from orchestrator.sealing import is_sealed_text, reveal_text
from orchestrator.store.fleet import IS_FRESH
from orchestrator.store.insights.failures import handled_groups
from orchestrator.store.insights.tasks import MAX_SCANNED, TaskView, find_tasks
from orchestrator.store.sql import Row, Statement
from orchestrator.store.tasks.redrive import group_of
from orchestrator.store.throughput import Throughput

MAX_ENDED = 30_000
MAX_RUNNING = 500
MAX_WORKERS = 200
_MAX_FAILURES = 1_000
_MAX_MESSAGE = 500
"""Characters of a message."""


@dataclass(frozen=True, kw_only=True)
class EndedInSecond:
    """The number of tasks of a queue that ended in one second."""

    queue: str
    """The name of the queue."""
    status: str
    """The state in which the tasks ended."""
    second: int
    """The second, in Unix time."""
    tasks: int
    """The number of tasks."""


@Statement.function("SELECT /* insights.activity.now */ extract(epoch FROM clock_timestamp())::double precision")
def time_of(connection: Connection) -> float:
    """Return the time in Postgres, in Unix seconds."""


@Statement.function(f"""
SELECT /* insights.activity.ended */ queue, status, floor(extract(epoch FROM ended_at))::bigint AS second,
       count(*)::int AS tasks
  FROM (SELECT queue, status, ended_at FROM orchestrator.ended_tasks
         WHERE ended_at > now() - %(seconds)s::double precision * interval '1 second'
         ORDER BY ended_at DESC LIMIT {MAX_ENDED}) AS latest
 GROUP BY 1, 2, 3
""")
def recently_ended(connection: Connection, seconds: float) -> list[EndedInSecond]:
    """Return the number of tasks that ended in each of the last seconds, counting at most `MAX_ENDED`."""


@dataclass(frozen=True, kw_only=True)
class TaskInFlight:
    """A task that a worker has or is about to receive."""

    id: str
    """The id of the task."""
    name: str
    """The name of the task."""
    queue: str
    """The queue of the task."""
    status: str
    """`dispatched` or `running`."""
    worker: str | None
    """The worker that runs the task; None until that is known."""
    attempt: int
    """The number of this attempt."""
    run_id: str | None
    """The run of the task."""
    seconds: float
    """Seconds since the attempt started, or was dispatched."""


@Statement.function(f"""
SELECT /* insights.activity.in_flight */ id::text AS id, name, queue, status,
       CASE WHEN status = 'running' THEN worker END AS worker, attempt, run_id::text AS run_id,
       extract(epoch FROM clock_timestamp() - coalesce(CASE WHEN status = 'running' THEN started_at END,
                                                       dispatched_at, created_at))::double precision AS seconds
  FROM (SELECT id, name, queue, status, worker, attempt, run_id, started_at, dispatched_at, created_at
          FROM orchestrator.tasks WHERE status IN ('dispatched', 'running') ORDER BY id LIMIT {MAX_RUNNING}) AS first
 ORDER BY status DESC, seconds DESC
""")
def in_flight(connection: Connection) -> list[TaskInFlight]:
    """Return running tasks, longest first, then dispatched ones; at most `MAX_RUNNING`, by creation."""


@dataclass(frozen=True, kw_only=True)
class WorkerNow:
    """A summary of one worker process."""

    id: str
    """The id of the worker."""
    queues: tuple[str, ...]
    """The queues that the worker serves."""
    slots: int
    """The number of tasks that the worker runs at once."""
    running: int
    """The number of tasks that the worker is running."""
    state: str
    """`live`, `draining`, `still` or `unheard`."""


@Statement.function(f"""
SELECT /* insights.activity.workers */ id, queues, slots, running,
       CASE WHEN NOT {IS_FRESH} THEN 'unheard' WHEN still_since IS NOT NULL THEN 'still' ELSE state END AS state
  FROM orchestrator.workers WHERE state NOT IN ('dead', 'stopped') ORDER BY host, started_at, id LIMIT {MAX_WORKERS}
""")
def workers_now(connection: Connection) -> list[WorkerNow]:
    """Return the existing workers."""


@dataclass(frozen=True, kw_only=True)
class FailureGroup:
    """Failures of one task with similar errors."""

    name: str
    """The name of the task."""
    kind: str
    """The type of the error."""
    message: str
    """The message of the latest failure."""
    tasks: int
    """The number of failures in the last quarter of an hour."""
    last: datetime
    """When the latest failure ended."""
    latest: str
    """The task of the latest failure."""
    queue: str = ""
    """The queue of the tasks."""
    id: str = ""
    """The id of the group within task and queue."""
    state: str = ""
    """`acknowledged` if somebody has acknowledged the group."""

    @property
    def key(self) -> str:
        """The key of the group."""
        return f"{self.name} {self.id} {self.queue}"


_FAILURES = Statement[FailureGroup](f"""
SELECT /* insights.activity.failures */ name, coalesce(error->>'kind', reason, status) AS kind,
       coalesce((array_agg(error->>'message' ORDER BY ended_at DESC))[1], '') AS message,
       count(*)::int AS tasks, max(ended_at) AS last, (array_agg(id::text ORDER BY ended_at DESC))[1] AS latest,
       queue, {group_of("latest")} AS id
  FROM (SELECT id, name, queue, error, reason, status, ended_at FROM orchestrator.ended_tasks
         WHERE status <> 'success' AND ended_at > now() - interval '15 minutes'
         ORDER BY ended_at DESC LIMIT {_MAX_FAILURES}) AS latest
 WHERE status = 'failed' GROUP BY name, kind, queue, {group_of("latest")} ORDER BY tasks DESC, last DESC LIMIT 50
""")


def recent_failures(connection: Connection) -> list[FailureGroup]:
    """Return the failures of the last quarter of an hour by task, error and queue, counting at most `_MAX_FAILURES`.

    Snoozed groups are left out, and acknowledged groups come last.
    """
    by_key = {(group.name, group.queue, group.id): group for group in _FAILURES(connection)}
    handled = handled_groups(connection, by_key)
    now = datetime.now(UTC)
    states = {key: decision.state(now, by_key[key].last) for key, decision in handled.items()}
    groups = [
        replace(group, message=_short(reveal_text(group.message)), state=states.get(key, ""))
        for key, group in by_key.items()
    ]
    return sorted((group for group in groups if group.state != "snoozed"), key=lambda group: bool(group.state))


def _short(message: str) -> str:
    return message if is_sealed_text(message) else message[:_MAX_MESSAGE]


# -- the slowest recent tasks, and the last hour of one worker

# In the order of the tasks' ends, which has an index; a bounded number is scanned.
_LATELY = f"""(SELECT * FROM orchestrator.ended_tasks WHERE ended_at >= %(since)s::timestamptz
          ORDER BY ended_at DESC LIMIT {MAX_SCANNED}) AS lately
 WHERE (%(queue)s::text IS NULL OR queue = %(queue)s::text)
   AND (%(worker)s::text IS NULL OR worker = %(worker)s::text)"""
_SLOWEST = Statement[UUID](f"""
SELECT /* insights.slowest */ id FROM {_LATELY} AND started_at IS NOT NULL
 ORDER BY ended_at - started_at DESC LIMIT %(limit)s
""")


def slowest(
    connection: Connection, since: datetime, *, queue: str | None = None, worker: str | None = None, limit: int = 10
) -> list[TaskView]:
    """Return the tasks of a queue or worker that ran longest, among the last `MAX_SCANNED` ended ones."""
    ids = _SLOWEST(connection, since=since, queue=queue, worker=worker, limit=limit)
    by_id = {task.id: task for task in find_tasks(connection, [id.bytes for id in ids])}
    return [by_id[id] for id in ids if id in by_id]


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
    """Return a worker's ended tasks by minute, with a histogram of run times by these bounds."""
    buckets = []
    for row in _MINUTES(connection, worker=worker, queue=None, since=since, bounds=list(bounds)):
        runs = [0] * (len(bounds) + 1)
        for bucket in row.runs or ():
            runs[bucket] += 1
        counts = {str(state): getattr(row, state) for state in ENDED_TASK_STATES}
        columns = {"bucket": row.bucket, "queue": "", "waits": (), "runs": runs, **counts}
        buckets.append(Throughput(dispatched=0, retried=0, lost=0, **columns))
    return buckets
