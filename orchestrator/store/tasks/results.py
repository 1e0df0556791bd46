"""Results of tasks and runs, for clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Connection, Engine

from orchestrator.domain.runs import RunCounters
from orchestrator.domain.states import TaskState
from orchestrator.domain.tasks.task import TaskError
from orchestrator.store.sql import Row, Statement
from orchestrator.store.tasks.redrive import IS_ASKED_FOR

_RETRIABLE = (TaskState.FAILED, TaskState.SKIPPED)
"""Ends that a retry may replace."""


class TaskOutcome(NamedTuple):
    """The state of a task and, once it has ended, its result or error."""

    status: str
    result: bytes | None = None
    error: TaskError | None = None


_NAME = Statement[str]("SELECT /* results.name */ name FROM orchestrator.ended_tasks WHERE id = %(id)s::uuid")


def name_of(connection: Connection, task: bytes) -> str:
    """Return the name of an ended task."""
    return _NAME.first(connection, id=task) or "task"


# Both halves of the UNION use one snapshot, so a task that is moving is found exactly once.
_STATES = Statement[Row]("""
SELECT /* results.states */ id, status, result, error FROM orchestrator.ended_tasks WHERE id = ANY (%(ids)s::uuid[])
 UNION ALL
SELECT id, status, NULL, NULL FROM orchestrator.tasks WHERE id = ANY (%(ids)s::uuid[])
""")

# For its caller, a task with a retry request (for itself, its run or a group of tasks) has not ended, although the
# leader has not applied the request yet.
_OUTCOMES = Statement[Row](f"""
WITH /* results.outcomes */ requests AS MATERIALIZED (
    SELECT kind, target, body, created_at FROM orchestrator.inbox WHERE kind IN ('retry task', 'retry run', 'redrive')
)
SELECT id, CASE WHEN status IN ('failed', 'skipped') AND EXISTS (
           SELECT FROM requests r
            WHERE (r.kind = 'retry task' AND r.target = e.id) OR (r.kind = 'retry run' AND r.target = e.run_id)
               OR (r.kind = 'redrive' AND {IS_ASKED_FOR}))
       THEN 'pending' ELSE status END AS status, result, error
  FROM orchestrator.ended_tasks e WHERE id = ANY (%(ids)s::uuid[])
 UNION ALL
SELECT id, status, NULL, NULL FROM orchestrator.tasks WHERE id = ANY (%(ids)s::uuid[])
""")


def outcomes(connection: Connection, tasks: Sequence[bytes]) -> dict[bytes, TaskOutcome]:
    """Return the outcomes of the tasks that exist."""
    return {row.id.bytes: _outcome(row) for row in _OUTCOMES(connection, ids=tasks)}


def outcomes_alone(engine: Engine, tasks: Sequence[bytes]) -> dict[bytes, TaskOutcome]:
    """Return the outcomes of the tasks that exist, for the first check of a wait: only failures need the slower query.

    The engine must be in autocommit mode.
    """
    rows = _STATES.run_on_engine(engine, ids=tasks)
    outcomes = {row.id.bytes: _outcome(row) for row in rows}
    if failed := [task for task, ended in outcomes.items() if ended.status in _RETRIABLE]:
        outcomes |= {row.id.bytes: _outcome(row) for row in _OUTCOMES.run_on_engine(engine, ids=failed)}
    return outcomes


def _outcome(row: Row) -> TaskOutcome:
    return TaskOutcome(row.status, None if row.result is None else bytes(row.result), TaskError.stored(row.error))


@Statement.function(
    "SELECT /* results.has_ended */ EXISTS (SELECT FROM orchestrator.ended_tasks WHERE id = ANY (%(tasks)s::uuid[]))"
)
def has_ended(connection: Connection, tasks: Sequence[bytes]) -> bool:
    """Return whether any of these tasks has ended."""


_NAMED = Statement[tuple[UUID, str, str]]("""
SELECT /* results.named */ id, name, queue FROM orchestrator.ended_tasks WHERE id = ANY (%(ids)s::uuid[])
 UNION ALL
SELECT id, name, queue FROM orchestrator.tasks WHERE id = ANY (%(ids)s::uuid[])
""")


def named(connection: Connection, tasks: Sequence[bytes]) -> dict[bytes, tuple[str, str]]:
    """Return name and queue of the tasks that exist."""
    return {id.bytes: (name, queue) for id, name, queue in _NAMED(connection, ids=tasks)}


# A run counts as open as soon as its retry, or a retry of one of its tasks, is requested.
_STATUS = """
       CASE WHEN EXISTS (SELECT FROM orchestrator.inbox i WHERE i.target = r.id AND i.kind = 'retry run')
              OR (r.status = 'failed' AND EXISTS (
                     SELECT FROM orchestrator.inbox i JOIN orchestrator.ended_tasks e ON e.id = i.target
                      WHERE i.kind = 'retry task' AND e.run_id = r.id))
            THEN 'running' ELSE r.status END AS status"""
_PROGRESS = Statement[Row](f"""
SELECT /* results.progress */ {_STATUS}, total, open, success, failed, cancelled, skipped
  FROM orchestrator.runs r WHERE id = %(id)s::uuid
""")


def progress(connection: Connection, run: bytes) -> tuple[str, RunCounters] | None:
    """Return a run's state and counters; None if the run does not exist."""
    row = _PROGRESS.first(connection, id=run)
    if row is None:
        return None
    columns = row._asdict()
    return columns.pop("status"), RunCounters(**columns)


_RUN_STATES = Statement[tuple[UUID, str]](f"""
SELECT /* results.run_states */ r.id, {_STATUS}
  FROM orchestrator.runs r WHERE r.id = ANY (%(ids)s::uuid[])
""")


def run_states(connection: Connection, runs: Sequence[bytes]) -> dict[bytes, str]:
    """Return the states of the runs that exist."""
    return {run.bytes: state for run, state in _RUN_STATES(connection, ids=runs)}


class EndedAt(NamedTuple):
    """The end of a task of a run, with its position in the run."""

    position: int
    id: bytes
    status: str
    result: bytes | None
    error: TaskError | None


_RESULTS = Statement[Row]("""
SELECT /* results.of_run */ position, id, status, result, error FROM orchestrator.ended_tasks
 WHERE run_id = %(id)s::uuid AND step IS NULL AND position > %(after)s ORDER BY position LIMIT %(limit)s
""")


def run_results(connection: Connection, run: bytes, after: int, limit: int) -> list[EndedAt]:
    """Return the ends of `limit` tasks of a run after a position, in order."""
    rows = _RESULTS(connection, id=run, after=after, limit=limit)
    return [EndedAt(row.position, row.id.bytes, *_outcome(row)) for row in rows]
