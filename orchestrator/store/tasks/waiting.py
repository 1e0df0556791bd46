"""Tasks that wait in Postgres for their time, for a worker that knows them, or to be judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection

from orchestrator.store import arrays
from orchestrator.store.statement import Statement
from orchestrator.store.tables import READY_IN_LANE, READY_PLAIN
from orchestrator.store.tasks.transitions import arrivals, identifier

_PROMOTE = Statement(
    f"""
WITH ready AS (
    UPDATE orchestrator.tasks SET wake_at = NULL, hold = NULL
     WHERE ctid = ANY (ARRAY(
           SELECT ctid FROM orchestrator.tasks
            WHERE wake_at <= %(now)s::timestamptz AND hold IS DISTINCT FROM 'unknown'
            ORDER BY wake_at LIMIT %(limit)s))
    RETURNING id, lane
), arrived AS (
    {arrivals("ready WHERE lane IS NOT NULL")}
)
SELECT count(*) FROM ready
"""
)


def promote_due(connection: Connection, now: datetime, limit: int) -> int:
    """Make tasks ready whose time has come; return how many."""
    promoted: int = _PROMOTE(connection, {"now": now, "limit": limit})[0][0]
    return promoted


_EXPIRED = Statement(
    """
SELECT id::text, extract(epoch FROM %(now)s::timestamptz - created_at)::double precision FROM orchestrator.tasks
 WHERE expires_at <= %(now)s::timestamptz AND status = 'pending' ORDER BY expires_at LIMIT %(limit)s
"""
)


def expired(connection: Connection, now: datetime, limit: int) -> list[tuple[bytes, float]]:
    """Return the tasks that should have started by now, and how many seconds they have waited."""
    return [(identifier(row[0]), row[1]) for row in _EXPIRED(connection, {"now": now, "limit": limit})]


_OVERDUE = Statement(
    """
SELECT id::text, name, queue, id IS NOT DISTINCT FROM run_id FROM orchestrator.tasks
 WHERE wake_at <= %(now)s::timestamptz AND hold = 'unknown' ORDER BY wake_at LIMIT %(limit)s
"""
)


def overdue_unknown(connection: Connection, now: datetime, limit: int) -> list[tuple[bytes, str, str, bool]]:
    """Return id, name and queue of tasks that no worker has known for too long; and whether it is a workflow's turn."""
    rows = _OVERDUE(connection, {"now": now, "limit": limit})
    return [(identifier(row[0]), row[1], row[2], row[3]) for row in rows]


_RELEASE = Statement(
    f"""
WITH ready AS (
    UPDATE orchestrator.tasks SET hold = NULL, wake_at = NULL
     WHERE ctid = ANY (ARRAY(
           SELECT held.ctid
             FROM orchestrator.tasks held
             JOIN unnest(%(queues)s::text[], %(names)s::text[]) AS known(queue, name)
               ON held.queue = known.queue
              AND (held.name = known.name OR (known.name = '*:*' AND strpos(held.name, ':') > 0))
            WHERE held.hold = 'unknown'
              AND NOT EXISTS (SELECT FROM unnest(%(denied_queues)s::text[], %(denied_names)s::text[]) AS no(queue, name)
                               WHERE no.queue = held.queue AND no.name = held.name)
            LIMIT %(limit)s))
    RETURNING id, lane
), arrived AS (
    {arrivals("ready WHERE lane IS NOT NULL")}
)
SELECT count(*) FROM ready
"""
)


def release_known(
    connection: Connection, known: Sequence[tuple[str, str]], limit: int, *, denied: Sequence[tuple[str, str]] = ()
) -> int:
    """Make tasks ready again that a worker now knows, by (queue, name), but for those `denied`; return how many."""
    parameters = {
        "queues": [queue for queue, _ in known],
        "names": [name for _, name in known],
        "denied_queues": [queue for queue, _ in denied],
        "denied_names": [name for _, name in denied],
        "limit": limit,
    }
    released: int = _RELEASE(connection, parameters)[0][0]
    return released


_KEEP_BACK = Statement(
    f"""
WITH kept AS (
    UPDATE orchestrator.tasks SET hold = 'crowded', wake_at = %(until)s::timestamptz
     WHERE ctid = ANY (ARRAY(
           SELECT front.ctid
             FROM (SELECT DISTINCT queue FROM unnest(%(queues)s::text[]) AS q(queue)) AS asked
            CROSS JOIN LATERAL (
                  SELECT ctid, name FROM orchestrator.tasks
                   WHERE queue = asked.queue AND {READY_PLAIN}
                   ORDER BY priority DESC, seq LIMIT %(limit)s) AS front
             JOIN unnest(%(queues)s::text[], %(names)s::text[]) AS full_(queue, name)
               ON full_.queue = asked.queue AND full_.name = front.name))
    RETURNING 1
)
SELECT count(*) FROM kept
"""
)


def keep_back(connection: Connection, full: Mapping[str, Sequence[str]], until: datetime, limit: int) -> int:
    """Keep back tasks of these names, by queue, that stand at its front; return how many."""
    pairs = [(queue, name) for queue, names in full.items() for name in names]
    parameters = {
        "queues": [queue for queue, _ in pairs],
        "names": [name for _, name in pairs],
        "until": until,
        "limit": limit,
    }
    kept: int = _KEEP_BACK(connection, parameters)[0][0]
    return kept


_RELEASE_CROWDED = Statement(
    f"""
WITH ready AS (
    UPDATE orchestrator.tasks t SET hold = NULL, wake_at = NULL
      FROM (SELECT held.ctid AS place, wanted.hold
              FROM unnest(%(queues)s::text[], %(names)s::text[], %(holds)s::text[], %(limits)s::int[])
                   AS wanted(queue, name, hold, places)
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
"""
)


def release_crowded(connection: Connection, wanted: Sequence[tuple[str, str, str, int]]) -> set[tuple[str, str, str]]:
    """Make tasks ready again for which there is a place: by queue, name and hold, how many; return which there were."""
    parameters = {
        "queues": [queue for queue, _, _, _ in wanted],
        "names": [name for _, name, _, _ in wanted],
        "holds": [hold for _, _, hold, _ in wanted],
        "limits": arrays.numbers(places for _, _, _, places in wanted),
    }
    return {(row[0], row[1], row[2]) for row in _RELEASE_CROWDED(connection, parameters)}


_CROWDED = "SELECT DISTINCT queue, name, hold FROM orchestrator.tasks WHERE hold IS NOT NULL AND hold <> 'unknown'"


def crowded(connection: Connection) -> list[tuple[str, str, str]]:
    """Return queue, name and hold of tasks that wait for a place with those who know them; for a new leader."""
    return [(row[0], row[1], row[2]) for row in connection.exec_driver_sql(_CROWDED)]


class Agenda(NamedTuple):
    """What waits for the leader."""

    inbox: bool
    pending_runs: bool
    cancelling_runs: bool
    next_due: datetime | None
    held: bool
    expanding_runs: bool = False
    backfills: bool = False
    closing_runs: bool = False
    untold_runs: bool = False

    @property
    def is_busy(self) -> bool:
        """Say whether the next tick has something to do at once."""
        of_runs = self.pending_runs or self.cancelling_runs or self.expanding_runs or self.closing_runs
        return self.inbox or of_runs or self.untold_runs


AGENDA = """
       EXISTS (SELECT FROM orchestrator.inbox),
       EXISTS (SELECT FROM orchestrator.runs WHERE status = 'pending' AND NOT parked),
       EXISTS (SELECT FROM orchestrator.runs WHERE cancelling AND ended_at IS NULL),
       least((SELECT wake_at FROM orchestrator.tasks WHERE wake_at IS NOT NULL ORDER BY wake_at LIMIT 1),
             (SELECT expires_at FROM orchestrator.tasks WHERE expires_at IS NOT NULL AND status = 'pending'
               ORDER BY expires_at LIMIT 1),
             (SELECT due FROM orchestrator.timers ORDER BY due LIMIT 1),
             (SELECT deadline FROM orchestrator.runs
               WHERE deadline IS NOT NULL AND ended_at IS NULL AND NOT cancelling AND status = 'running'
               ORDER BY deadline LIMIT 1),
             (SELECT due_at FROM orchestrator.schedules WHERE due_at IS NOT NULL AND NOT paused
               ORDER BY due_at LIMIT 1)),
       EXISTS (SELECT FROM orchestrator.tasks WHERE hold IS NOT NULL),
       EXISTS (SELECT FROM orchestrator.runs WHERE expanding),
       EXISTS (SELECT FROM orchestrator.backfills WHERE next_fire IS NOT NULL),
       EXISTS (SELECT FROM orchestrator.runs WHERE closing),
       EXISTS (SELECT FROM orchestrator.untold WHERE NOT held)
"""
"""The columns of an agenda. Not `min`: where Postgres believes a table to be empty, it may read all of it for that."""
_AGENDA = Statement(f"SELECT {AGENDA}")


def agenda(connection: Connection) -> Agenda:
    """Look, with one index probe each, whether anything waits."""
    return Agenda(*_AGENDA(connection)[0])


class InFlight(NamedTuple):
    """A task that some worker should have."""

    id: bytes
    attempt: int
    queue: str
    status: str
    alone: bool
    worker: str | None
    age: float
    """Seconds since it was dispatched."""
    lane: str | None = None
    own: bool = False
    """It carries the turns of a workflow's code, and `worker` may be the one that had the last of them."""


_IN_FLIGHT = Statement(
    """
SELECT id::text, attempt, queue, status, alone, worker, extract(epoch FROM now() - dispatched_at)::double precision,
       lane, coalesce(run_id = id, false)
  FROM orchestrator.tasks WHERE status IN ('dispatched', 'running')
"""
)


def in_flight(connection: Connection) -> list[InFlight]:
    """Return every task that is dispatched or running; the windows keep this small."""
    return [InFlight(identifier(row[0]), *row[1:]) for row in _IN_FLIGHT(connection)]


_CURRENT = Statement(
    """
SELECT asked.id::text, asked.attempt FROM unnest(%(ids)s::uuid[], %(attempts)s::bigint[]) AS asked(id, attempt)
 CROSS JOIN LATERAL (
       SELECT FROM orchestrator.tasks
        WHERE id = asked.id AND attempt = asked.attempt AND status IN ('dispatched', 'running') LIMIT 1) AS found
"""
)


def current(connection: Connection, attempts: Sequence[tuple[bytes, int]]) -> set[tuple[bytes, int]]:
    """Return those of these attempts that still count."""
    parameters = {
        "ids": arrays.uuids(task for task, _ in attempts),
        "attempts": arrays.numbers(attempt for _, attempt in attempts),
    }
    return {(identifier(row[0]), row[1]) for row in _CURRENT(connection, parameters)}


_SUCCEEDED = Statement(
    """
SELECT asked.id::text, asked.attempt FROM unnest(%(ids)s::uuid[], %(attempts)s::bigint[]) AS asked(id, attempt)
 CROSS JOIN LATERAL (
       SELECT FROM orchestrator.ended_tasks
        WHERE id = asked.id AND attempt = asked.attempt AND status = 'success' LIMIT 1) AS found
"""
)


def succeeded(connection: Connection, attempts: Sequence[tuple[bytes, int]]) -> set[tuple[bytes, int]]:
    """Return those of these attempts that have brought their tasks to success."""
    parameters = {
        "ids": arrays.uuids(task for task, _ in attempts),
        "attempts": arrays.numbers(attempt for _, attempt in attempts),
    }
    return {(identifier(row[0]), row[1]) for row in _SUCCEEDED(connection, parameters)}


_HAS_READY = Statement(
    f"""
SELECT EXISTS (
       SELECT FROM unnest(%(queues)s::text[]) AS asked(queue)
        CROSS JOIN LATERAL (
             (SELECT 1 FROM orchestrator.tasks WHERE queue = asked.queue AND {READY_PLAIN} LIMIT 1)
              UNION ALL
             (SELECT 1 FROM orchestrator.tasks WHERE queue = asked.queue AND {READY_IN_LANE} LIMIT 1)) AS ready
        WHERE NOT EXISTS (SELECT FROM orchestrator.queues WHERE name = asked.queue AND paused))
"""
)


def has_ready(connection: Connection, queues: Sequence[str]) -> bool:
    """Say whether one of these queues, unless it is paused, holds anything that is ready: two index probes each."""
    return bool(_HAS_READY(connection, {"queues": list(queues)})[0][0])


_BUSY = """
SELECT EXISTS (SELECT FROM orchestrator.tasks WHERE queue = ANY(%(queues)s) AND status IN ('dispatched', 'running'))
"""


def is_busy(connection: Connection, queues: Sequence[str]) -> bool:
    """Say whether one of these queues holds anything that is ready or in flight."""
    in_flight = connection.exec_driver_sql(_BUSY, {"queues": list(queues)}).scalar_one()
    return bool(in_flight) or has_ready(connection, queues)


_POLICIES = Statement(
    """
SELECT wanted.id::text, t.failures, t.losses, t.options::text, coalesce(t.run_id = wanted.id, false)
  FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (
       SELECT failures, losses, options, run_id FROM orchestrator.tasks WHERE id = wanted.id LIMIT 1) AS t
"""
)


class Policy(NamedTuple):
    """What the decision about a failed or lost attempt needs to know."""

    failures: int
    losses: int
    options: str | None
    own: bool = False
    """It carries the turns of a workflow's code."""


def policies(connection: Connection, ids: Sequence[bytes]) -> dict[bytes, Policy]:
    """Return the policies of open tasks."""
    rows = _POLICIES(connection, {"ids": arrays.uuids(ids)})
    return {identifier(row[0]): Policy(*row[1:]) for row in rows}


_DEATHS = Statement(
    """
SELECT wanted.id::text, a.deaths
  FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (
       SELECT count(*) AS deaths FROM orchestrator.attempts WHERE task_id = wanted.id AND outcome = 'lost') AS a
"""
)


def deaths(connection: Connection, ids: Sequence[bytes]) -> dict[bytes, int]:
    """Return how many earlier attempts of these tasks have ended with their process, whoever was the cause."""
    rows = _DEATHS(connection, {"ids": arrays.uuids(ids)})
    return {identifier(row[0]): int(row[1]) for row in rows}
