"""Queues and the workers that serve them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.store import load
from orchestrator.store.fleet import IS_FRESH
from orchestrator.store.sql import Row, Statement
from orchestrator.store.tables.tasks import DELAYED, NOBODY, READY

IS_SERVING = f"state = 'live' AND still_since IS NULL AND {IS_FRESH}"
"""SQL condition: a worker is live and takes tasks."""

ARE_HEARD = f"""(EXISTS (SELECT FROM orchestrator.leases WHERE expires_at > clock_timestamp())
        AND coalesce((SELECT bool_or({IS_FRESH}) FROM orchestrator.workers
                       WHERE state NOT IN ('dead', 'stopped')), true))"""
"""SQL condition: a scheduler leads and hears the workers. A leader that cannot read Redis may keep its lease; a leader
that can read Redis marks silent workers as dead."""

IS_KNOWN = f"""EXISTS (SELECT FROM orchestrator.workers WHERE state = 'live' AND {IS_FRESH}
                          AND {{task}}.queue = ANY(queues) AND {{task}}.name = ANY(names))"""
"""SQL condition: a live worker knows the task. If the task is held as unknown, such workers returned it."""


@dataclass(frozen=True, kw_only=True)
class QueueCounts:
    """The tasks of one queue. Each open task counts in exactly one of the six numbers."""

    queue: str
    """The name of the queue."""
    ready: int
    """Tasks that wait only for a free slot."""
    delayed: int
    """Tasks that wait for their time: an ETA or a retry."""
    unknown: int
    """Tasks that no live worker knows, or has the data key of."""
    blocked: int
    """Tasks that wait for other tasks."""
    dispatched: int
    """Tasks dispatched, but not yet started by a worker."""
    running: int
    """Running tasks."""
    oldest_ready: float | None
    """Seconds since the oldest ready task was enqueued, its delays included."""
    workers: int
    """Live workers that serve the queue."""
    slots: int
    """The number of tasks that these workers run at once, over all of their queues."""
    paused: bool = False
    """Whether the queue is paused."""
    concurrency: int | None = None
    """The limit on running tasks."""
    rate: float | None = None
    """The limit on started tasks per second."""
    retention_success: float | None = None
    """Seconds for which successful tasks are kept; 0 keeps them for ever, None uses the settings."""
    retention_failed: float | None = None
    """Seconds for which unsuccessful tasks are kept; 0 keeps them for ever, None uses the settings."""
    least: tuple[str, ...] = ()
    """Names of the six numbers that are lower bounds: very large numbers of open tasks are not counted exactly."""
    is_led: bool = True
    """Whether a scheduler leads and hears the workers; otherwise `workers` and `slots` are unknown."""


def empty_queue(name: str) -> QueueCounts:
    """Return the counts of an empty queue."""
    return QueueCounts(
        queue=name,
        ready=0,
        delayed=0,
        unknown=0,
        blocked=0,
        dispatched=0,
        running=0,
        oldest_ready=None,
        workers=0,
        slots=0,
    )


_LATER = "status = 'pending' AND blockers = 0 AND wake_at IS NOT NULL"

_ALL = f"""
capped AS (SELECT '{{}}'::text[] AS least), waiting AS (
    SELECT queue, (SELECT least FROM capped) AS least,
           count(*) FILTER (WHERE {READY} OR NOT {NOBODY}) AS ready,
           count(*) FILTER (WHERE {DELAYED}) AS delayed,
           count(*) FILTER (WHERE {_LATER} AND {NOBODY}) AS unknown,
           count(*) FILTER (WHERE status = 'pending' AND blockers > 0 AND id IS DISTINCT FROM run_id) AS blocked,
           count(*) FILTER (WHERE status = 'dispatched') AS dispatched,
           count(*) FILTER (WHERE status = 'running') AS running,
           extract(epoch FROM now() - min(created_at) FILTER (WHERE {READY}))::double precision AS oldest_ready
      FROM orchestrator.tasks WHERE %(within)s::text = '' OR starts_with(queue, %(within)s::text) GROUP BY queue
)"""
_SHOWN = f"""
, serving AS (
    SELECT queue, count(*) AS workers, sum(slots) AS slots
      FROM orchestrator.workers CROSS JOIN LATERAL unnest(queues) AS queue
     WHERE {IS_SERVING} GROUP BY queue
)
SELECT queue, coalesce(ready, 0) AS ready, coalesce(delayed, 0) AS delayed, coalesce(unknown, 0) AS unknown,
       coalesce(blocked, 0) AS blocked, coalesce(dispatched, 0) AS dispatched, coalesce(running, 0) AS running,
       oldest_ready, coalesce(least, (SELECT least FROM capped)) AS least,
       coalesce(workers, 0) AS workers, coalesce(slots, 0) AS slots,
       coalesce(paused, false) AS paused, concurrency, rate, retention_success, retention_failed,
       {ARE_HEARD} AS is_led
  FROM waiting FULL JOIN serving USING (queue)
  FULL JOIN (SELECT name AS queue, paused, concurrency, rate, retention_success, retention_failed
               FROM orchestrator.queues
              WHERE paused OR num_nonnulls(concurrency, rate, retention_success, retention_failed) > 0)
            AS chosen USING (queue)
 WHERE starts_with(queue, %(within)s::text)
 ORDER BY queue
"""
_QUEUES = Statement[Row](f"WITH /* insights.fleet.queues */ {_ALL} {_SHOWN}")
_MANY_QUEUES = Statement[Row](f"WITH /* insights.fleet.many_queues */ RECURSIVE {load.COUNTS} {_SHOWN}")


def list_queues(connection: Connection, within: str = "") -> list[QueueCounts]:
    """Return all queues with an open task, a live worker or a setting.

    Only names that begin with `within` count. Very large numbers of open tasks are not counted exactly.
    """
    rows = (_MANY_QUEUES if load.has_many_open_tasks(connection) else _QUEUES)(connection, within=within)
    return [QueueCounts(**row._asdict() | {"least": tuple(row.least)}) for row in rows]


@dataclass(frozen=True, kw_only=True)
class WorkerView:
    """One worker process, as the leader last saw it."""

    id: str
    """The id of the worker process."""
    host: str
    """The machine of the process."""
    pid: int
    """The process id on that machine."""
    queues: tuple[str, ...]
    """The queues that the worker serves."""
    names: tuple[str, ...]
    """The tasks that the worker knows."""
    slots: int
    """The number of tasks that the worker runs at once."""
    running: int
    """The number of tasks that the worker is running."""
    state: str
    """`live`, `draining` (it takes no further tasks, or is about to be told so), `still` (its process hangs), `stopped`
    (it had drained) or `dead`; `unheard` if no leader has looked recently."""
    started_at: datetime
    """When the process started."""
    seen_at: datetime
    """When the leader last heard from the process."""
    still: float | None = None
    """Seconds for which the process has been hanging: a task's code blocks it, or it was stopped."""
    holds: tuple[UUID, ...] = ()
    """The first tasks that a hanging process has."""
    parent: UUID | None = None
    """The worker of the process: an id of one lifetime of the parent process, shared by its child processes."""
    memory: int | None = None
    """Resident memory of the process in bytes."""
    parent_memory: int | None = None
    """Resident memory of the parent process in bytes; the parent runs no tasks."""
    release: str | None = None
    """The application release, if it has a name."""

    @property
    def ended_at(self) -> datetime | None:
        """When the process was last heard from, if it has died or stopped."""
        return self.seen_at if self.state in ("dead", "stopped") else None

    @property
    def worker_started_at(self) -> datetime:
        """When the worker started, which replaces its processes as needed: the parent's id contains the time."""
        if self.parent is None or self.parent.version != 7:
            return self.started_at
        return datetime.fromtimestamp((self.parent.int >> 80) / 1000, UTC)


_STATE = f"""
       CASE WHEN state IN ('dead', 'stopped') THEN state WHEN NOT {IS_FRESH} THEN 'unheard'
            WHEN still_since IS NOT NULL THEN 'still'
            WHEN EXISTS (SELECT FROM orchestrator.drains AS d WHERE d.parent = w.parent) THEN 'draining'
            ELSE state END"""
_WORKERS = Statement[Row](f"""
SELECT /* insights.fleet.workers */ id, host, pid, queues, names, slots, running, {_STATE} AS state,
       started_at, seen_at,
       extract(epoch FROM now() - still_since)::double precision AS still, holds::text[] AS holds,
       parent::text AS parent, memory, parent_memory,
       (SELECT release FROM orchestrator.worker_releases AS r WHERE r.worker = w.id) AS release
  FROM orchestrator.workers AS w ORDER BY state IN ('dead', 'stopped'), host, started_at, id
""")


def list_workers(connection: Connection) -> list[WorkerView]:
    """Return the workers; last those that died in the last hour or stopped in the last minute."""
    return [
        WorkerView(
            **row._asdict()
            | {"queues": tuple(row.queues), "names": tuple(row.names), "holds": tuple(map(UUID, row.holds))}
            | {"parent": None if row.parent is None else UUID(row.parent)}
        )
        for row in _WORKERS(connection)
    ]


class Fleet(NamedTuple):
    """Numbers of live workers."""

    workers: int
    slots: int
    """The number of tasks that the workers run at once."""
    running: int
    """The number of tasks that the workers report as running."""
    has_still: bool
    """Whether there are hanging processes beside the live ones."""
    are_heard: bool
    """Whether a scheduler hears the workers; otherwise the numbers mean nothing."""


@Statement.function(f"""
SELECT /* insights.fleet.numbers */ count(*) FILTER (WHERE state = 'live') AS workers,
       coalesce(sum(slots) FILTER (WHERE state = 'live'), 0) AS slots,
       coalesce(sum(running) FILTER (WHERE state = 'live'), 0) AS running,
       coalesce(bool_or(state = 'still'), false) AS has_still, {ARE_HEARD} AS are_heard
  FROM (SELECT {_STATE} AS state, slots, running FROM orchestrator.workers AS w) AS fleet
""")
def count_fleet(connection: Connection) -> Fleet:
    """Return numbers of live workers, without their queues and task names, which can be long."""
