"""What a running attempt leaves for the next one. It stays with the open task, and goes when that ends."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection

from orchestrator.domain.tasks.task import Noted
from orchestrator.store import arrays
from orchestrator.store.statement import Statement

_SAVE = Statement(
    """
UPDATE orchestrator.tasks t SET details = r.details
  FROM unnest(%(ids)s::uuid[], %(attempts)s::int[], %(details)s::bytea[]) AS r(id, attempt, details)
 CROSS JOIN LATERAL (
       SELECT ctid AS place FROM orchestrator.tasks
        WHERE id = r.id AND attempt = r.attempt AND status IN ('dispatched', 'running') LIMIT 1) AS found
 WHERE t.ctid = found.place
"""
)


def save(connection: Connection, notes: Collection[Noted]) -> None:
    """Keep what attempts have left, at most one note of each task, where the attempt still counts."""
    _SAVE(
        connection,
        {
            "ids": arrays.uuids(note.id for note in notes),
            "attempts": arrays.numbers(note.attempt for note in notes),
            "details": arrays.blobs(note.details for note in notes),
        },
    )
