"""What enqueued a task or started a run, and what a task enqueued.

A task knows what enqueued it. The ids of what it enqueued follow from its own, from the attempt, and from how much that
attempt had enqueued before, so they are looked for one by one in the primary keys, and nothing has to be kept for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.domain.dag.composed import PREFIX
from orchestrator.domain.ids import derived_id
from orchestrator.store.sql import Statement
from orchestrator.store.tables.tasks import DELAYED

MOST_ATTEMPTS = 3
"""The last attempts of a task that are looked at."""
MOST_CALLS = 300
"""What each of them enqueued first."""
_MOST_FOLLOWERS = 10


@dataclass(frozen=True, kw_only=True)
class Relative:
    """A task or a run that came of a task, or that a task came of."""

    id: UUID
    """Its id."""
    kind: str
    """`task` or `run`."""
    name: str
    """Of a run, that of its workflow; a composition has a name of its own."""
    queue: str | None
    """Of a task."""
    workflow: str | None
    """Of a run."""
    status: str
    """Where it stands."""
    created_at: datetime
    """When it was enqueued or started."""
    ended_at: datetime | None
    """When it ended."""
    due: datetime | None = None
    """Of a task that waits for its time, that time."""


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """What enqueued a task, and what it enqueued."""

    parent: Relative | None
    """None if no task did, or if it is no longer kept."""
    children: list[Relative]
    """In the order in which they were enqueued; those of a run that it started stand in that."""
    is_part: bool
    """It may have enqueued more: only so many are looked for."""


_FIND = Statement[Relative](f"""
SELECT /* insights.lineage.find */ id, 'task' AS kind, name, queue, NULL AS workflow, status, created_at,
       NULL::timestamptz AS ended_at, CASE WHEN {DELAYED} THEN wake_at END AS due
  FROM orchestrator.tasks WHERE id = ANY(%(ids)s::uuid[]) AND (%(in_runs)s OR run_id IS NULL)
 UNION ALL
SELECT id, 'task', name, queue, NULL, status, created_at, ended_at, NULL
  FROM orchestrator.ended_tasks WHERE id = ANY(%(ids)s::uuid[]) AND (%(in_runs)s OR run_id IS NULL)
 UNION ALL
SELECT id, 'run', CASE WHEN starts_with(workflow, '{PREFIX}') THEN name ELSE coalesce(workflow, name) END, NULL,
       workflow, status, created_at, ended_at, NULL
  FROM orchestrator.runs WHERE id = ANY(%(ids)s::uuid[]) AND NOT %(in_runs)s
""")


def find_relative(connection: Connection, task: UUID) -> Relative | None:
    """Return a task that something came of; None if it is no longer kept."""
    return _FIND.first(connection, ids=[task.bytes], in_runs=True)


def lineage(connection: Connection, task: UUID, parent: UUID | None, attempts: Sequence[int]) -> Lineage:
    """Return what enqueued a task, and what its attempts with these numbers enqueued."""
    found = None if parent is None else find_relative(connection, parent)
    last = sorted(attempts)[-MOST_ATTEMPTS:]
    ids = [id for attempt in last for id in _ids(task.bytes, attempt)]
    children = {child.id.bytes: child for child in _FIND(connection, ids=ids, in_runs=False)} if ids else {}
    full = any(derived_id(task.bytes, attempt, MOST_CALLS) in children for attempt in last)
    ordered = [children[id] for id in ids if id in children]
    return Lineage(parent=found, children=ordered, is_part=full or len(attempts) > len(last))


def _ids(task: bytes, attempt: int) -> list[bytes]:
    """Return the ids that what an attempt enqueued first has, and what followed its end."""
    enqueued = [derived_id(task, attempt, number) for number in range(1, MOST_CALLS + 1)]
    ends = [derived_id(task, attempt, end, place) for end in ("success", "failure") for place in range(_MOST_FOLLOWERS)]
    return enqueued + ends
