"""Whose something is: the queue and the workflow by which keys of the HTTP API are let near it, or not."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.store.sql import Statement


class TaskOwner(NamedTuple):
    """What a task belongs to."""

    id: UUID
    queue: str
    in_run: bool
    workflow: str | None
    """Of its run."""


class RunOwner(NamedTuple):
    """What a run belongs to."""

    id: UUID
    workflow: str | None


_OF_TASKS = Statement[TaskOwner]("""
SELECT /* insights.owners.tasks */ t.id, t.queue, t.run_id IS NOT NULL AS in_run, r.workflow
  FROM (SELECT id, queue, run_id FROM orchestrator.tasks WHERE id = ANY(%(ids)s::uuid[])
         UNION ALL
        SELECT id, queue, run_id FROM orchestrator.ended_tasks WHERE id = ANY(%(ids)s::uuid[])) AS t
  LEFT JOIN orchestrator.runs r ON r.id = t.run_id
""")
_OF_RUNS = Statement[RunOwner](
    "SELECT /* insights.owners.runs */ id, workflow FROM orchestrator.runs WHERE id = ANY(%(ids)s::uuid[])"
)


def find_task_owners(connection: Connection, tasks: Collection[UUID]) -> dict[UUID, TaskOwner]:
    """Return what tasks belong to; those that are not there are left out."""
    return {found.id: found for found in _OF_TASKS(connection, ids=[task.bytes for task in tasks])}


def find_run_owners(connection: Connection, runs: Collection[UUID]) -> dict[UUID, RunOwner]:
    """Return what runs belong to; those that are not there are left out."""
    return {found.id: found for found in _OF_RUNS(connection, ids=[run.bytes for run in runs])}
