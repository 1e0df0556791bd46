"""The status of the whole system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection

from orchestrator.domain.fleet.announced import Standby
from orchestrator.domain.states import ENDED_TASK_STATES
from orchestrator.store import leases, throughput
from orchestrator.store.database import current_revision
from orchestrator.store.insights.fleet import IS_KNOWN, QueueCounts, WorkerView, count_fleet, list_queues, list_workers
from orchestrator.store.namespaces import root_of
from orchestrator.store.shards import ShardView, are_there, list_shards, ours
from orchestrator.store.sql import Row, Statement
from orchestrator.store.tables.tasks import NOBODY


@dataclass(frozen=True, kw_only=True)
class Leader:
    """The leading scheduler."""

    address: str
    """Host and process id of the scheduler."""
    term: int
    """The number of the scheduler's term."""
    lease_remaining: float
    """Seconds until another scheduler may take over, unless the lease is renewed."""
    idle: float | None = None
    """Seconds since the leader last did all of its work; None if unknown."""
    trouble: str | None = None
    """The problem that keeps the leader from its work."""


@dataclass(frozen=True, kw_only=True)
class PausedQueue:
    """A paused queue with ready tasks."""

    queue: str
    """The name of the queue."""
    waiting: int
    """The number of ready tasks."""
    oldest: float | None
    """Seconds since the oldest ready task was enqueued."""


@dataclass(frozen=True, kw_only=True)
class UnknownTasks:
    """Tasks of one name that no live worker of their queue can run."""

    queue: str
    """The queue of the tasks."""
    name: str
    """The name of the tasks."""
    tasks: int
    """The number of tasks."""
    fails_at: datetime | None
    """When the first of these tasks fails, unless a worker appears; a turn of a begun run makes it stuck instead."""
    runs: int = 0
    """The number of these tasks that are turns of workflows as code."""
    begun: int = 0
    """The number of these runs that have begun."""
    handed_back: bool = False
    """Whether live workers know the task but returned it: it needs the database, which they were not given."""
    hold: str = "unknown"
    """The hold: `unknown`, `no data key: ID` (live workers know the tasks) or `no executor: NAME`, with needs."""


@dataclass(frozen=True, kw_only=True)
class Events:
    """The position up to which workers' reports are applied."""

    generation: str
    """The generation of the Redis data."""
    position: str
    """The last applied event."""


@dataclass(frozen=True, kw_only=True)
class FailingSchedule:
    """A schedule whose last fire could not start a run."""

    key: str
    """workflow/name."""
    error: str
    """The reason for the failure."""


@dataclass(frozen=True, kw_only=True)
class ForgottenSchedule:
    """An active schedule that the code of its application no longer declares."""

    key: str
    """workflow/name."""
    origin: str
    """The application."""


@dataclass(frozen=True, kw_only=True)
class StoppedBackfill:
    """A backfill that an error has stopped before its end."""

    id: int
    key: str
    """The schedule: workflow/name."""
    passed: int
    """Fires that were processed."""
    total: int
    """Fires in the range."""
    error: str


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Numbers of stored rows, and their size."""

    tables: Mapping[str, int]
    """Bytes on disk of each table with its indexes, largest first."""
    ended_tasks: int
    """The number of ended tasks; an estimate if there are many."""
    is_rough: bool
    """Whether the number is an estimate."""
    oldest: datetime | None
    """When the oldest ended task ended."""


@dataclass(frozen=True, kw_only=True)
class Overview:
    """The state of the system in one value."""

    leader: Leader | None
    """The leader; None if there is none."""
    revision: str | None
    """The revision of the database schema."""
    open: Mapping[str, int]
    """Open tasks: ready, delayed, unknown, blocked, dispatched, running."""
    ended_last_minute: Mapping[str, int]
    """Tasks that ended in the last minute, by state."""
    ended_last_hour: Mapping[str, int]
    """Tasks that ended in the last hour, by state."""
    workers: int
    """The number of live workers."""
    slots: int
    """The number of tasks that live workers run at once."""
    running: int
    """The number of tasks that live workers report as running."""
    inbox: int
    """Requests that the leader has not applied yet."""
    still_workers: tuple[WorkerView, ...]
    """Workers whose process hangs; they do not count as live."""
    unknown_tasks: tuple[UnknownTasks, ...]
    """Tasks that no live worker can run."""
    unserved_queues: tuple[str, ...]
    """Queues with ready tasks and without a live worker; empty while the workers are unknown."""
    paused_queues: tuple[PausedQueue, ...]
    """Paused queues with ready tasks."""
    events: Events | None
    """The position up to which reports are applied; None before the first leader."""
    schedules: Mapping[str, int]
    """The number of schedules: active, paused, and over (without further fires)."""
    failing_schedules: tuple[FailingSchedule, ...]
    """The first schedules whose last fire could not start a run."""
    forgotten_schedules: tuple[ForgottenSchedule, ...]
    """The first active schedules that are no longer in the code that declared them."""
    storage: Storage
    """Numbers of stored rows, and their size."""
    stuck_runs: int
    """The number of stuck runs."""
    stuck_reason: str | None
    """The newest stuck run, and the reason."""
    open_least: tuple[str, ...] = ()
    """Names of the numbers in `open` that are lower bounds, because very many tasks are not counted."""
    standbys: tuple[Standby, ...] | None = None
    """Schedulers on standby; None if Redis was not asked or did not answer."""
    hears_workers: bool = True
    """Whether a scheduler leads and hears the workers; otherwise the workers are unknown, and their numbers are 0."""
    shards: tuple[ShardView, ...] = ()
    """All shards, if there are several."""
    stopped_backfills: tuple[StoppedBackfill, ...] = ()
    """Recent backfills that an error has stopped, and that were not cancelled or started again since."""


_OPEN_COUNTS = ("ready", "delayed", "unknown", "blocked", "dispatched", "running")


Ends = tuple[Mapping[str, int], Mapping[str, int]]
"""The numbers of tasks that ended in the last minute and in the last hour, by state."""


def overview(
    connection: Connection, *, queues: Sequence[QueueCounts] | None = None, ends: Ends | None = None, shard: int = 0
) -> Overview:
    """Return the status of the system. Pass `queues` and `ends` that were just counted to save queries."""
    queues = list_queues(connection) if queues is None else queues
    fleet = count_fleet(connection)
    still = [worker for worker in list_workers(connection) if worker.state == "still"] if fleet.has_still else []
    minute, hour = _ended(connection) if ends is None else ends
    cursor = leases.read_cursor(connection, shard)
    stuck = _STUCK.one(connection)
    return Overview(
        leader=find_leader(connection, shard),
        revision=current_revision(connection),
        open={kind: sum(getattr(queue, kind) for queue in queues) for kind in _OPEN_COUNTS},
        open_least=tuple(kind for kind in _OPEN_COUNTS if any(kind in queue.least for queue in queues)),
        ended_last_minute=minute,
        ended_last_hour=hour,
        workers=fleet.workers,
        slots=fleet.slots,
        running=fleet.running,
        hears_workers=fleet.are_heard,
        inbox=_INBOX.one(connection),
        still_workers=tuple(still),
        unknown_tasks=tuple(_UNKNOWN(connection)),
        unserved_queues=tuple(queue.queue for queue in queues if fleet.are_heard and queue.ready and not queue.workers),
        paused_queues=tuple(
            PausedQueue(queue=queue.queue, waiting=queue.ready, oldest=queue.oldest_ready)
            for queue in queues
            if queue.paused and queue.ready
        ),
        events=cursor and Events(generation=cursor.generation, position=cursor.position),
        schedules=_SCHEDULES.one(connection)._asdict(),
        failing_schedules=tuple(_FAILING_SCHEDULES(connection)),
        forgotten_schedules=tuple(_FORGOTTEN_SCHEDULES(connection)),
        stopped_backfills=tuple(_STOPPED_BACKFILLS(connection)),
        storage=_storage(connection, sum(hour.values())),
        stuck_runs=stuck.runs,
        stuck_reason=stuck.reason,
        shards=tuple(list_shards(connection)) if are_there(connection) else (),
    )


@Statement.function("""
SELECT /* insights.leader */ address, term,
       extract(epoch FROM expires_at - clock_timestamp())::double precision AS lease_remaining,
       CASE WHEN useful_term = term
            THEN extract(epoch FROM clock_timestamp() - useful_at)::double precision END AS idle,
       CASE WHEN useful_term = term THEN trouble END AS trouble
  FROM orchestrator.leases WHERE shard = %(shard)s AND expires_at > clock_timestamp()
""")
def find_leader(connection: Connection, shard: int = 0) -> Leader | None:
    """Return the leader; None if there is none."""


def _ended(connection: Connection) -> Ends:
    """Return the numbers of tasks that ended in the last minute and in the last hour, by state."""
    by_state = {state: counts for state, *counts in throughput.ended(connection)}
    minute, hour = ({str(state): by_state.get(state, (0, 0))[which] for state in ENDED_TASK_STATES} for which in (0, 1))
    return minute, hour


_INBOX = Statement[int]("SELECT /* insights.inbox */ count(*) FROM orchestrator.inbox")
_UNKNOWN = Statement[UnknownTasks](f"""
SELECT /* insights.unknown */ queue, t.name, count(*) AS tasks, min(wake_at) AS fails_at,
       count(*) FILTER (WHERE t.id = t.run_id) AS runs, count(*) FILTER (WHERE r.shown > 0) AS begun,
       hold = 'unknown' AND {IS_KNOWN.format(task="t")} AS handed_back, hold
  FROM orchestrator.tasks t LEFT JOIN orchestrator.runs r ON r.id = t.run_id AND r.id = t.id
 WHERE hold IS NOT NULL AND {NOBODY} GROUP BY queue, t.name, hold ORDER BY queue, t.name, hold
""")
_SCHEDULES = Statement[Row]("""
SELECT /* insights.schedules */ count(*) FILTER (WHERE NOT paused AND next_fire IS NOT NULL) AS active,
       count(*) FILTER (WHERE paused) AS paused,
       count(*) FILTER (WHERE NOT paused AND next_fire IS NULL) AS over
  FROM orchestrator.schedules
""")
_STUCK = Statement[Row]("""
SELECT /* insights.stuck */ count(*) AS runs,
       (SELECT concat(id::text, ': ', stuck->>'kind', ': ', left(rtrim(stuck->>'message', '.'), 300))
          FROM orchestrator.runs WHERE stuck IS NOT NULL AND ended_at IS NULL ORDER BY id DESC LIMIT 1) AS reason
  FROM orchestrator.runs WHERE stuck IS NOT NULL AND ended_at IS NULL
""")
_FAILING_SCHEDULES = Statement[FailingSchedule]("""
SELECT /* insights.failing_schedules */ workflow || '/' || name AS key, error FROM orchestrator.schedules
 WHERE error IS NOT NULL ORDER BY workflow, name LIMIT 20
""")
_FORGOTTEN_SCHEDULES = Statement[ForgottenSchedule]("""
SELECT /* insights.forgotten_schedules */ workflow || '/' || name AS key, origin FROM orchestrator.schedules
 WHERE forgotten_at IS NOT NULL AND NOT paused AND next_fire IS NOT NULL ORDER BY workflow, name LIMIT 20
""")
_STOPPED_BACKFILLS = Statement[StoppedBackfill]("""
SELECT /* insights.stopped_backfills */ id, workflow || '/' || name AS key, passed, total, error
  FROM (SELECT DISTINCT ON (workflow, name) *
          FROM (SELECT * FROM orchestrator.backfills ORDER BY id DESC LIMIT 100) AS newest
         ORDER BY workflow, name, id DESC) AS last
 WHERE error <> 'cancelled' ORDER BY id
""")
_TABLES = Statement[Row](f"""
SELECT /* insights.tables */ relname AS name, sum(pg_total_relation_size(tables.oid))::bigint AS size,
       sum(greatest(reltuples, 0))::bigint AS rows
  FROM pg_class AS tables JOIN pg_namespace AS schemas ON schemas.oid = relnamespace
 WHERE relkind = 'r' AND {ours("nspname")}
 GROUP BY 1 ORDER BY 2 DESC, 1
""")
_MAX_COUNTED = 10_000
_COUNT = Statement[int](
    f"SELECT /* insights.count */ count(*) FROM (SELECT FROM orchestrator.ended_tasks LIMIT {_MAX_COUNTED}) AS counted"
)
_OLDEST = Statement[datetime | None]("SELECT /* insights.oldest */ min(ended_at) FROM orchestrator.ended_tasks")


def _storage(connection: Connection, ended_last_hour: int) -> Storage:
    """Return the sizes of the tables, and the age of their oldest rows.

    Postgres's estimate is updated only by ANALYZE, long after the first tasks. So small numbers are counted, and large
    ones are at least the number of recent ends.
    """
    tables = _TABLES(connection, root=root_of(connection))
    estimate: int = next((table.rows for table in tables if table.name == "ended_tasks"), 0)
    counted = _COUNT.one(connection)
    is_rough = counted == _MAX_COUNTED
    return Storage(
        tables={table.name: table.size for table in tables},
        ended_tasks=max(counted, estimate, ended_last_hour) if is_rough else counted,
        is_rough=is_rough,
        oldest=_OLDEST.one(connection),
    )
