"""What the leader reads and writes to try a failed run of a workflow again (see `domain/dag/retrying`)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Connection

from orchestrator.domain.states import RunState
from orchestrator.store import arrays
from orchestrator.store.runs.life import sources
from orchestrator.store.statement import Statement
from orchestrator.store.tasks.transitions import identifier

_BACK = "status = 'pending', ended_at = NULL, reason = NULL, cancelling = false, parked = false, deadline = NULL"
_UNSUCCESSFUL = sources(RunState.PENDING)

_REQUEUE = Statement(
    f"""
UPDATE orchestrator.runs SET {_BACK}
 WHERE ctid = ANY (ARRAY(
       SELECT found.place FROM unnest(%(ids)s::uuid[]) AS wanted(id)
        CROSS JOIN LATERAL (
              SELECT ctid AS place, status, workflow, code, parent_step
                FROM orchestrator.runs WHERE id = wanted.id LIMIT 1) AS found
        WHERE found.status = 'failed' AND found.workflow IS NOT NULL AND NOT found.code AND found.parent_step IS NULL))
RETURNING id::text
"""
)


def requeue(connection: Connection, ids: Sequence[bytes]) -> set[bytes]:
    """Let failed runs of workflows stand in line again, as if they were new; return those that do."""
    return {identifier(row[0]) for row in _REQUEUE(connection, {"ids": arrays.uuids(ids)})}


_REQUEUE_CHILDREN = Statement(
    f"""
UPDATE orchestrator.runs SET {_BACK}
 WHERE ctid = ANY (ARRAY(
       SELECT ctid FROM orchestrator.runs
        WHERE parent_run = %(run)s::uuid AND parent_step = %(step)s AND status IN {_UNSUCCESSFUL}
              AND ended_at <= %(until)s::timestamptz LIMIT %(limit)s))
RETURNING id
"""
)


def requeue_children(connection: Connection, run: bytes, step: str, until: datetime, limit: int) -> int:
    """Let child runs of a step that had not succeeded by then stand in line again; return how many do."""
    parameters = {"run": run.hex(), "step": step, "until": until, "limit": limit}
    return len(_REQUEUE_CHILDREN(connection, parameters))


_WITH_CHILDREN = Statement(
    f"""
SELECT DISTINCT parent_step FROM orchestrator.runs
 WHERE parent_run = %(run)s::uuid AND parent_step = ANY(%(steps)s::text[]) AND status IN {_UNSUCCESSFUL}
"""
)


def with_children(connection: Connection, run: bytes, steps: Sequence[str]) -> set[str]:
    """Return those of these steps that have a child run to be retried."""
    return {row[0] for row in _WITH_CHILDREN(connection, {"run": run.hex(), "steps": list(steps)})}


_PARENT = """
SELECT parent_run::text, parent_step FROM orchestrator.runs WHERE id = %(run)s::uuid AND parent_step IS NOT NULL
"""


def parent_of(connection: Connection, run: bytes) -> tuple[str, str] | None:
    """Return the run of which a run is a step, and that step."""
    row = connection.exec_driver_sql(_PARENT, {"run": run.hex()}).one_or_none()
    return (row[0], row[1]) if row else None


_RUN_FIRST = """
SELECT e.run_id::text FROM orchestrator.ended_tasks e JOIN orchestrator.runs r ON r.id = e.run_id
 WHERE e.id = %(task)s::uuid AND r.status = 'failed'
       AND (r.lane IS NOT NULL OR r.parent_step IS NOT NULL OR (r.cancelling AND r.workflow IS NOT NULL AND NOT r.code))
"""


def run_first(connection: Connection, task: bytes) -> str | None:
    """Return the run that is to be retried in the place of one of its tasks."""
    row = connection.exec_driver_sql(_RUN_FIRST, {"task": task.hex()}).one_or_none()
    return row[0] if row else None


_UNFINISHED = Statement(
    """
SELECT id::text FROM orchestrator.ended_tasks
 WHERE run_id = %(run)s::uuid AND step = %(step)s AND status IN ('failed', 'cancelled', 'skipped')
       AND ended_at <= %(until)s::timestamptz
 ORDER BY position LIMIT %(limit)s
"""
)


def unfinished_tasks(connection: Connection, run: bytes, step: str, until: datetime, limit: int) -> list[bytes]:
    """Return the first tasks of a step that had not succeeded by then."""
    parameters = {"run": run.hex(), "step": step, "until": until, "limit": limit}
    return [identifier(row[0]) for row in _UNFINISHED(connection, parameters)]


_CREATED = Statement(
    """
SELECT wanted.step, (SELECT count(*) FROM orchestrator.ended_tasks WHERE run_id = %(run)s::uuid AND step = wanted.step)
       + (SELECT count(*) FROM orchestrator.tasks WHERE run_id = %(run)s::uuid AND step = wanted.step)
       + (SELECT count(*) FROM orchestrator.runs WHERE parent_run = %(run)s::uuid AND parent_step = wanted.step)
  FROM unnest(%(steps)s::text[]) AS wanted(step)
"""
)


def created(connection: Connection, run: bytes, steps: Sequence[str]) -> dict[str, int]:
    """Return how many tasks or child runs steps of a run have."""
    return {row[0]: row[1] for row in _CREATED(connection, {"run": run.hex(), "steps": list(steps)})}


# Attempts that are taken back stay where those of tasks stand that were tried again, so that a task that is created
# once more counts on from there, and no report of theirs is taken for one of its own.
_TAKE_BACK = Statement(
    """
WITH old AS (
    DELETE FROM orchestrator.ended_tasks WHERE ctid = ANY (ARRAY(
           SELECT ctid FROM orchestrator.ended_tasks
            WHERE run_id = %(run)s::uuid AND step = ANY(%(steps)s::text[]) LIMIT %(limit)s))
    RETURNING *
), history AS (
    INSERT INTO orchestrator.attempts (task_id, attempt, outcome, error, worker, started_at, ended_at)
    SELECT id, attempt, status, error, worker, started_at, ended_at FROM old WHERE attempt > 0
    ON CONFLICT DO NOTHING
), orphaned AS (
    UPDATE orchestrator.runs SET parent_step = NULL WHERE ctid = ANY (ARRAY(
           SELECT ctid FROM orchestrator.runs
            WHERE parent_run = %(run)s::uuid AND parent_step = ANY(%(steps)s::text[])
            LIMIT %(limit)s))
    RETURNING id
)
SELECT count(*) FROM (SELECT id FROM old UNION ALL SELECT id FROM orphaned) AS gone
"""
)


def take_back(connection: Connection, run: bytes, steps: Sequence[str], limit: int) -> int:
    """Forget what steps came to that are considered anew, a slice at a time; return how many rows there were."""
    rows = _TAKE_BACK(connection, {"run": run.hex(), "steps": list(steps), "limit": limit})
    found: int = rows[0][0]
    return found


_PAST = Statement(
    """
SELECT wanted.id::text, past.attempt FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (SELECT max(attempt) AS attempt FROM orchestrator.attempts WHERE task_id = wanted.id) AS past
 WHERE past.attempt IS NOT NULL
"""
)


def past_attempts(connection: Connection, tasks: Sequence[bytes]) -> dict[bytes, int]:
    """Return the last attempts that were taken back of tasks that are created once more."""
    return {identifier(row[0]): row[1] for row in _PAST(connection, {"ids": arrays.uuids(tasks)})}
