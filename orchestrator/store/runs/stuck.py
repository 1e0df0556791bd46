"""Stuck runs and how they are freed: runs whose code does not fit the history, and runs that cannot be planned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from orchestrator.domain.ids import to_text
from orchestrator.domain.tasks.outcomes import FIRST_PAUSE, MAX_PAUSE
from orchestrator.store.batches import Batch
from orchestrator.store.sql import Prepared, Statement
from orchestrator.store.tasks.transitions import Moved, current_attempt

_REASONS = Batch("s", "id uuid, reason jsonb")
_STUCK_ATTEMPTS = Batch("r", "id uuid, attempt int, reason jsonb")

_MARK_STUCK = Prepared[Moved](f"""
WITH /* stuck.mark_stuck */ back AS (
    UPDATE orchestrator.tasks t
       SET status = 'pending', blockers = 1, worker = NULL, hold = NULL, wake_at = NULL, dispatched_at = NULL,
           started_at = NULL, alone = r.reason->>'retry_at' IS NOT NULL, failures = t.failures + 1,
           losses = CASE WHEN r.reason->>'retry_at' IS NULL THEN 0 ELSE t.losses + 1 END
      FROM {_STUCK_ATTEMPTS}
     {current_attempt()}
     WHERE t.ctid = found.place
    RETURNING t.id, t.queue, t.attempt, jsonb_build_object('retry_at', extract(epoch FROM %(now)s::timestamptz)
              + least({FIRST_PAUSE} * 2 ^ least(t.failures - 1, 16), {MAX_PAUSE})) || r.reason AS reason
), marked AS (
    UPDATE orchestrator.runs r SET stuck = back.reason, cached = 0
      FROM back
     CROSS JOIN LATERAL (SELECT ctid AS place FROM orchestrator.runs WHERE id = back.id LIMIT 1) AS found
     WHERE r.ctid = found.place
)
SELECT id, 'pending' AS state, queue, id AS run_id, attempt, 'dispatched' AS before FROM back
""")


def mark_stuck(connection: Connection, reasons: Iterable[tuple[bytes, int, str]], now: datetime) -> list[Moved]:
    """Mark runs of code as stuck, with the attempt and the reason as JSON, and block their turn tasks.

    Every reason gets a `retry_at` with backoff, because another worker may have code that fits. Reasons that have one
    already are of runs whose processes died: their losses count, and the next turn runs in its own process.
    """
    return _MARK_STUCK(connection, _STUCK_ATTEMPTS(reasons), now=now)


_MARK_UNKNOWN = Prepared[bytes](f"""
WITH /* stuck.mark_held */ marked AS (
    UPDATE orchestrator.runs r SET stuck = s.reason, cached = 0
      FROM {_REASONS}
     CROSS JOIN LATERAL (SELECT ctid AS place FROM orchestrator.runs WHERE id = s.id LIMIT 1) AS found
     WHERE r.ctid = found.place AND r.code AND r.shown > 0 AND r.ended_at IS NULL
    RETURNING r.id
), back AS (
    UPDATE orchestrator.tasks t SET blockers = 1, worker = NULL, hold = NULL, wake_at = NULL
      FROM marked
     CROSS JOIN LATERAL (SELECT ctid AS place FROM orchestrator.tasks WHERE id = marked.id LIMIT 1) AS found
     WHERE t.ctid = found.place AND t.status = 'pending'
)
SELECT id FROM marked
""")


def mark_unknown(connection: Connection, reasons: Iterable[tuple[bytes, str]]) -> set[bytes]:
    """Mark runs that have begun as stuck because no worker knows their code; return the marked runs."""
    return set(_MARK_UNKNOWN(connection, _REASONS(reasons)))


_SET_ASIDE = Prepared[None](f"""
WITH /* stuck.set_aside */ marked AS (
    UPDATE orchestrator.runs r SET stuck = s.reason, expanding = false
      FROM {_REASONS}
     CROSS JOIN LATERAL (SELECT ctid AS place FROM orchestrator.runs WHERE id = s.id LIMIT 1) AS found
     WHERE r.ctid = found.place AND r.ended_at IS NULL
)
UPDATE orchestrator.untold SET held = true WHERE run_id = ANY (ARRAY(SELECT s.id FROM {_REASONS}))
""")


def set_aside(connection: Connection, reasons: Iterable[tuple[bytes, str]]) -> None:
    """Mark runs as stuck, with the reason as JSON; their pending changes wait until the runs are freed.

    A run that ended in the same tick, before a later part of the tick failed, is skipped.
    """
    _SET_ASIDE(connection, _REASONS(reasons))


def _freeing(name: str, which: str, change: str = "blockers = 0") -> Prepared[bytes]:
    return Prepared[bytes](f"""
WITH /* stuck.{name} */ freed AS (
    UPDATE orchestrator.runs r SET stuck = NULL, cached = 0
     WHERE r.ctid = ANY (ARRAY({which} LIMIT %(limit)s))
    RETURNING r.id
), woken AS (
    UPDATE orchestrator.tasks t SET {change}
      FROM freed
     CROSS JOIN LATERAL (
           SELECT ctid AS place FROM orchestrator.tasks WHERE id = freed.id AND status = 'pending' LIMIT 1) AS found
     WHERE t.ctid = found.place
), told AS (
    UPDATE orchestrator.untold SET held = false WHERE run_id = ANY (ARRAY(SELECT id FROM freed))
)
SELECT id FROM freed
""")


_FREE = _freeing(
    "free",
    """
        SELECT (SELECT ctid FROM orchestrator.runs
                 WHERE id = wanted.id AND stuck IS NOT NULL AND ended_at IS NULL LIMIT 1)
          FROM unnest(%(ids)s::uuid[]) AS wanted(id)""",
)
_FREE_CODE = _freeing(
    "free_code",
    """
        SELECT place FROM (
               SELECT ctid AS place, id, code, workflow, stuck FROM orchestrator.runs
                WHERE stuck IS NOT NULL AND ended_at IS NULL ORDER BY id OFFSET 0) AS blocked
         WHERE code AND workflow = ANY(%(workflows)s::text[]) AND id::text > %(after)s::text
           AND stuck->>'kind' IS DISTINCT FROM 'WorkerLost'""",
)
_FREE_LOST = _freeing(
    "free_lost",
    """
        SELECT place FROM (
               SELECT ctid AS place, code, workflow, stuck FROM orchestrator.runs
                WHERE stuck IS NOT NULL AND ended_at IS NULL ORDER BY id OFFSET 0) AS blocked
         WHERE code AND workflow = ANY(%(workflows)s::text[]) AND stuck->>'kind' = 'WorkerLost'
           AND coalesce((stuck->>'retry_at')::double precision, 0) <= %(now)s::double precision""",
    "blockers = 0, alone = true",
)
_FREE_UNFIT = _freeing(
    "free_unfit",
    """
        SELECT place FROM (
               SELECT ctid AS place, code, workflow, stuck FROM orchestrator.runs
                WHERE stuck IS NOT NULL AND ended_at IS NULL ORDER BY id OFFSET 0) AS blocked
         WHERE code AND workflow = ANY(%(workflows)s::text[]) AND stuck->>'kind' IS DISTINCT FROM 'WorkerLost'
           AND (stuck->>'retry_at')::double precision <= %(now)s::double precision""",
)
_FREE_OLDER = _freeing(
    "free_older",
    """
        SELECT ctid FROM orchestrator.runs
         WHERE stuck IS NOT NULL AND ended_at IS NULL AND stuck->>'release' <> %(release)s::text
         ORDER BY id""",
)


def free_older(connection: Connection, release: str, limit: int) -> list[bytes]:
    """Free runs that another release of the scheduler could not plan."""
    return _FREE_OLDER(connection, release=release, limit=limit)


def free(connection: Connection, runs: Sequence[bytes]) -> list[bytes]:
    """Free the stuck runs among these."""
    return _FREE(connection, ids=runs, limit=len(runs))


def free_code(connection: Connection, workflows: Sequence[str], after: bytes, limit: int) -> list[bytes]:
    """Free stuck runs of these workflows as code after an id, except runs whose processes died."""
    return _FREE_CODE(connection, workflows=workflows, after=to_text(after), limit=limit)


def free_lost(connection: Connection, workflows: Sequence[str], now: float, limit: int) -> list[bytes]:
    """Free runs of these workflows whose processes died and whose backoff is over; their next turns run alone."""
    return _FREE_LOST(connection, workflows=workflows, now=now, limit=limit)


def free_unfit(connection: Connection, workflows: Sequence[str], now: float, limit: int) -> list[bytes]:
    """Free runs of these workflows whose code did not fit and whose backoff is over."""
    return _FREE_UNFIT(connection, workflows=workflows, now=now, limit=limit)


@Statement.function("""
SELECT /* stuck.reason */ stuck FROM orchestrator.runs
 WHERE id = %(run)s::uuid AND stuck IS NOT NULL AND ended_at IS NULL
""")
def reason(connection: Connection, run: bytes) -> dict[str, Any] | None:
    """Return why a run is stuck; None if it is not."""


@Prepared.function("""
SELECT /* stuck.at_rest */ r.id FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (SELECT id FROM orchestrator.runs
                      WHERE id = wanted.id AND stuck IS NOT NULL AND NOT code LIMIT 1) AS r
 WHERE (SELECT 1 FROM orchestrator.tasks WHERE run_id = wanted.id LIMIT 1) IS NULL
   AND (SELECT 1 FROM orchestrator.runs
         WHERE parent_run = wanted.id AND ended_at IS NULL AND NOT detached LIMIT 1) IS NULL
""")
def without_open_work(connection: Connection, ids: Sequence[bytes]) -> list[bytes]:
    """Return the stuck runs of steps among these that have neither open tasks nor open child runs."""


@Prepared.function("""
WITH /* stuck.wake */ open AS (
    SELECT wanted.id, r.stuck IS NULL AND r.status <> 'pending' AS free FROM unnest(%(runs)s::uuid[]) AS wanted(id)
     CROSS JOIN LATERAL (
           SELECT stuck, status FROM orchestrator.runs
            WHERE id = wanted.id AND code AND ended_at IS NULL LIMIT 1) AS r
), woken AS (
    UPDATE orchestrator.tasks t SET blockers = 0
      FROM open
     CROSS JOIN LATERAL (SELECT ctid AS place FROM orchestrator.tasks WHERE id = open.id LIMIT 1) AS found
     WHERE t.ctid = found.place AND open.free AND t.status = 'pending' AND t.blockers > 0
)
SELECT id FROM open WHERE free
""")
def wake(connection: Connection, runs: Sequence[bytes]) -> set[bytes]:
    """Make turn tasks ready although no event is new; return the runs that have begun, are open and are not stuck."""
