"""Tasks, open and ended, in one list; and all that is known of a single one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.domain.states import ENDED_TASK_STATES, OPEN_TASK_STATES, TaskState
from orchestrator.domain.tasks.task import TaskError


@dataclass(frozen=True, kw_only=True)
class TaskView:
    """One line of a list of tasks."""

    id: UUID
    """Its id, which sorts by the time of its creation."""
    name: str
    """The task that it calls."""
    queue: str
    """The queue that it waits or waited in."""
    priority: int
    """Higher goes first."""
    status: str
    """Where it stands."""
    reason: str | None
    """Why it did not succeed, in a word or two."""
    hold: str | None
    """Why it is kept back: `unknown` to all live workers, or `crowded`: those who know it have their hands full."""
    blockers: int
    """Upstreams that it still waits for."""
    wake_at: datetime | None
    """Not before this time; for a task that is held, when it fails."""
    attempt: int
    """How often it was handed out."""
    failures: int
    """Failed attempts, as the retry policy counts them."""
    losses: int
    """Processes that it took down with it."""
    run_id: UUID | None
    """The run that it belongs to."""
    position: int | None
    """Its place among the tasks of its run."""
    worker: str | None
    """The worker that has or had its last attempt."""
    created_at: datetime
    """When it was enqueued."""
    started_at: datetime | None
    """When its last attempt began."""
    ended_at: datetime | None
    """When it ended."""


@dataclass(frozen=True, kw_only=True)
class ErrorView:
    """What went wrong in an attempt."""

    kind: str
    """The type of the exception."""
    message: str
    """Its text."""
    traceback: str
    """The remote traceback, or nothing."""
    data: dict[str, Any]
    """What the exception knew beside its text."""


@dataclass(frozen=True, kw_only=True)
class AttemptView:
    """One attempt of a task."""

    attempt: int
    """Its number, the fence."""
    outcome: str
    """`failed` or `lost` where another attempt followed; of the last attempt, the state of the task."""
    error: ErrorView | None
    """What went wrong."""
    worker: str | None
    """Who had it."""
    started_at: datetime | None
    """When it began; None if it never did, or nobody could say."""
    ended_at: datetime | None
    """When it ended; None while it is in flight."""


@dataclass(frozen=True, kw_only=True)
class TaskDetail(TaskView):
    """All that is known of one task."""

    payload: bytes
    """Its arguments, encoded."""
    options: Mapping[str, Any]
    """What differs from the default options."""
    result: bytes | None
    """What it returned, encoded."""
    error: ErrorView | None
    """How it failed."""
    attempts: tuple[AttemptView, ...]
    """Its attempts, oldest first. Messages that were lost or handed back cost a number and leave no line."""


@dataclass(frozen=True, kw_only=True)
class TaskFilter:
    """Which tasks to list; what is not given does not matter."""

    statuses: tuple[TaskState, ...] = ()
    """Any of these states."""
    queue: str | None = None
    """This queue."""
    name: str | None = None
    """This task name."""
    run: UUID | None = None
    """This run."""


_OPEN = """id, name, queue, priority, status, NULL::text AS reason, hold, blockers, wake_at, attempt, failures, losses,
           run_id, position, worker, created_at, started_at, NULL::timestamptz AS ended_at"""
_ENDED = """id, name, queue, priority, status, reason, NULL::text AS hold, 0 AS blockers, NULL::timestamptz AS wake_at,
            attempt, failures, losses, run_id, position, worker, created_at, started_at, ended_at"""
_VIEW = 18
"""How many columns these are."""

# Parameters arrive as literals, so the planner drops the conditions that are not asked for.
_MATCHES = """(%(statuses)s::text[] IS NULL OR status = ANY(%(statuses)s::text[]))
        AND (%(queue)s::text IS NULL OR queue = %(queue)s::text)
        AND (%(name)s::text IS NULL OR name = %(name)s::text)"""


def _listing(open_tasks: str, ended_tasks: str, key: str, last: str) -> str:
    """Return the statement that finds a page by a key that an index has, and shows it in the order of arrival."""
    matches = f"(%(before)s::uuid IS NULL OR {key} < {last}) AND {_MATCHES} ORDER BY {key} DESC LIMIT %(limit)s"
    return f"""
SELECT * FROM (
    SELECT * FROM (
        (SELECT {_OPEN}, seq FROM {open_tasks} WHERE %(open)s AND {matches})
         UNION ALL
        (SELECT {_ENDED}, seq FROM {ended_tasks} WHERE %(ended)s AND {matches})
    ) AS found ORDER BY {key} DESC LIMIT %(limit)s
) AS page ORDER BY seq DESC, id DESC
"""


def _of_run(table: str) -> str:
    # OFFSET 0 keeps the planner from walking the primary key through everything that is newer than the run.
    return f"(SELECT * FROM {table} WHERE run_id = %(run)s::uuid OFFSET 0) AS of_run"


_LIST = _listing("orchestrator.tasks", "orchestrator.ended_tasks", "id", "%(before)s::uuid")
# The ids of a run's tasks derive from its own, and say nothing about their order.
_LIST_OF_RUN = _listing(
    _of_run("orchestrator.tasks"),
    _of_run("orchestrator.ended_tasks"),
    "seq",
    """(SELECT seq FROM orchestrator.tasks WHERE id = %(before)s::uuid
         UNION ALL SELECT seq FROM orchestrator.ended_tasks WHERE id = %(before)s::uuid)""",
)


def list_tasks(
    connection: Connection, wanted: TaskFilter, *, limit: int = 50, before: UUID | None = None
) -> list[TaskView]:
    """Return the newest tasks that match, newest first; `before` is what `next_page` says of the page before.

    The tasks of a run stand among others where the run began.
    """
    states = wanted.statuses or tuple(TaskState)
    parameters = {
        "open": any(state in OPEN_TASK_STATES for state in states),
        "ended": any(state in ENDED_TASK_STATES for state in states),
        "statuses": [str(state) for state in wanted.statuses] or None,
        "queue": wanted.queue,
        "name": wanted.name,
        "run": wanted.run and wanted.run.hex,
        "before": before and before.hex,
        "limit": limit,
    }
    rows = connection.exec_driver_sql(_LIST_OF_RUN if wanted.run else _LIST, parameters)
    return [TaskView(**_columns(row)) for row in rows]


def next_page(wanted: TaskFilter, page: Sequence[TaskView]) -> UUID:
    """Return the id after which the page after this one begins."""
    return page[-1].id if wanted.run else min(task.id for task in page)


_SHOW = f"""
SELECT {_OPEN}, payload, options, NULL::bytea AS result, NULL::jsonb AS error
  FROM orchestrator.tasks WHERE id = %(id)s::uuid
 UNION ALL
SELECT {_ENDED}, payload, options, result, error
  FROM orchestrator.ended_tasks WHERE id = %(id)s::uuid
"""

_ATTEMPTS = """
SELECT attempt, outcome, error, worker, started_at, ended_at
  FROM orchestrator.attempts WHERE task_id = %(id)s::uuid ORDER BY attempt
"""


def show_task(connection: Connection, task: UUID) -> TaskDetail | None:
    """Return all that is known of a task, or None if there is none of that id."""
    row = connection.exec_driver_sql(_SHOW, {"id": task.hex}).one_or_none()
    if row is None:
        return None
    columns = _columns(row)
    payload, options, result, error = row[_VIEW:]
    return TaskDetail(
        **columns,
        payload=bytes(payload),
        options=options or {},
        result=None if result is None else bytes(result),
        error=error_view(error),
        attempts=(*_attempts(connection, task, columns, error_view(error)),),
    )


def _attempts(
    connection: Connection, task: UUID, columns: Mapping[str, Any], error: ErrorView | None
) -> list[AttemptView]:
    """Return the recorded attempts, and the one that is in flight or ended the task."""
    attempts = [
        AttemptView(
            attempt=row[0], outcome=row[1], error=error_view(row[2]), worker=row[3], started_at=row[4], ended_at=row[5]
        )
        for row in connection.exec_driver_sql(_ATTEMPTS, {"id": task.hex})
    ]
    recorded = {attempt.attempt for attempt in attempts}
    if columns["attempt"] not in recorded | {0} and columns["status"] != TaskState.PENDING:
        last = AttemptView(
            attempt=columns["attempt"],
            outcome=columns["status"],
            error=error,
            worker=columns["worker"],
            started_at=columns["started_at"],
            ended_at=columns["ended_at"],
        )
        attempts.append(last)
    return attempts


def _columns(row: Any) -> dict[str, Any]:
    return dict(zip(row._fields[:_VIEW], row[:_VIEW], strict=True))


def error_view(known: TaskError | Mapping[str, str] | None) -> ErrorView | None:
    """Return an error, maybe as it is stored, as it is shown."""
    error = known if isinstance(known, TaskError) else TaskError.stored(known)
    if error is None:
        return None
    return ErrorView(
        kind=error.kind,
        message=error.message,
        traceback=error.traceback,
        data=error.attributes,
    )
