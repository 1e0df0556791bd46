"""Whose something is: the queue and the workflow by which keys of the HTTP API are let near it, or not."""

from __future__ import annotations

from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.store.sql import Statement


class TaskOwner(NamedTuple):
    """What a task belongs to."""

    queue: str
    in_run: bool
    workflow: str | None
    """Of its run."""


class RunOwner(NamedTuple):
    """What a run belongs to."""

    workflow: str | None


_OF_TASK = Statement[TaskOwner]("""
SELECT /* insights.owners.task */ t.queue, t.run_id IS NOT NULL AS in_run, r.workflow
  FROM (SELECT queue, run_id FROM orchestrator.tasks WHERE id = %(id)s::uuid
         UNION ALL
        SELECT queue, run_id FROM orchestrator.ended_tasks WHERE id = %(id)s::uuid) AS t
  LEFT JOIN orchestrator.runs r ON r.id = t.run_id
""")
_OF_RUN = Statement[RunOwner](
    "SELECT /* insights.owners.run */ workflow FROM orchestrator.runs WHERE id = %(id)s::uuid"
)


def find_task_owner(connection: Connection, task: UUID) -> TaskOwner | None:
    """Return what a task belongs to, or None if there is none of that id."""
    return _OF_TASK.first(connection, id=task.hex)


def find_run_owner(connection: Connection, run: UUID) -> RunOwner | None:
    """Return what a run belongs to, or None if there is none of that id."""
    return _OF_RUN.first(connection, id=run.hex)
