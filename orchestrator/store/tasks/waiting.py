"""Pending tasks that wait for their time or for a worker; and what is in flight or due, for the leader."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection

from orchestrator.store.batches import Batch
from orchestrator.store.sql import Prepared, Row, Statement
from orchestrator.store.tables.tasks import NOBODY, READY_IN_LANE, READY_PLAIN
from orchestrator.store.tasks.transitions import arrivals

_COUNT_READY = f"""), arrived AS (
    {arrivals("ready WHERE lane IS NOT NULL")}
)
SELECT count(*) FROM ready"""
"""The end of a statement whose CTE `ready` makes tasks ready."""


@Prepared.function(f"""
WITH /* waiting.promote */ ready AS (
    UPDATE orchestrator.tasks
       SET wake_at = NULL, hold = NULL, ready_at = CASE WHEN trace IS NOT NULL THEN wake_at END
     WHERE ctid = ANY (ARRAY(
           SELECT ctid FROM orchestrator.tasks
            WHERE wake_at <= %(now)s::timestamptz AND {NOBODY} IS NOT TRUE
            ORDER BY wake_at LIMIT %(limit)s))
    RETURNING id, lane
{_COUNT_READY}
""")
def promote_due(connection: Connection, now: datetime, limit: int) -> int:
    """Make delayed tasks ready whose time has come; return their number."""


@Prepared.function("""
SELECT /* waiting.expired */ id, extract(epoch FROM %(now)s::timestamptz - created_at)::double precision
  FROM orchestrator.tasks
 WHERE expires_at <= %(now)s::timestamptz AND status = 'pending' ORDER BY expires_at LIMIT %(limit)s
""")
def expired(connection: Connection, now: datetime, limit: int) -> list[tuple[bytes, float]]:
    """Return the tasks whose start deadline has passed, with the seconds that they have waited."""


@Prepared.function(f"""
SELECT /* waiting.overdue */ id, name, queue, id IS NOT DISTINCT FROM run_id, hold FROM orchestrator.tasks
 WHERE wake_at <= %(now)s::timestamptz AND {NOBODY} ORDER BY wake_at LIMIT %(limit)s
""")
def overdue_unknown(connection: Connection, now: datetime, limit: int) -> list[tuple[bytes, str, str, bool, str]]:
    """Return id, name, queue, whether it is a turn, and hold of the tasks that no worker could run until their
    timeout."""


_KNOWN = Batch("known", "queue text, name text")
_DENIED = Batch("denied", "queue text, name text")
_RELEASE = Prepared[int](f"""
WITH /* waiting.release */ ready AS (
    UPDATE orchestrator.tasks SET hold = NULL, wake_at = NULL
     WHERE ctid = ANY (ARRAY(
           SELECT held.ctid
             FROM orchestrator.tasks held
             JOIN {_KNOWN}
               ON held.queue = known.queue
              AND (held.name = known.name OR (known.name = '*:*' AND strpos(held.name, ':') > 0))
            WHERE held.hold = 'unknown'
              AND NOT EXISTS (SELECT FROM {_DENIED}
                               WHERE denied.queue = held.queue AND denied.name = held.name)
            LIMIT %(limit)s))
    RETURNING id, lane
{_COUNT_READY}
""")


def release_known(
    connection: Connection, known: Sequence[tuple[str, str]], limit: int, *, denied: Sequence[tuple[str, str]] = ()
) -> int:
    """Release held tasks that a worker now knows, by (queue, name), except those `denied`; return their number."""
    return _RELEASE.one(connection, _KNOWN(known), _DENIED(denied), limit=limit)


_OPENED = Batch("opened", "queue text, hold text")
_RELEASE_OPENED = Prepared[int](f"""
WITH /* waiting.release_opened */ ready AS (
    UPDATE orchestrator.tasks SET hold = NULL, wake_at = NULL
     WHERE ctid = ANY (ARRAY(
           SELECT held.ctid FROM orchestrator.tasks held
             JOIN {_OPENED} ON held.queue = opened.queue AND held.hold = opened.hold
            WHERE held.hold IS NOT NULL
            LIMIT %(limit)s))
    RETURNING id, lane
{_COUNT_READY}
""")


def release_by_resource(connection: Connection, opened: Sequence[tuple[str, str]], limit: int) -> int:
    """Release held tasks for which a worker now has the data key or executor, by (queue, hold); return their number."""
    return _RELEASE_OPENED.one(connection, _OPENED(opened), limit=limit)


@Statement.function("""
SELECT /* waiting.lacking */ DISTINCT hold FROM orchestrator.tasks
 WHERE hold IS NOT NULL AND (starts_with(hold, 'no data key: ') OR starts_with(hold, 'no executor: '))
""")
def resource_holds(connection: Connection) -> list[str]:
    """Return the distinct holds of tasks that wait for a data key or an executor; for a new leader."""


_HELD = Batch("held", "queue text, name text, hold text")
_KEEP_BACK = Prepared[int](f"""
WITH /* waiting.keep_back */ kept AS (
    UPDATE orchestrator.tasks t SET hold = found.hold, wake_at = %(until)s::timestamptz
      FROM (SELECT front.ctid AS place, held.hold
              FROM (SELECT DISTINCT queue FROM {_HELD}) AS asked
             CROSS JOIN LATERAL (
                   SELECT ctid, name, coalesce(options ? 'executor', false) AS is_execution FROM orchestrator.tasks
                    WHERE queue = asked.queue AND {READY_PLAIN}
                    ORDER BY priority DESC, seq LIMIT %(limit)s) AS front
              JOIN {_HELD} ON held.queue = asked.queue AND held.name = front.name
               AND NOT (front.is_execution AND held.hold = 'unknown')) AS found
     WHERE t.ctid = found.place
    RETURNING 1
)
SELECT count(*) FROM kept
""")


def hold_at_front(connection: Connection, full: Sequence[tuple[str, str, str]], until: datetime, limit: int) -> int:
    """Hold tasks at the front of their queue: `full` has queue, name and hold. Return their number."""
    return _KEEP_BACK.one(connection, _HELD(full), until=until, limit=limit)


_WANTED = Batch("wanted", "queue text, name text, hold text, places int")
_RELEASE_CROWDED = Prepared[tuple[str, str, str]](f"""
WITH /* waiting.release_crowded */ ready AS (
    UPDATE orchestrator.tasks t SET hold = NULL, wake_at = NULL
      FROM (SELECT held.ctid AS place, wanted.hold
              FROM {_WANTED}
             CROSS JOIN LATERAL (
                   SELECT ctid FROM orchestrator.tasks
                    WHERE hold IS NOT NULL AND hold = wanted.hold AND name = wanted.name AND queue = wanted.queue
                    LIMIT wanted.places) AS held) AS found
     WHERE t.ctid = found.place
    RETURNING t.id, t.lane, t.queue, t.name, found.hold
), arrived AS (
    {arrivals("ready WHERE lane IS NOT NULL")}
)
SELECT DISTINCT queue, name, hold FROM ready
""")


def release_crowded(connection: Connection, wanted: Sequence[tuple[str, str, str, int]]) -> set[tuple[str, str, str]]:
    """Release tasks held for capacity: by queue, name and hold, up to a number; return what was released."""
    return set(_RELEASE_CROWDED(connection, _WANTED(wanted)))


@Statement.function("""
SELECT /* waiting.crowded */ DISTINCT queue, name, hold FROM orchestrator.tasks
 WHERE hold IS NOT NULL AND starts_with(hold, 'crowded')
""")
def capacity_holds(connection: Connection) -> list[tuple[str, str, str]]:
    """Return queue, name and hold of the tasks that wait for capacity; for a new leader."""


class PendingWorkProbe(NamedTuple):
    inbox: bool
    pending_runs: bool
    cancelling_runs: bool
    next_due: datetime | None
    held: bool
    expanding_runs: bool = False
    backfills: bool = False
    closing_runs: bool = False
    pending_changes: bool = False
    next_fire: datetime | None = None
    """The time at which the next schedule is due; `next_due` covers everything else."""

    @property
    def next_of_all(self) -> datetime | None:
        """The earliest time at which anything is due."""
        if self.next_due is None or self.next_fire is None:
            return self.next_due or self.next_fire
        return min(self.next_due, self.next_fire)

    @property
    def is_busy(self) -> bool:
        """Return whether the next tick has work at once."""
        of_runs = self.pending_runs or self.cancelling_runs or self.expanding_runs or self.closing_runs
        return self.inbox or of_runs or self.pending_changes


PENDING_WORK = """
       EXISTS (SELECT FROM orchestrator.inbox) AS inbox,
       EXISTS (SELECT FROM orchestrator.runs WHERE status = 'pending' AND NOT parked) AS pending_runs,
       EXISTS (SELECT FROM orchestrator.runs WHERE cancelling AND ended_at IS NULL) AS cancelling_runs,
       least((SELECT wake_at FROM orchestrator.tasks WHERE wake_at IS NOT NULL ORDER BY wake_at LIMIT 1),
             (SELECT expires_at FROM orchestrator.tasks WHERE expires_at IS NOT NULL AND status = 'pending'
               ORDER BY expires_at LIMIT 1),
             (SELECT due FROM orchestrator.timers ORDER BY due LIMIT 1),
             (SELECT deadline FROM orchestrator.runs
               WHERE deadline IS NOT NULL AND ended_at IS NULL AND NOT cancelling AND status = 'running'
               ORDER BY deadline LIMIT 1)) AS next_due,
       EXISTS (SELECT FROM orchestrator.tasks WHERE hold IS NOT NULL) AS held,
       EXISTS (SELECT FROM orchestrator.runs WHERE expanding) AS expanding_runs,
       EXISTS (SELECT FROM orchestrator.backfills WHERE next_fire IS NOT NULL) AS backfills,
       EXISTS (SELECT FROM orchestrator.runs WHERE closing) AS closing_runs,
       EXISTS (SELECT FROM orchestrator.untold WHERE NOT held) AS pending_changes,
       (SELECT due_at FROM orchestrator.schedules WHERE due_at IS NOT NULL AND NOT paused
         ORDER BY due_at LIMIT 1) AS next_fire
"""
"""The columns of the probe. Not `min`: on a table that Postgres believes to be empty, it may be a full scan."""
_PROBE = Prepared[PendingWorkProbe](f"SELECT /* waiting.probe_pending_work */ {PENDING_WORK}")


def probe_pending_work(connection: Connection) -> PendingWorkProbe:
    """Return what is pending, with one index probe each."""
    return _PROBE.one(connection)


class InFlight(NamedTuple):
    """A task that some worker should have."""

    id: bytes
    attempt: int
    queue: str
    status: str
    alone: bool
    worker: str | None
    age: float
    """Seconds since the task was dispatched."""
    lane: str | None = None
    is_turn_task: bool = False
    """Whether this is a turn task, and `worker` may be the worker of the previous turn."""
    is_execution: bool = False
    """Whether an executor runs the task, without using a slot."""
    has_expired: bool = False
    """Whether the start deadline has passed."""


@Prepared.function("""
SELECT /* waiting.in_flight */ id, attempt, queue, status, alone, worker,
       extract(epoch FROM now() - dispatched_at)::double precision AS age,
       lane, coalesce(run_id = id, false) AS is_turn_task, coalesce(options ? 'executor', false) AS is_execution,
       coalesce(expires_at <= now(), false) AS has_expired
  FROM orchestrator.tasks WHERE status IN ('dispatched', 'running')
""")
def in_flight(connection: Connection) -> list[InFlight]:
    """Return every dispatched or running task; windows keep their number small."""


_ASKED = Batch("asked", "id uuid, attempt bigint")


def _attempts(name: str, table: str, condition: str) -> Prepared[tuple[bytes, int]]:
    """Return a statement that selects the attempts whose task fulfils a condition."""
    return Prepared[tuple[bytes, int]](f"""
SELECT /* waiting.{name} */ asked.id, asked.attempt FROM {_ASKED}
 CROSS JOIN LATERAL (SELECT FROM orchestrator.{table} WHERE id = asked.id AND {condition} LIMIT 1) AS found
""")


_CURRENT = _attempts("current", "tasks", "attempt = asked.attempt AND status IN ('dispatched', 'running')")
_MOVED = _attempts("moved", "tasks", "options ? 'executor'")
_SUCCEEDED = _attempts("succeeded", "ended_tasks", "attempt = asked.attempt AND status = 'success'")


def current(connection: Connection, attempts: Sequence[tuple[bytes, int]]) -> set[tuple[bytes, int]]:
    """Return the attempts that are still current."""
    return set(_CURRENT(connection, _ASKED(attempts)))


def moved(connection: Connection, attempts: Sequence[tuple[bytes, int]]) -> set[tuple[bytes, int]]:
    """Return the attempts that are not current but whose execution continues: the task is open, with an executor."""
    return set(_MOVED(connection, _ASKED(attempts)))


def succeeded(connection: Connection, attempts: Sequence[tuple[bytes, int]]) -> set[tuple[bytes, int]]:
    """Return the attempts that made their tasks succeed."""
    return set(_SUCCEEDED(connection, _ASKED(attempts)))


@Prepared.function(f"""
SELECT /* waiting.has_ready */ EXISTS (
       SELECT FROM unnest(%(queues)s::text[]) AS asked(queue)
        CROSS JOIN LATERAL (
             (SELECT 1 FROM orchestrator.tasks WHERE queue = asked.queue AND {READY_PLAIN} LIMIT 1)
              UNION ALL
             (SELECT 1 FROM orchestrator.tasks WHERE queue = asked.queue AND {READY_IN_LANE} LIMIT 1)) AS ready
        WHERE NOT EXISTS (SELECT FROM orchestrator.queues WHERE name = asked.queue AND paused))
""")
def has_ready(connection: Connection, queues: Sequence[str]) -> bool:
    """Return whether any of these queues that is not paused has a ready task, with two index probes each."""


_BUSY = Statement[bool]("""
SELECT /* waiting.is_busy */ EXISTS (
       SELECT FROM orchestrator.tasks WHERE queue = ANY(%(queues)s::text[]) AND status IN ('dispatched', 'running'))
""")


def is_busy(connection: Connection, queues: Sequence[str]) -> bool:
    """Return whether any of these queues has a task that is ready or in flight."""
    return _BUSY.one(connection, queues=queues) or has_ready(connection, queues)


_POLICIES = Prepared[Row]("""
SELECT /* waiting.policies */ wanted.id, t.failures, t.losses, t.options::text, coalesce(t.run_id = wanted.id, false)
  FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (
       SELECT failures, losses, options, run_id FROM orchestrator.tasks WHERE id = wanted.id LIMIT 1) AS t
""")


class Policy(NamedTuple):
    """The data for the decision about a failed or lost attempt."""

    failures: int
    losses: int
    options: str | None
    is_turn_task: bool = False
    """Whether this is a turn task."""


def policies(connection: Connection, ids: Sequence[bytes]) -> dict[bytes, Policy]:
    """Return the retry data of open tasks."""
    return {task: Policy(*policy) for task, *policy in _POLICIES(connection, ids=ids)}


class EarlierAttempts(NamedTuple):
    """The number of earlier attempts of a task, by how they ended."""

    deaths: int = 0
    """Attempts whose process died, whatever the cause."""
    starts: int = 0
    """Attempts that had started."""


_EARLIER = Prepared[tuple[bytes, int, int]]("""
SELECT /* waiting.earlier */ wanted.id, a.deaths, a.starts
  FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (
       SELECT count(*) FILTER (WHERE outcome = 'lost') AS deaths, count(*) AS starts
         FROM orchestrator.attempts
        WHERE task_id = wanted.id AND ended_at > coalesce((
              SELECT at FROM orchestrator.histories
               WHERE run_id = wanted.id AND kind = 'activation_applied' ORDER BY number DESC LIMIT 1), '-infinity')
       ) AS a
""")


def earlier_attempts(connection: Connection, ids: Sequence[bytes]) -> dict[bytes, EarlierAttempts]:
    """Return counts of earlier attempts of these tasks; for turn tasks, since the last applied turn."""
    return {task: EarlierAttempts(*counts) for task, *counts in _EARLIER(connection, ids=ids)}
