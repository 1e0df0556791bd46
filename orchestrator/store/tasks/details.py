"""Details that a running attempt leaves for the next one. They stay with the open task, and are deleted when it
ends."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from sqlalchemy import Connection

from orchestrator.domain.tasks.task import Noted
from orchestrator.store.batches import Batch
from orchestrator.store.sql import Prepared, Row, Statement

_NOTES = Batch("r", "id uuid, attempt int, details bytea")
_SAVE = Prepared[None](f"""
UPDATE /* details.save */ orchestrator.tasks t SET details = r.details
  FROM {_NOTES}
 CROSS JOIN LATERAL (
       SELECT ctid AS place FROM orchestrator.tasks
        WHERE id = r.id AND attempt = r.attempt AND status IN ('dispatched', 'running') LIMIT 1) AS found
 WHERE t.ctid = found.place
""")


def save(connection: Connection, notes: Collection[Noted]) -> None:
    """Keep what attempts have left, at most one note of each task, where the attempt still counts."""
    _SAVE(connection, _NOTES((note.id, note.attempt, note.details) for note in notes))


class Execution(NamedTuple):
    """An open task that an executor does, and what is kept of its execution."""

    id: bytes
    name: str
    queue: str
    attempt: int
    is_in_flight: bool
    options: str
    details: bytes


@Prepared.function("""
SELECT /* details.executions */ t.id, t.name, t.queue, t.attempt, t.status <> 'pending' AS is_in_flight,
       t.options::text AS options, t.details
  FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (
       SELECT id, name, queue, attempt, status, options, details FROM orchestrator.tasks
        WHERE id = wanted.id AND options ? 'executor' AND details IS NOT NULL LIMIT 1) AS t
""")
def executions(connection: Connection, ids: Sequence[bytes]) -> list[Execution]:
    """Return those of these tasks that executors may have begun."""


_OPEN = Statement[Row]("SELECT /* details.open */ failures, details FROM orchestrator.tasks WHERE id = %(id)s::uuid")


def of_open(connection: Connection, task: bytes) -> tuple[int, bytes | None] | None:
    """Return how often an open task has failed, and what is kept with it; None if it is not open."""
    row = _OPEN.first(connection, id=task)
    return None if row is None else (row.failures, None if row.details is None else bytes(row.details))
