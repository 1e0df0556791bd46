"""How the whole system is doing."""

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
    """The scheduler that leads."""

    address: str
    """Its host and process id."""
    term: int
    """The number of its term."""
    lease_remaining: float
    """Seconds until another may take over, unless it renews its lease."""
    idle: float | None = None
    """Seconds since it last did all of its work; None if it does not say."""
    trouble: str | None = None
    """Why it cannot work."""


@dataclass(frozen=True, kw_only=True)
class PausedQueue:
    """A queue that is paused and holds tasks that could start."""

    queue: str
    """Its name."""
    waiting: int
    """How many there are."""
    oldest: float | None
    """Seconds since the oldest of them was enqueued."""


@dataclass(frozen=True, kw_only=True)
class UnknownTasks:
    """Tasks of one name that no live worker of their queue knows."""

    queue: str
    """The queue that they wait in."""
    name: str
    """The unknown name."""
    tasks: int
    """How many there are."""
    fails_at: datetime | None
    """When the first of them fails, if it stays so; a run that has begun is stuck then, and has not failed."""
    runs: int = 0
    """How many of them are turns of workflows as code."""
    begun: int = 0
    """How many of these runs have begun."""
    handed_back: bool = False
    """Live workers know it, and have handed it back: they were not given the database, which it needs."""
    hold: str = "unknown"
    """Why they are kept back: `unknown`, `no data key: ID` where live workers know them, and cannot open them, or
    `no executor: NAME`, and what it needs."""


@dataclass(frozen=True, kw_only=True)
class Events:
    """How far the workers' reports have been applied."""

    generation: str
    """One life of the Redis data."""
    position: str
    """The last event that was applied."""


@dataclass(frozen=True, kw_only=True)
class FailingSchedule:
    """A schedule whose last fire could not start a run."""

    key: str
    """workflow/name."""
    error: str
    """Why not."""


@dataclass(frozen=True, kw_only=True)
class ForgottenSchedule:
    """A schedule that is no longer in the code that declared it, and fires all the same."""

    key: str
    """workflow/name."""
    origin: str
    """The application."""


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Numbers of stored rows, and their size."""

    tables: Mapping[str, int]
    """Bytes on disk of each table with its indexes, the largest first."""
    ended_tasks: int
    """How many ended tasks are kept; roughly, where there are many."""
    is_rough: bool
    """Whether that is not counted but estimated."""
    oldest: datetime | None
    """When the oldest of them ended."""


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
    """Live workers."""
    slots: int
    """How many tasks they run at once."""
    running: int
    """How many they say they run."""
    inbox: int
    """Requests that the leader has not applied yet."""
    still_workers: tuple[WorkerView, ...]
    """Those whose process does nothing; they are not among the live ones."""
    unknown_tasks: tuple[UnknownTasks, ...]
    """Tasks that no live worker knows."""
    unserved_queues: tuple[str, ...]
    """Queues that hold ready tasks and have no live worker; none while workers are unknown."""
    paused_queues: tuple[PausedQueue, ...]
    """Queues that hold ready tasks and are paused."""
    events: Events | None
    """How far reports are applied; None before the first leader."""
    schedules: Mapping[str, int]
    """Schedules: active, paused, and over, which will not fire again."""
    failing_schedules: tuple[FailingSchedule, ...]
    """The first of those that could not start their last run."""
    forgotten_schedules: tuple[ForgottenSchedule, ...]
    """The first of those that fire and are no longer in the code that declared them."""
    storage: Storage
    """Numbers of stored rows, and their size."""
    stuck_runs: int
    """Runs that cannot go on."""
    stuck_reason: str | None
    """Which is the newest of them, and why."""
    open_least: tuple[str, ...] = ()
    """Which numbers of open tasks are the least that there is: where there are very many, not all are counted."""
    standbys: tuple[Standby, ...] | None = None
    """Schedulers that would lead if the leader ended; None if Redis was not asked, or cannot say."""
    hears_workers: bool = True
    """A scheduler leads and hears the workers; if not, they are unknown, and their numbers are 0."""
    shards: tuple[ShardView, ...] = ()
    """All shards, where there are several."""


_OPEN_COUNTS = ("ready", "delayed", "unknown", "blocked", "dispatched", "running")


Ends = tuple[Mapping[str, int], Mapping[str, int]]
"""How many tasks ended in the last minute and in the last hour, by state."""


def overview(
    connection: Connection, *, queues: Sequence[QueueCounts] | None = None, ends: Ends | None = None, shard: int = 0
) -> Overview:
    """Return how the system is doing; what was counted a moment ago, in queues and of ends, need not be again."""
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
        unserved_queues=tuple(one.queue for one in queues if fleet.are_heard and one.ready and not one.workers),
        paused_queues=tuple(
            PausedQueue(queue=queue.queue, waiting=queue.ready, oldest=queue.oldest_ready)
            for queue in queues
            if queue.paused and queue.ready
        ),
        events=cursor and Events(generation=cursor.generation, position=cursor.position),
        schedules=_SCHEDULES.one(connection)._asdict(),
        failing_schedules=tuple(_FAILING_SCHEDULES(connection)),
        forgotten_schedules=tuple(_FORGOTTEN_SCHEDULES(connection)),
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
    """Return the leader."""


def _ended(connection: Connection) -> Ends:
    """Return how many tasks ended in the last minute and in the last hour, by state."""
    found = {state: counts for state, *counts in throughput.ended(connection)}
    minute, hour = ({str(state): found.get(state, (0, 0))[which] for state in ENDED_TASK_STATES} for which in (0, 1))
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
_TABLES = Statement[Row](f"""
SELECT /* insights.tables */ relname AS name, sum(pg_total_relation_size(tables.oid))::bigint AS size,
       sum(greatest(reltuples, 0))::bigint AS rows
  FROM pg_class AS tables JOIN pg_namespace AS schemas ON schemas.oid = relnamespace
 WHERE relkind = 'r' AND {ours("nspname")}
 GROUP BY 1 ORDER BY 2 DESC, 1
""")
_MOST_COUNTED = 10_000
_COUNT = Statement[int](
    f"SELECT /* insights.count */ count(*) FROM (SELECT FROM orchestrator.ended_tasks LIMIT {_MOST_COUNTED}) AS counted"
)
_OLDEST = Statement[datetime | None]("SELECT /* insights.oldest */ min(ended_at) FROM orchestrator.ended_tasks")


def _storage(connection: Connection, ended_last_hour: int) -> Storage:
    """Return the sizes of the tables, and how far back they go.

    Postgres's own estimate comes with the next ANALYZE, long after the first tasks: few are counted,
    and of many there are no fewer than have just ended.
    """
    tables = _TABLES(connection, root=root_of(connection))
    estimate: int = next((table.rows for table in tables if table.name == "ended_tasks"), 0)
    counted = _COUNT.one(connection)
    is_rough = counted == _MOST_COUNTED
    return Storage(
        tables={table.name: table.size for table in tables},
        ended_tasks=max(counted, estimate, ended_last_hour) if is_rough else counted,
        is_rough=is_rough,
        oldest=_OLDEST.one(connection),
    )
