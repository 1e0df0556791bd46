"""Runs and how far they have come."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.domain.states import RunState


@dataclass(frozen=True, kw_only=True)
class RunView:
    """One run."""

    id: UUID
    """Its id, which sorts by the time of its creation."""
    name: str
    """What it was called by who started it."""
    status: str
    """Where it stands."""
    cancelling: bool
    """It is to be cancelled; its tasks are being ended."""
    total: int
    """How many tasks it has."""
    open: int
    """Tasks that have not ended."""
    success: int
    """Tasks that returned."""
    failed: int
    """Tasks that failed."""
    cancelled: int
    """Tasks that were cancelled."""
    skipped: int
    """Tasks that never ran because of others."""
    created_at: datetime
    """When it was created."""
    started_at: datetime | None
    """When the scheduler began it."""
    ended_at: datetime | None
    """When its last task ended."""


@dataclass(frozen=True, kw_only=True)
class RunFilter:
    """Which runs to list; what is not given does not matter."""

    statuses: tuple[RunState, ...] = ()
    """Any of these states."""
    name: str | None = None
    """This name."""


_COLUMNS = """id, name, status, cancelling, total, open, success, failed, cancelled, skipped,
       created_at, started_at, ended_at"""

_LIST = f"""
SELECT {_COLUMNS} FROM orchestrator.runs
 WHERE (%(before)s::uuid IS NULL OR id < %(before)s::uuid)
   AND (%(statuses)s::text[] IS NULL OR status = ANY(%(statuses)s::text[]))
   AND (%(name)s::text IS NULL OR name = %(name)s::text)
 ORDER BY id DESC LIMIT %(limit)s
"""


def list_runs(
    connection: Connection, wanted: RunFilter, *, limit: int = 50, before: UUID | None = None
) -> list[RunView]:
    """Return the newest runs that match, newest first; `before` is the last id of the page before."""
    parameters = {
        "statuses": [str(state) for state in wanted.statuses] or None,
        "name": wanted.name,
        "before": before and before.hex,
        "limit": limit,
    }
    return [RunView(**row._asdict()) for row in connection.exec_driver_sql(_LIST, parameters)]


_SHOW = f"SELECT {_COLUMNS} FROM orchestrator.runs WHERE id = %(id)s::uuid"


def show_run(connection: Connection, run: UUID) -> RunView | None:
    """Return a run, or None if there is none of that id."""
    row = connection.exec_driver_sql(_SHOW, {"id": run.hex}).one_or_none()
    return RunView(**row._asdict()) if row else None
