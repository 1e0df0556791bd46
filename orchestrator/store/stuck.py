"""Runs of workflows as code that cannot go on, and how they are woken again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import Connection

from orchestrator.store import arrays
from orchestrator.store.statement import Statement
from orchestrator.store.transitions import Moved, current_attempt, identifier, moved_rows

_STICK = Statement(
    f"""
WITH back AS (
    UPDATE orchestrator.tasks t
       SET status = 'pending', blockers = 1, worker = NULL, hold = NULL, wake_at = NULL, dispatched_at = NULL,
           started_at = NULL, losses = 0, alone = false
      FROM unnest(%(ids)s::uuid[], %(attempts)s::int[], %(reasons)s::jsonb[]) AS r(id, attempt, reason)
     {current_attempt()}
     WHERE t.ctid = found.place
    RETURNING t.id, t.queue, t.attempt, r.reason
), marked AS (
    UPDATE orchestrator.runs r SET stuck = back.reason, cached = 0 FROM back WHERE r.id = back.id
)
SELECT id::text, 'pending', queue, id::text, attempt, 'dispatched' FROM back
"""
)


def stick(connection: Connection, reasons: Iterable[tuple[bytes, int, str]]) -> list[Moved]:
    """Note that runs cannot go on, with the attempt that found out and the reason as JSON; their code sleeps."""
    rows = list(reasons)
    parameters = {
        "ids": arrays.uuids(run for run, _, _ in rows),
        "attempts": arrays.numbers(attempt for _, attempt, _ in rows),
        "reasons": [reason for _, _, reason in rows],
    }
    return moved_rows(_STICK(connection, parameters))


_STICK_HELD = Statement(
    """
WITH marked AS (
    UPDATE orchestrator.runs r SET stuck = s.reason, cached = 0
      FROM unnest(%(ids)s::uuid[], %(reasons)s::jsonb[]) AS s(id, reason)
     WHERE r.id = s.id AND r.code AND r.shown > 0 AND r.ended_at IS NULL
    RETURNING r.id
), back AS (
    UPDATE orchestrator.tasks t SET blockers = 1, worker = NULL, hold = NULL, wake_at = NULL
      FROM marked WHERE t.id = marked.id AND t.status = 'pending'
)
SELECT id::text FROM marked
"""
)


def stick_unknown(connection: Connection, reasons: Iterable[tuple[bytes, str]]) -> set[bytes]:
    """Note that no worker knows the code of runs that have begun; return those."""
    rows = list(reasons)
    parameters = {"ids": arrays.uuids(run for run, _ in rows), "reasons": [reason for _, reason in rows]}
    return {identifier(row[0]) for row in _STICK_HELD(connection, parameters)}


_FREE = Statement(
    """
WITH freed AS (
    UPDATE orchestrator.runs r SET stuck = NULL, cached = 0
     WHERE r.id IN (SELECT id FROM orchestrator.runs
                     WHERE stuck IS NOT NULL AND ended_at IS NULL
                       AND (id = ANY(%(ids)s::uuid[]) OR workflow = ANY(%(workflows)s::text[]))
                     ORDER BY id LIMIT %(limit)s)
    RETURNING r.id
), woken AS (
    UPDATE orchestrator.tasks t SET blockers = 0
      FROM freed WHERE t.id = freed.id AND t.status = 'pending'
)
SELECT id::text FROM freed
"""
)


def free(
    connection: Connection, limit: int, *, runs: Sequence[bytes] = (), workflows: Sequence[str] = ()
) -> list[bytes]:
    """Let stuck runs try again: these, and those of these workflows."""
    parameters = {"ids": arrays.uuids(runs), "workflows": list(workflows), "limit": limit}
    return [identifier(row[0]) for row in _FREE(connection, parameters)]


_WAKE = Statement(
    """
WITH open AS (
    SELECT wanted.id, r.stuck IS NULL AS free FROM unnest(%(ids)s::uuid[]) AS wanted(id)
     CROSS JOIN LATERAL (
           SELECT stuck FROM orchestrator.runs WHERE id = wanted.id AND code AND ended_at IS NULL LIMIT 1) AS r
), woken AS (
    UPDATE orchestrator.tasks t SET blockers = 0
      FROM open WHERE open.free AND t.id = open.id AND t.status = 'pending' AND t.blockers > 0
)
SELECT id::text FROM open WHERE free
"""
)


def wake(connection: Connection, runs: Sequence[bytes]) -> set[bytes]:
    """Have runs activated although nothing is new; return those that are open and not stuck."""
    return {identifier(row[0]) for row in _WAKE(connection, {"ids": arrays.uuids(runs)})}
