"""Runs that are being cancelled, and what of them is open. Thousands at a time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection

from orchestrator.domain.runs.verdict import TERMINATED, TIMED_OUT
from orchestrator.store.runs.transitions import COUNTERS, RunRow
from orchestrator.store.sql import Prepared


@Prepared.function(f"""
UPDATE /* cancels.mark */ orchestrator.runs
   SET cancelling = true, reason = CASE WHEN code AND %(code)s::boolean THEN '{TERMINATED}' ELSE reason END
 WHERE id = ANY(%(ids)s::uuid[]) AND status IN ('pending', 'running') AND NOT cancelling
   AND (%(code)s::boolean OR NOT code OR status = 'pending')
RETURNING id
""")
def mark(connection: Connection, ids: Sequence[bytes], *, code: bool = False) -> list[bytes]:
    """Note that runs are to be cancelled; their tasks follow in slices. `code` is not spared: those are terminated.

    Code that has not begun has nothing to clean up, and is cancelled in any case.
    """


class Late(NamedTuple):
    """A run whose time is up."""

    id: bytes
    is_told: bool
    """Its code must be notified, and has a grace period to end."""


@Prepared.function(f"""
WITH /* cancels.time_out */ due AS MATERIALIZED (
    SELECT id, code, shown, stuck, reason IS NOT DISTINCT FROM '{TIMED_OUT}' AS over FROM orchestrator.runs
     WHERE deadline <= %(now)s::timestamptz AND status = 'running' AND ended_at IS NULL AND NOT cancelling
     ORDER BY deadline LIMIT %(limit)s
), judged AS (
    SELECT due.id, due.code AND NOT due.over AS is_told,
           NOT due.code OR due.over AND due.stuck IS NULL AND (own.id IS NULL OR unheard.number IS NULL) AS ends
      FROM due
      LEFT JOIN LATERAL (
           SELECT id FROM orchestrator.tasks WHERE id = due.id AND status = 'pending' LIMIT 1) AS own ON true
      LEFT JOIN LATERAL (
           SELECT number FROM orchestrator.histories
            WHERE run_id = due.id AND number > due.shown AND kind = 'run_cancel_requested' LIMIT 1) AS unheard ON true
)
UPDATE orchestrator.runs r
   SET reason = '{TIMED_OUT}', cancelling = late.ends,
       deadline = CASE WHEN NOT late.ends THEN %(now)s::timestamptz + %(grace)s * interval '1 second'
                       WHEN NOT r.code THEN r.deadline END
  FROM judged late
 CROSS JOIN LATERAL (SELECT ctid AS place FROM orchestrator.runs WHERE id = late.id LIMIT 1) AS found
 WHERE r.ctid = found.place
RETURNING r.id, late.is_told
""")
def time_out(connection: Connection, now: datetime, limit: int, grace: float) -> list[Late]:
    """Note that runs have taken too long; their tasks are cancelled in slices, and then they have failed.

    Runs of code only when their grace is over, too; and for another grace they are excused while their code could not
    know: they are stuck, or no worker has come for them.
    """


@Prepared.function(f"""
WITH /* cancels.mark_below */ RECURSIVE below (id, code, is_given) AS (
    SELECT given.id, r.code, true FROM unnest(%(ids)s::uuid[]) AS given(id)
     CROSS JOIN LATERAL (SELECT code FROM orchestrator.runs WHERE id = given.id LIMIT 1) AS r
     UNION ALL
    SELECT c.id, c.code, false FROM below
     CROSS JOIN LATERAL (
           SELECT id, code FROM orchestrator.runs
            WHERE parent_run = below.id AND ended_at IS NULL AND NOT cancelling AND NOT detached OFFSET 0) AS c
     WHERE NOT below.code
)
UPDATE orchestrator.runs r
   SET cancelling = true, status = CASE WHEN found.is_new THEN 'cancelled' ELSE r.status END,
       ended_at = CASE WHEN found.is_new THEN %(now)s::timestamptz END
  FROM (SELECT id FROM below WHERE NOT is_given LIMIT %(limit)s) AS next
 CROSS JOIN LATERAL (
       SELECT ctid AS place, status = 'pending' AND open = 0 AND NOT code AS is_new
         FROM orchestrator.runs WHERE id = next.id LIMIT 1) AS found
 WHERE r.ctid = found.place
RETURNING {COUNTERS}
""")
def mark_below(connection: Connection, ids: Sequence[bytes], now: datetime, limit: int) -> list[RunRow]:
    """Cancel what was started by runs that are being cancelled, and by what these started, however deep.

    What has not begun ends at once. Children of runs of code follow when those end, each as its close policy says.
    """


@Prepared.function("""
SELECT /* cancels.next */ id FROM orchestrator.runs
 WHERE cancelling AND ended_at IS NULL AND id > %(after)s::uuid ORDER BY id LIMIT %(limit)s
""")
def following(connection: Connection, after: bytes, limit: int) -> list[bytes]:
    """Return the runs after one that are being cancelled."""


@Prepared.function("""
SELECT /* cancels.open_tasks */ id FROM orchestrator.tasks WHERE run_id = ANY(%(ids)s::uuid[]) LIMIT %(limit)s
""")
def open_tasks(connection: Connection, ids: Sequence[bytes], limit: int) -> list[bytes]:
    """Return some of the open tasks of runs."""


class AtRest(NamedTuple):
    """A run that is being cancelled, and of which nothing is open: what is left of it was never created."""

    id: bytes
    is_with_parent: bool
    """Its parent is being cancelled, too, and need not be notified."""


@Prepared.function("""
SELECT /* cancels.at_rest */ r.id, coalesce(
       (SELECT cancelling AND ended_at IS NULL AND stuck IS NULL AND NOT code
          FROM orchestrator.runs WHERE id = r.parent_run), false) AS is_with_parent
  FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (
       SELECT id, parent_run FROM orchestrator.runs
        WHERE id = wanted.id AND cancelling AND ended_at IS NULL AND NOT code AND stuck IS NULL LIMIT 1) AS r
 WHERE (SELECT 1 FROM orchestrator.tasks WHERE run_id = wanted.id LIMIT 1) IS NULL
   AND (SELECT 1 FROM orchestrator.runs
         WHERE parent_run = wanted.id AND ended_at IS NULL AND NOT detached LIMIT 1) IS NULL
""")
def at_rest(connection: Connection, ids: Sequence[bytes]) -> list[AtRest]:
    """Return those of these runs that are being cancelled and have neither open tasks nor open child runs."""
