"""Tasks, open and ended, in one list; and all that is known of a single one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.domain.states import ENDED_TASK_STATES, OPEN_TASK_STATES, TaskState
from orchestrator.domain.tasks.task import TaskError
from orchestrator.store.sql import Row, Statement


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
    """`failed`, `lost`, `postponed` or `returned` where another attempt followed; of the last one, the
    state of the task."""
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
    """Its attempts, oldest first. What was lost or handed back before it began costs a number, and leaves
    no line."""


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

    since: datetime | None = None
    """Ended at this time or later."""
    until: datetime | None = None
    """Ended before this time."""
    error: str | None = None
    """With this in the type or message of the error, in any case."""

    @property
    def by_end(self) -> bool:
        """It is about how and when tasks have ended, so open ones are none of it."""
        return (self.since, self.until, self.error) != (None, None, None)


_OPEN = """id, name, queue, priority, status, NULL::text AS reason, hold, blockers, wake_at, attempt, failures, losses,
           run_id, position, worker, created_at, started_at, NULL::timestamptz AS ended_at"""
_ENDED = """id, name, queue, priority, status, reason, NULL::text AS hold, 0 AS blockers, NULL::timestamptz AS wake_at,
            attempt, failures, losses, run_id, position, worker, created_at, started_at, ended_at"""

# Parameters arrive as literals, so the planner drops the conditions that are not asked for.
_MATCHES = """(%(statuses)s::text[] IS NULL OR status = ANY(%(statuses)s::text[]))
        AND (%(queue)s::text IS NULL OR queue = %(queue)s::text)
        AND (%(name)s::text IS NULL OR name = %(name)s::text)"""
_BY_TIME = """(%(since)s::timestamptz IS NULL OR ended_at >= %(since)s::timestamptz)
        AND (%(until)s::timestamptz IS NULL OR ended_at < %(until)s::timestamptz)"""
_BY_ERROR = """(%(error)s::text IS NULL
         OR strpos(lower((error->>'kind') || ': ' || (error->>'message')), lower(%(error)s::text)) > 0)"""

_LIST = Statement[Row](f"""
SELECT /* insights.tasks.list */ * FROM (
    SELECT * FROM (
        (SELECT {_OPEN}, seq FROM orchestrator.tasks
          WHERE %(open)s AND (%(before)s::uuid IS NULL OR id < %(before)s::uuid) AND {_MATCHES}
          ORDER BY id DESC LIMIT %(limit)s)
         UNION ALL
        (SELECT {_ENDED}, seq FROM orchestrator.ended_tasks
          WHERE %(ended)s AND (%(before)s::uuid IS NULL OR id < %(before)s::uuid) AND {_MATCHES}
          ORDER BY id DESC LIMIT %(limit)s)
    ) AS found ORDER BY id DESC LIMIT %(limit)s
) AS page ORDER BY seq DESC, id DESC
""")

# OFFSET 0 keeps the planner from walking the primary key through everything that is newer than the run.
_OF_RUN = "(SELECT * FROM {} WHERE run_id = %(run)s::uuid OFFSET 0) AS of_run"
_PAST = """(%(before)s::uuid IS NULL OR seq >
           (SELECT seq FROM orchestrator.tasks WHERE id = %(before)s::uuid
             UNION ALL SELECT seq FROM orchestrator.ended_tasks WHERE id = %(before)s::uuid))"""
# The ids of a run's tasks derive from its own, and say nothing about their order.
_LIST_OF_RUN = Statement[Row](f"""
SELECT /* insights.tasks.list_of_run */ * FROM (
    (SELECT {_OPEN}, seq FROM {_OF_RUN.format("orchestrator.tasks")}
      WHERE %(open)s AND {_PAST} AND {_MATCHES} ORDER BY seq LIMIT %(limit)s)
     UNION ALL
    (SELECT {_ENDED}, seq FROM {_OF_RUN.format("orchestrator.ended_tasks")}
      WHERE %(ended)s AND {_PAST} AND {_MATCHES} AND {_BY_TIME} AND {_BY_ERROR} ORDER BY seq LIMIT %(limit)s)
) AS found ORDER BY seq LIMIT %(limit)s
""")

MOST_LOOKED_AT = 100_000
"""Of tasks that have ended, so many are looked at for one page of those that match."""
# In the order of their ends, which both indexes have; the one of what did not succeed is much shorter.
_LOOKED_AT = f"""
SELECT * FROM orchestrator.ended_tasks
 WHERE (%(success)s OR status <> 'success') AND {_BY_TIME}
   AND (%(before)s::uuid IS NULL
        OR (ended_at, id) < (SELECT ended_at, id FROM orchestrator.ended_tasks WHERE id = %(before)s::uuid))
 ORDER BY ended_at DESC, id DESC LIMIT {MOST_LOOKED_AT}
"""
_LIST_BY_END = Statement[Row](f"""
SELECT /* insights.tasks.list_by_end */ {_ENDED} FROM ({_LOOKED_AT}) AS looked_at WHERE {_MATCHES} AND {_BY_ERROR}
 ORDER BY ended_at DESC, id DESC LIMIT %(limit)s
""")
_COUNT_LOOKED_AT = Statement[int](f"SELECT /* insights.tasks.looked_at */ count(*) FROM ({_LOOKED_AT}) AS looked_at")


def list_tasks(
    connection: Connection,
    wanted: TaskFilter,
    *,
    limit: int = 50,
    before: UUID | None = None,
) -> list[TaskView]:
    """Return tasks that match: the newest, newest first; by their ends, those that ended last; of a run, its first.

    `before` is what `next_page` says of the page before. The tasks of a run stand among others where the run began.
    """
    statement = _LIST_OF_RUN if wanted.run else _LIST_BY_END if wanted.by_end else _LIST
    return [TaskView(**_columns(row)) for row in statement(connection, _parameters(wanted, limit, before))]


def looked_at_all(connection: Connection, wanted: TaskFilter, before: UUID | None = None) -> bool:
    """Say whether a list by the ends of tasks goes back as far as there are any, or gave up before."""
    return _COUNT_LOOKED_AT.one(connection, _parameters(wanted, 1, before)) < MOST_LOOKED_AT


def _parameters(wanted: TaskFilter, limit: int, before: UUID | None) -> dict[str, object]:
    states = wanted.statuses or tuple(TaskState)
    return {
        "open": not wanted.by_end and any(state in OPEN_TASK_STATES for state in states),
        "ended": any(state in ENDED_TASK_STATES for state in states),
        "success": wanted.error is None and TaskState.SUCCESS in states,
        "statuses": [str(state) for state in wanted.statuses] or None,
        "queue": wanted.queue,
        "name": wanted.name,
        "run": wanted.run and wanted.run.hex,
        "since": wanted.since,
        "until": wanted.until,
        "error": wanted.error,
        "before": before and before.hex,
        "limit": limit,
    }


def next_page(wanted: TaskFilter, page: Sequence[TaskView]) -> UUID:
    """Return the id with which the page after this one goes on."""
    return page[-1].id if wanted.run or wanted.by_end else min(task.id for task in page)


_SHOW = Statement[Row](f"""
SELECT /* insights.tasks.show */ {_OPEN}, payload, options, NULL::bytea AS result, NULL::jsonb AS error
  FROM orchestrator.tasks WHERE id = %(id)s::uuid
 UNION ALL
SELECT {_ENDED}, payload, options, result, error
  FROM orchestrator.ended_tasks WHERE id = %(id)s::uuid
""")

_ATTEMPTS = Statement[Row]("""
SELECT /* insights.tasks.attempts */ attempt, outcome, error, worker, started_at, ended_at
  FROM orchestrator.attempts WHERE task_id = %(id)s::uuid ORDER BY attempt
""")


def show_task(connection: Connection, task: UUID) -> TaskDetail | None:
    """Return all that is known of a task, or None if there is none of that id."""
    row = _SHOW.first(connection, id=task.hex)
    if row is None:
        return None
    error = error_view(row.error)
    return TaskDetail(
        **_columns(row),
        payload=bytes(row.payload),
        options=row.options or {},
        result=None if row.result is None else bytes(row.result),
        error=error,
        attempts=(*_attempts(connection, row, error),),
    )


def _attempts(connection: Connection, task: Row, error: ErrorView | None) -> list[AttemptView]:
    """Return the recorded attempts, and the one that is in flight or ended the task."""
    attempts = [
        AttemptView(**row._asdict() | {"error": error_view(row.error)}) for row in _ATTEMPTS(connection, id=task.id.hex)
    ]
    recorded = {attempt.attempt for attempt in attempts}
    if task.attempt not in recorded | {0} and task.status != TaskState.PENDING:
        last = AttemptView(
            attempt=task.attempt,
            outcome=task.status,
            error=error,
            worker=task.worker,
            started_at=task.started_at,
            ended_at=task.ended_at,
        )
        attempts.append(last)
    return attempts


def _columns(row: Row) -> dict[str, Any]:
    return {field.name: getattr(row, field.name) for field in fields(TaskView)}


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
