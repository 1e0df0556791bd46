"""What a running attempt leaves for the next one. It stays with the open task, and goes when that ends."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection

from orchestrator.domain.tasks.task import Noted
from orchestrator.store.sql import Batch, Prepared

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
