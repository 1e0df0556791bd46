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
"""A worker is live and takes tasks."""

ARE_HEARD = f"""(EXISTS (SELECT FROM orchestrator.leases WHERE expires_at > clock_timestamp())
        AND coalesce((SELECT bool_or({IS_FRESH}) FROM orchestrator.workers
                       WHERE state NOT IN ('dead', 'stopped')), true))"""
"""A scheduler leads and hears the workers. One that cannot read Redis may keep its lease; one that can says of workers
that they are dead."""

IS_KNOWN = f"""EXISTS (SELECT FROM orchestrator.workers WHERE state = 'live' AND {IS_FRESH}
                          AND {{task}}.queue = ANY(queues) AND {{task}}.name = ANY(names))"""
"""A live worker says that it knows a task. If it is held back as unknown all the same, it was handed back by those."""


@dataclass(frozen=True, kw_only=True)
class QueueCounts:
    """The tasks of one queue. An open task is counted in exactly one of the six."""

    queue: str
    """Its name."""
    ready: int
    """Tasks that only wait for a free slot."""
    delayed: int
    """Tasks that wait for their time: an ETA or a retry."""
    unknown: int
    """Tasks that no live worker knows, or has the data key of."""
    blocked: int
    """Tasks that wait for others."""
    dispatched: int
    """Tasks on their way to a worker."""
    running: int
    """Tasks that run."""
    oldest_ready: float | None
    """Seconds since the oldest ready task was enqueued, its delays included."""
    workers: int
    """Live workers that serve it."""
    slots: int
    """How many tasks they run at once, of all their queues together."""
    paused: bool = False
    """Nothing of it is handed out."""
    concurrency: int | None = None
    """How many of its tasks may run at once."""
    rate: float | None = None
    """How many of its tasks may start in a second."""
    retention_success: float | None = None
    """Seconds for which its tasks are kept that succeeded; 0 is for ever, None as the settings say."""
    retention_failed: float | None = None
    """The same for those that ended otherwise."""
    least: tuple[str, ...] = ()
    """Which of the six numbers are the least that there is: of very many open tasks, not all are counted."""
    is_led: bool = True
    """A scheduler leads and hears the workers; if not, `workers` and `slots` are not known."""


def empty_queue(name: str) -> QueueCounts:
    """Return what is said of a queue in which nothing stands."""
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
    """Return every queue with an open task, a live worker or a setting.

    Those whose names begin with `within`, that is. Where there are very many open tasks, not all are counted.
    """
    rows = (_MANY_QUEUES if load.is_much(connection) else _QUEUES)(connection, within=within)
    return [QueueCounts(**row._asdict() | {"least": tuple(row.least)}) for row in rows]


@dataclass(frozen=True, kw_only=True)
class WorkerView:
    """One worker process, as the leader last saw it."""

    id: str
    """Its id."""
    host: str
    """The machine that it runs on."""
    pid: int
    """Its process id there."""
    queues: tuple[str, ...]
    """The queues that it serves."""
    names: tuple[str, ...]
    """The tasks that it knows."""
    slots: int
    """How many tasks it runs at once."""
    running: int
    """How many it runs now."""
    state: str
    """`live`, `draining` (it takes nothing more, or is being told to), `still` (its process does nothing), `stopped`
    (it had drained) or `dead`; `unheard` if no leader has looked lately."""
    started_at: datetime
    """When it started."""
    seen_at: datetime
    """When the leader last heard of it."""
    still: float | None = None
    """Seconds for which its process has done nothing: the code of a task blocks it, or it was stopped."""
    holds: tuple[UUID, ...] = ()
    """Of one that stands still, the first tasks that it holds."""
    parent: UUID | None = None
    """The worker that it is a process of: one life of its parent process, which those with the same share."""
    memory: int | None = None
    """Bytes of memory that its process has in RAM."""
    parent_memory: int | None = None
    """The same of its parent process, which runs no tasks."""
    release: str | None = None
    """The release of its application, if that has a name."""

    @property
    def ended_at(self) -> datetime | None:
        """When it was last heard of, if it has died or stopped."""
        return self.seen_at if self.state in ("dead", "stopped") else None

    @property
    def worker_started_at(self) -> datetime:
        """When its worker started, which replaces processes as it needs to: the parent's id has the time."""
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
    """Return the fleet; at the end those that died in the last hour or stopped in the last minute."""
    return [
        WorkerView(
            **row._asdict()
            | {"queues": tuple(row.queues), "names": tuple(row.names), "holds": tuple(map(UUID, row.holds))}
            | {"parent": None if row.parent is None else UUID(row.parent)}
        )
        for row in _WORKERS(connection)
    ]


class Fleet(NamedTuple):
    """The live workers in numbers."""

    workers: int
    slots: int
    """How many tasks they run at once."""
    running: int
    """How many they say they run."""
    has_still: bool
    """There are others whose process does nothing."""
    are_heard: bool
    """A scheduler hears of them; if not, the numbers say nothing."""


@Statement.function(f"""
SELECT /* insights.fleet.numbers */ count(*) FILTER (WHERE state = 'live') AS workers,
       coalesce(sum(slots) FILTER (WHERE state = 'live'), 0) AS slots,
       coalesce(sum(running) FILTER (WHERE state = 'live'), 0) AS running,
       coalesce(bool_or(state = 'still'), false) AS has_still, {ARE_HEARD} AS are_heard
  FROM (SELECT {_STATE} AS state, slots, running FROM orchestrator.workers AS w) AS fleet
""")
def count_fleet(connection: Connection) -> Fleet:
    """Return how many live workers there are; what each serves and knows can be long, and is not read."""
