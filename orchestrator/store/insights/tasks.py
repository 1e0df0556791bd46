"""Tasks, open and ended, in one list; and all data of a single task."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Literal, NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.flow.definition import name_of
from orchestrator.domain.states import ENDED_TASK_STATES, IN_FLIGHT_STATES, OPEN_TASK_STATES, TaskState
from orchestrator.sealing import CALL, reveal
from orchestrator.store.insights.arguments import NONE, Needles, in_data
from orchestrator.store.insights.attempts import AttemptView, ErrorView, attempts_of, error_view
from orchestrator.store.insights.obstacles import waits_for
from orchestrator.store.sql import Row, Statement, columns_of
from orchestrator.store.tables.tasks import PARKED
from orchestrator.store.tasks.redrive import is_kind


@dataclass(frozen=True, kw_only=True)
class TaskView:
    """One task in a list."""

    id: UUID
    """The id of the task; ids sort by the time of creation."""
    name: str
    """The name of the task."""
    queue: str
    """The queue of the task."""
    priority: int
    """Tasks with a higher priority start first."""
    status: str
    """The state."""
    reason: str | None
    """The reason for an unsuccessful end, in a word or two."""
    hold: str | None
    """Why the task is held: `unknown` to all live workers, `no data key: ID`, `no executor: NAME`, or `crowded`."""
    blockers: int
    """Tasks that must end first."""
    wake_at: datetime | None
    """The earliest start; for a held task, when it fails."""
    attempt: int
    """The number of times the task was dispatched."""
    failures: int
    """Failed attempts, as the retry policy counts them."""
    losses: int
    """Processes that died because of the task."""
    run_id: UUID | None
    """The run of the task."""
    position: int | None
    """The position among the tasks of the run."""
    worker: str | None
    """The worker that has or had the last attempt; None while the task waits for another attempt."""
    created_at: datetime
    """When the task was enqueued."""
    started_at: datetime | None
    """When the last attempt began."""
    ended_at: datetime | None
    """When the task ended."""
    step: str | None = None
    """The step or node of the run."""


@dataclass(frozen=True, kw_only=True)
class TaskDetail(TaskView):
    """One task in full."""

    payload: bytes
    """The encoded arguments."""
    options: Mapping[str, Any]
    """Options that differ from the defaults."""
    result: bytes | None
    """The encoded result."""
    error: ErrorView | None
    """The error of a failed task."""
    attempts: tuple[AttemptView, ...]
    """Attempts, oldest first. An attempt that was lost or returned before it began has a number but no record."""
    parent_id: UUID | None = None
    """The task that enqueued this one while it ran, or that this one follows."""
    lane: str | None = None
    """The lane, whose tasks share limits and take turns: `task|key`."""
    waits_for: str | None = None
    """Why the task waits, for people: a limit and its holders, a paused queue, no worker, dependencies."""


class TaskFilter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Conditions on tasks. A condition that is None matches every task."""

    statuses: tuple[TaskState, ...] = ()
    """Any of these states."""
    queue: str | None = None
    """The queue."""
    name: str | None = None
    """The name of the task."""
    run: UUID | None = None
    """The run."""
    within: str = ""
    """A prefix of the queue's name."""
    since: datetime | None = None
    """Ended at this time or later."""
    until: datetime | None = None
    """Ended before this time."""
    error: str | None = None
    """A part of the error's type or message; case is ignored."""
    kind: str | None = None
    """The error's exact type, or the id of a failure group."""
    part: str | None = None
    """A part of the name of the task or its step; case is ignored."""
    release: str | None = None
    """The application release of the worker with the last attempt."""

    @property
    def by_end(self) -> bool:
        """Whether the filter is about ends, which excludes open tasks, or only about unsuccessful tasks."""
        if (self.since, self.until, self.error, self.kind) != (None,) * 4:
            return True
        return bool(self.statuses) and {*self.statuses} <= {*ENDED_TASK_STATES} - {TaskState.SUCCESS}


_NOT_OPEN = {"hold": "NULL::text", "blockers": "0", "wake_at": "NULL::timestamptz"}
_NOT_ENDED = {"reason": "NULL::text", "ended_at": "NULL::timestamptz"}
_OPEN = columns_of(TaskView, **_NOT_ENDED)
_ENDED = columns_of(TaskView, **_NOT_OPEN)

# Parameters arrive as literals, so the planner drops unused conditions.
_MATCHES = f"""(%(statuses)s::text[] IS NULL OR status = ANY(%(statuses)s::text[]))
        AND (%(queue)s::text IS NULL OR queue = %(queue)s::text)
        AND (%(name)s::text IS NULL OR name = %(name)s::text)
        AND (%(part)s::text IS NULL OR strpos(lower(name), lower(%(part)s::text)) > 0
             OR strpos(lower(step), lower(%(part)s::text)) > 0)
        AND (%(within)s::text = '' OR starts_with(queue, %(within)s::text))
        AND (%(release)s::text IS NULL OR worker IN (
             SELECT r.worker FROM orchestrator.worker_releases AS r WHERE r.release = %(release)s::text))
        AND {in_data("payload")}"""
_BY_TIME = """(%(since)s::timestamptz IS NULL OR ended_at >= %(since)s::timestamptz)
        AND (%(until)s::timestamptz IS NULL OR ended_at < %(until)s::timestamptz)"""


def _by_error(task: str) -> str:
    return f"""(%(error)s::text IS NULL
         OR strpos(lower((error->>'kind') || ': ' || (error->>'message')), lower(%(error)s::text)) > 0)
        AND (%(kind)s::text IS NULL OR (status = 'failed' AND {is_kind("%(kind)s::text", task)}))"""


# Matching tasks may be rare: each page scans a bounded number of rows of each table, and the next page continues there.
MAX_SCANNED = 10_000
"""Rows of a table that are scanned for one page."""
MAX_LIST_SECONDS = 1.0
"""Seconds for which a list reads further pages until it is full."""
MAX_ENDS_SCANNED = 2_000
"""Rows scanned in the order of ends: failed tasks are spread over the table, and each row may cost a page read."""
_BEFORE = "(%(before)s::uuid IS NULL OR id < %(before)s::uuid)"
_HORIZON = Statement[UUID](f"""
SELECT /* insights.tasks.horizon */ id FROM (
    (SELECT id FROM orchestrator.tasks WHERE %(open)s AND {_BEFORE} ORDER BY id DESC OFFSET %(most)s LIMIT 1)
     UNION ALL
    (SELECT id FROM orchestrator.ended_tasks WHERE %(ended)s AND {_BEFORE} ORDER BY id DESC OFFSET %(most)s LIMIT 1)
) AS last ORDER BY id DESC LIMIT 1
""")
_IN_PAGE = f"{_BEFORE} AND (%(horizon)s::uuid IS NULL OR id >= %(horizon)s::uuid)"
_LIST = Statement[Row](f"""
SELECT /* insights.tasks.list */ * FROM (
    SELECT * FROM (
        (SELECT {_OPEN}, seq FROM orchestrator.tasks
          WHERE %(open)s AND {_IN_PAGE} AND {_MATCHES} AND NOT {PARKED}
          ORDER BY id DESC LIMIT %(limit)s)
         UNION ALL
        (SELECT {_ENDED}, seq FROM orchestrator.ended_tasks
          WHERE %(ended)s AND {_IN_PAGE} AND {_MATCHES}
          ORDER BY id DESC LIMIT %(limit)s)
    ) AS found ORDER BY id DESC LIMIT %(limit)s
) AS page ORDER BY seq DESC, id DESC
""")

# OFFSET 0 keeps the planner from scanning the primary key through everything newer than the run.
_OF_RUN = "(SELECT * FROM {} WHERE run_id = %(run)s::uuid OFFSET 0) AS of_run"
TaskSort = Literal["-when", "when", "-ended", "ended"]
"""By the time tasks were enqueued or ended; with a minus, latest first."""


def _list_of_run(sort: TaskSort, open_key: str, ended_key: str) -> Statement[Row]:
    """Return the statement that lists a run's tasks in an order: every page sorts all of them."""
    beyond, direction = ("<", "DESC") if sort.startswith("-") else (">", "ASC")
    last = f"""SELECT {open_key}, id FROM orchestrator.tasks WHERE id = %(before)s::uuid
             UNION ALL SELECT {ended_key}, id FROM orchestrator.ended_tasks WHERE id = %(before)s::uuid"""
    past = f"(%(before)s::uuid IS NULL OR ({{}}, id) {beyond} ({last}))"
    order = f"key {direction}, id {direction} LIMIT %(limit)s"
    return Statement[Row](f"""
SELECT /* insights.tasks.list_of_run_{sort.replace("-", "last_")} */ * FROM (
    (SELECT {_OPEN}, seq, {open_key} AS key FROM {_OF_RUN.format("orchestrator.tasks")}
      WHERE %(open)s AND {past.format(open_key)} AND {_MATCHES} ORDER BY {order})
     UNION ALL
    (SELECT {_ENDED}, seq, {ended_key} FROM {_OF_RUN.format("orchestrator.ended_tasks")}
      WHERE %(ended)s AND {past.format(ended_key)} AND {_MATCHES} AND {_BY_TIME} AND {_by_error("of_run")}
      ORDER BY {order.replace("key", ended_key)})
) AS found ORDER BY {order}
""")


# The ids of a run's tasks derive from the run's id and have no order. Open tasks sort as ending last.
_LIST_OF_RUN: dict[TaskSort, Statement[Row]] = {
    "when": _list_of_run("when", "seq", "seq"),
    "-when": _list_of_run("-when", "seq", "seq"),
    "ended": _list_of_run("ended", "'infinity'::timestamptz", "ended_at"),
    "-ended": _list_of_run("-ended", "'infinity'::timestamptz", "ended_at"),
}

# In the order of ends, which both indexes have; the index of unsuccessful tasks is much shorter.
_SCANNED = f"""
SELECT * FROM orchestrator.ended_tasks
 WHERE (%(success)s OR status <> 'success') AND {_BY_TIME}
   AND (%(before)s::uuid IS NULL
        OR (ended_at, id) < (SELECT ended_at, id FROM orchestrator.ended_tasks WHERE id = %(before)s::uuid))
 ORDER BY ended_at DESC, id DESC LIMIT %(most)s
"""
_LIST_BY_END = Statement[Row](f"""
SELECT /* insights.tasks.list_by_end */ {_ENDED} FROM ({_SCANNED}) AS looked_at
 WHERE {_MATCHES} AND {_by_error("looked_at")}
 ORDER BY ended_at DESC, id DESC LIMIT %(limit)s
""")
_LAST_SCANNED = Statement[UUID](f"""
SELECT /* insights.tasks.last_looked_at */ id FROM ({_SCANNED}) AS looked_at
 ORDER BY ended_at DESC, id DESC OFFSET %(most)s - 1 LIMIT 1
""")


_OLDEST = {statement: statement.oldest_first() for statement in (_HORIZON, _LIST, _LIST_BY_END, _LAST_SCANNED)}


class TaskPage(NamedTuple):
    """A page of the matching tasks."""

    tasks: list[TaskView]
    next: UUID | None
    """The `before` of the next page; None on the last page."""


def page_of_tasks(
    connection: Connection,
    wanted: TaskFilter,
    *,
    limit: int,
    before: UUID | None = None,
    oldest: bool = False,
    needles: Needles = NONE,
    run_sort: TaskSort = "when",
) -> TaskPage:
    """Return matching tasks: the newest first; by ends, the last ended first; of a run, its first.

    `oldest` reverses the order, except for a run, which has `run_sort`. With `needles`, return only tasks whose
    arguments may contain the value.

    The time per page is bounded: a page scans a bounded number of rows, so it may have few tasks or none without being
    the last. In lists over several runs, a run's tasks are at the position of the run's start. Turn tasks of waiting
    code are listed only with their run.
    """
    parameters = _parameters(wanted, limit, before, needles)
    in_order = _OLDEST if oldest and not wanted.run else {}
    horizon = None
    if wanted.run or wanted.by_end:
        statement = _LIST_OF_RUN[run_sort] if wanted.run else _LIST_BY_END
    else:
        statement = _LIST
        if needles.data or not _has_index(wanted):
            horizon = in_order.get(_HORIZON, _HORIZON).first(connection, parameters)
    rows = in_order.get(statement, statement)(connection, parameters, horizon=horizon and horizon.hex)
    tasks = [TaskView(**_columns(row)) for row in rows]
    if len(tasks) == limit:
        if wanted.run or wanted.by_end:
            return TaskPage(tasks, tasks[-1].id)
        return TaskPage(tasks, (max if in_order else min)(task.id for task in tasks))
    if wanted.by_end and not wanted.run:
        horizon = in_order.get(_LAST_SCANNED, _LAST_SCANNED).first(connection, parameters)
    return TaskPage(tasks, horizon)


def _has_index(wanted: TaskFilter) -> bool:
    """Return whether an index finds the tasks, so that a page may scan all rows."""
    return bool(wanted.statuses) and {*wanted.statuses} <= {*IN_FLIGHT_STATES}


def list_tasks(
    connection: Connection,
    wanted: TaskFilter,
    *,
    limit: int = 50,
    before: UUID | None = None,
    oldest: bool = False,
    run_sort: TaskSort = "when",
) -> TaskPage:
    """Return up to `limit` matching tasks, reading pages for up to a second."""
    tasks: list[TaskView] = []
    last = time.monotonic() + MAX_LIST_SECONDS
    while True:
        limits: Any = {"limit": limit - len(tasks), "before": before, "oldest": oldest, "run_sort": run_sort}
        page = page_of_tasks(connection, wanted, **limits)
        tasks += page.tasks
        before = page.next
        if before is None or len(tasks) == limit or time.monotonic() >= last:
            return TaskPage(tasks, before)


def _parameters(wanted: TaskFilter, limit: int, before: UUID | None, needles: Needles = NONE) -> dict[str, object]:
    states = wanted.statuses or tuple(TaskState)
    return {
        "open": not wanted.by_end and any(state in OPEN_TASK_STATES for state in states),
        "ended": any(state in ENDED_TASK_STATES for state in states),
        "success": (wanted.error, wanted.kind) == (None, None) and TaskState.SUCCESS in states,
        "statuses": [str(state) for state in wanted.statuses] or None,
        "queue": wanted.queue,
        "name": wanted.name,
        "run": wanted.run and wanted.run.hex,
        "within": wanted.within,
        "since": wanted.since,
        "until": wanted.until,
        "error": wanted.error,
        "kind": wanted.kind,
        "part": wanted.part,
        "release": wanted.release,
        "before": before and before.hex,
        "limit": limit,
        "most": MAX_ENDS_SCANNED if wanted.by_end else MAX_SCANNED,
        **needles.parameters,
    }


_FIND = Statement[Row](f"""
SELECT /* insights.tasks.find */ {_OPEN} FROM orchestrator.tasks WHERE id = ANY(%(ids)s::uuid[])
 UNION ALL
SELECT {_ENDED} FROM orchestrator.ended_tasks WHERE id = ANY(%(ids)s::uuid[])
""")


def find_tasks(connection: Connection, ids: Sequence[bytes]) -> list[TaskView]:
    """Return the tasks that exist."""
    return [TaskView(**_columns(row)) for row in _FIND(connection, ids=ids)]


_BESIDE = ("attempts", "waits_for")
_NO_RESULT = {"result": "NULL::bytea", "error": "NULL::jsonb"}
_SHOW = Statement[Row](f"""
SELECT /* insights.tasks.show */ {columns_of(TaskDetail, but=_BESIDE, **_NOT_ENDED, **_NO_RESULT)}
  FROM orchestrator.tasks WHERE id = %(id)s::uuid
 UNION ALL
SELECT {columns_of(TaskDetail, but=_BESIDE, **_NOT_OPEN)}
  FROM orchestrator.ended_tasks WHERE id = %(id)s::uuid
""")


def show_task(connection: Connection, task: UUID) -> TaskDetail | None:
    """Return all data of a task; None if it does not exist."""
    row = _SHOW.first(connection, id=task.hex)
    if row is None:
        return None
    error = error_view(row.error)
    return TaskDetail(
        **_columns(row),
        payload=reveal(bytes(row.payload), CALL),
        options=row.options or {},
        result=None if row.result is None else reveal(bytes(row.result)),
        error=error,
        attempts=(*attempts_of(connection, row, error),),
        parent_id=row.parent_id,
        lane=row.lane,
        waits_for=waits_for(connection, task) if row.status == TaskState.PENDING else None,
    )


def _columns(row: Row) -> dict[str, Any]:
    values = {field.name: getattr(row, field.name) for field in fields(TaskView)}
    return {**values, "step": name_of(row.step)}
