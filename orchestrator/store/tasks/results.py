"""What clients ask about the tasks and runs that they started."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sqlalchemy import Connection

from orchestrator.domain.runs.verdict import RunCounters
from orchestrator.domain.tasks.task import TaskError
from orchestrator.store import arrays
from orchestrator.store.tasks.redrive import IS_ASKED_FOR
from orchestrator.store.tasks.transitions import identifier


class TaskOutcome(NamedTuple):
    """Where a task stands, and how it ended."""

    status: str
    result: bytes | None = None
    error: TaskError | None = None


_NAME = "SELECT name FROM orchestrator.ended_tasks WHERE id = %(id)s::uuid"


def name_of(connection: Connection, task: bytes) -> str:
    """Return what an ended task calls, for who tells of it."""
    return connection.exec_driver_sql(_NAME, {"id": task.hex()}).scalar_one_or_none() or "task"


# Both halves see one snapshot, so a task that is moving is found in exactly one of them. A task that somebody has
# asked to be tried again, by itself, with its run or with others, is not ended for its caller, although the leader has
# yet to open it.
_OUTCOMES = f"""
WITH requests AS MATERIALIZED (
    SELECT kind, target, body, created_at FROM orchestrator.inbox WHERE kind IN ('retry task', 'retry run', 'redrive')
)
SELECT id::text, CASE WHEN status IN ('failed', 'skipped') AND EXISTS (
           SELECT FROM requests r
            WHERE (r.kind = 'retry task' AND r.target = e.id) OR (r.kind = 'retry run' AND r.target = e.run_id)
               OR (r.kind = 'redrive' AND {IS_ASKED_FOR}))
       THEN 'pending' ELSE status END, result, error
  FROM orchestrator.ended_tasks e WHERE id = ANY (%(ids)s::uuid[])
 UNION ALL
SELECT id::text, status, NULL, NULL FROM orchestrator.tasks WHERE id = ANY (%(ids)s::uuid[])
"""


def outcome(connection: Connection, task: bytes) -> TaskOutcome | None:
    """Return where a task stands, or None if there is no such task."""
    return outcomes(connection, [task]).get(task)


def outcomes(connection: Connection, tasks: Sequence[bytes]) -> dict[bytes, TaskOutcome]:
    """Return where those of these tasks stand that exist."""
    found: dict[bytes, TaskOutcome] = {}
    for row in connection.exec_driver_sql(_OUTCOMES, {"ids": arrays.uuids(tasks)}):
        error = TaskError.stored(row[3])
        found[identifier(row[0])] = TaskOutcome(row[1], None if row[2] is None else bytes(row[2]), error)
    return found


_PROGRESS = """
SELECT CASE WHEN EXISTS (SELECT FROM orchestrator.inbox WHERE target = %(id)s::uuid AND kind = 'retry run')
            THEN 'running' ELSE status END, total, open, success, failed, cancelled, skipped
  FROM orchestrator.runs WHERE id = %(id)s::uuid
"""


def progress(connection: Connection, run: bytes) -> tuple[str, RunCounters] | None:
    """Return a run's state and counters, or None if there is no such run."""
    row = connection.exec_driver_sql(_PROGRESS, {"id": run.hex()}).one_or_none()
    if row is None:
        return None
    counters = RunCounters(total=row[1], open=row[2], success=row[3], failed=row[4], cancelled=row[5], skipped=row[6])
    return row[0], counters


_RESULTS = """
SELECT position, id::text, status, result, error FROM orchestrator.ended_tasks
 WHERE run_id = %(id)s::uuid AND step IS NULL AND position > %(after)s ORDER BY position LIMIT %(limit)s
"""


def run_results(connection: Connection, run: bytes, page: int = 5_000) -> Iterator[tuple[bytes, TaskOutcome]]:
    """Yield the tasks of a run in order, with how each has ended, a page at a time."""
    after = -1
    while rows := connection.exec_driver_sql(_RESULTS, {"id": run.hex(), "after": after, "limit": page}).all():
        for _, task, status, result, error in rows:
            kept = None if result is None else bytes(result)
            yield identifier(task), TaskOutcome(status, kept, TaskError.stored(error))
        after = rows[-1][0]
