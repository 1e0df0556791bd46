"""One question over everything: what has an id that begins so, or this in its name, its tags, or its error.

It answers at once, and so looks only at as much as one page of a list does; the lists go on from there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.store.insights import ids
from orchestrator.store.insights.ids import IdMatch
from orchestrator.store.insights.runs import RunFilter, RunView, page_of_runs
from orchestrator.store.insights.tasks import TaskFilter, TaskView, page_of_tasks

_ID = re.compile(r"[0-9a-f]{4,32}")


@dataclass(frozen=True, kw_only=True)
class Found:
    """What matches, newest first, a few of each kind."""

    tasks_by_id: list[IdMatch]
    """Tasks whose id begins so."""
    runs_by_id: list[IdMatch]
    """Runs whose id begins so."""
    tasks: list[TaskView]
    """Tasks whose names have this in them."""
    runs: list[RunView]
    """Runs whose workflows have this in their names, or with this tag."""
    failures: list[TaskView]
    """Tasks that failed with this text in their error."""


def search(connection: Connection, text: str, limit: int, *, queues: str = "", workflows: str = "") -> Found:
    """Return what matches a text in any of the ways in which people remember something, among what is recent.

    Tasks are of queues, and runs of workflows, whose names begin so.
    """
    digits = text.lower().replace("-", "")
    is_id = _ID.fullmatch(digits) is not None
    by_workflow = page_of_runs(connection, RunFilter(workflow=text, within=workflows), limit=limit).runs
    by_tag = page_of_runs(connection, RunFilter(tags=(text,), within=workflows), limit=limit).runs
    by_part = page_of_runs(connection, RunFilter(part=text, within=workflows), limit=limit).runs
    runs = {run.id: run for run in (*by_workflow, *by_tag, *by_part)}
    return Found(
        tasks_by_id=ids.begin_with(connection, "task", digits, limit, queues) if is_id else [],
        runs_by_id=ids.begin_with(connection, "run", digits, limit, workflows) if is_id else [],
        tasks=page_of_tasks(connection, TaskFilter(part=text, within=queues), limit=limit).tasks,
        runs=sorted(runs.values(), key=_newest, reverse=True)[:limit],
        failures=page_of_tasks(connection, TaskFilter(error=text, within=queues), limit=limit).tasks,
    )


def _newest(run: RunView) -> tuple[object, UUID]:
    return run.created_at, run.id
