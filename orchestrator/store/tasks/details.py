"""Details that a running attempt saves for the next one. They are part of the open task, and deleted when it ends."""

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
    """Save details, at most one for each task, of attempts that are still current."""
    _SAVE(connection, _NOTES((note.id, note.attempt, note.details) for note in notes))


class Execution(NamedTuple):
    """An open task that an executor runs, with the saved details of its execution."""

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
    """Return the tasks whose execution an executor may have begun."""


_OPEN = Statement[Row]("SELECT /* details.open */ failures, details FROM orchestrator.tasks WHERE id = %(id)s::uuid")


def of_open(connection: Connection, task: bytes) -> tuple[int, bytes | None] | None:
    """Return the failures and the saved details of an open task; None if it is not open."""
    row = _OPEN.first(connection, id=task)
    return None if row is None else (row.failures, None if row.details is None else bytes(row.details))
