"""The last runs of workflows and flows."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.store.sql import Statement


class LastRun(NamedTuple):
    """One of the last runs of a workflow or a flow."""

    workflow: str
    id: UUID
    status: str
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None


# A range of one name, because of `workflow = name` Postgres concludes that ids alone give the order: then it may walk
# the primary key, past all newer runs of others.
_NEWEST_RUNS = Statement[LastRun]("""
SELECT /* insights.last_runs */ r.* FROM unnest(%(workflows)s::text[]) AS w(name)
 CROSS JOIN LATERAL (
       SELECT workflow, id, status, created_at, started_at, ended_at FROM orchestrator.runs
        WHERE workflow >= w.name AND workflow <= w.name ORDER BY workflow DESC, id DESC LIMIT %(limit)s) AS r
 ORDER BY r.id
""")


def last_runs(connection: Connection, workflows: Iterable[str], limit: int) -> dict[str, list[LastRun]]:
    """Return so many of the last runs of each workflow, the oldest of them first; in one walk along their index."""
    found: dict[str, list[LastRun]] = {name: [] for name in workflows}
    for run in _NEWEST_RUNS(connection, workflows=list(found), limit=limit) if found else ():
        found[run.workflow].append(run)
    return found
