"""Tasks, open and ended, in one list; and all that is known of a single one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Literal, NamedTuple
from uuid import UUID

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
    """Why it is kept back: `unknown` to all live workers, `no data key: ID` that one of them has, or `crowded`."""
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
    """The worker that has or had its last attempt; None while it waits for another one."""
    created_at: datetime
    """When it was enqueued."""
    started_at: datetime | None
    """When its last attempt began."""
    ended_at: datetime | None
    """When it ended."""
    step: str | None = None
    """The step or node of its run that it is a part of."""


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
    parent_id: UUID | None = None
    """The task that enqueued it while it ran, or that it follows."""
    lane: str | None = None
    """What it shares limits and turns with: `task|key`."""
    waits_for: str | None = None
    """Why it waits, in words: a limit and its holders, a paused queue, no worker, dependencies."""


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
    within: str = ""
    """A queue whose name begins so."""
    since: datetime | None = None
    """Ended at this time or later."""
    until: datetime | None = None
    """Ended before this time."""
    error: str | None = None
    """With this in the type or message of the error, in any case."""
    kind: str | None = None
    """The error's type, and nothing else; or the id of a group of failures."""
    part: str | None = None
    """With this in the name of the task, or of its step, in any case."""
    release: str | None = None
    """Whose last attempt a worker of this release of the application has or had."""

    @property
    def by_end(self) -> bool:
        """It is about how and when tasks have ended, so open ones are none of it; or only about those that failed."""
        if (self.since, self.until, self.error, self.kind) != (None,) * 4:
            return True
        return bool(self.statuses) and {*self.statuses} <= {*ENDED_TASK_STATES} - {TaskState.SUCCESS}


_NOT_OPEN = {"hold": "NULL::text", "blockers": "0", "wake_at": "NULL::timestamptz"}
_NOT_ENDED = {"reason": "NULL::text", "ended_at": "NULL::timestamptz"}
_OPEN = columns_of(TaskView, **_NOT_ENDED)
_ENDED = columns_of(TaskView, **_NOT_OPEN)

# Parameters arrive as literals, so the planner drops the conditions that are not asked for.
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


# What is asked for may be rare: each page looks at so many rows of each table, and the next one goes on behind them.
MOST_LOOKED_AT = 10_000
"""Rows of a table that are looked at for one page."""
LONGEST_WALK = 1.0
"""Seconds for which a list looks at further pages until it is full."""
MOST_ENDS_LOOKED_AT = 2_000
"""The same, in the order of ends: what failed stands far apart in the table, and each row may be a page of it."""
_BEFORE = "(%(before)s::uuid IS NULL OR id < %(before)s::uuid)"
_HORIZON = Statement[UUID](f"""
SELECT /* insights.tasks.horizon */ id FROM (
    (SELECT id FROM orchestrator.tasks WHERE %(open)s AND {_BEFORE} ORDER BY id DESC OFFSET %(most)s LIMIT 1)
     UNION ALL
    (SELECT id FROM orchestrator.ended_tasks WHERE %(ended)s AND {_BEFORE} ORDER BY id DESC OFFSET %(most)s LIMIT 1)
) AS last ORDER BY id DESC LIMIT 1
""")
_IN_SIGHT = f"{_BEFORE} AND (%(horizon)s::uuid IS NULL OR id >= %(horizon)s::uuid)"
_LIST = Statement[Row](f"""
SELECT /* insights.tasks.list */ * FROM (
    SELECT * FROM (
        (SELECT {_OPEN}, seq FROM orchestrator.tasks
          WHERE %(open)s AND {_IN_SIGHT} AND {_MATCHES} AND NOT {PARKED}
          ORDER BY id DESC LIMIT %(limit)s)
         UNION ALL
        (SELECT {_ENDED}, seq FROM orchestrator.ended_tasks
          WHERE %(ended)s AND {_IN_SIGHT} AND {_MATCHES}
          ORDER BY id DESC LIMIT %(limit)s)
    ) AS found ORDER BY id DESC LIMIT %(limit)s
) AS page ORDER BY seq DESC, id DESC
""")

# OFFSET 0 keeps the planner from walking the primary key through everything that is newer than the run.
_OF_RUN = "(SELECT * FROM {} WHERE run_id = %(run)s::uuid OFFSET 0) AS of_run"
TaskSort = Literal["-when", "when", "-ended", "ended"]
"""By when tasks were enqueued, or have ended; a minus: the last ones first."""


def _list_of_run(sort: TaskSort, open_key: str, ended_key: str) -> Statement[Row]:
    """Return the list of a run's tasks in an order: all of them are sorted, whatever the page."""
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


# The ids of a run's tasks derive from its own, and say nothing about their order. What is open ends after all others.
_LIST_OF_RUN: dict[TaskSort, Statement[Row]] = {
    "when": _list_of_run("when", "seq", "seq"),
    "-when": _list_of_run("-when", "seq", "seq"),
    "ended": _list_of_run("ended", "'infinity'::timestamptz", "ended_at"),
    "-ended": _list_of_run("-ended", "'infinity'::timestamptz", "ended_at"),
}

# In the order of their ends, which both indexes have; the one of what did not succeed is much shorter.
_LOOKED_AT = f"""
SELECT * FROM orchestrator.ended_tasks
 WHERE (%(success)s OR status <> 'success') AND {_BY_TIME}
   AND (%(before)s::uuid IS NULL
        OR (ended_at, id) < (SELECT ended_at, id FROM orchestrator.ended_tasks WHERE id = %(before)s::uuid))
 ORDER BY ended_at DESC, id DESC LIMIT %(most)s
"""
_LIST_BY_END = Statement[Row](f"""
SELECT /* insights.tasks.list_by_end */ {_ENDED} FROM ({_LOOKED_AT}) AS looked_at
 WHERE {_MATCHES} AND {_by_error("looked_at")}
 ORDER BY ended_at DESC, id DESC LIMIT %(limit)s
""")
_LAST_LOOKED_AT = Statement[UUID](f"""
SELECT /* insights.tasks.last_looked_at */ id FROM ({_LOOKED_AT}) AS looked_at
 ORDER BY ended_at DESC, id DESC OFFSET %(most)s - 1 LIMIT 1
""")


_OLDEST = {one: one.oldest_first() for one in (_HORIZON, _LIST, _LIST_BY_END, _LAST_LOOKED_AT)}


class TaskPage(NamedTuple):
    """Some of the tasks that match."""

    tasks: list[TaskView]
    next: UUID | None
    """The `before` of the page after this one; None if there are no more."""


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
    """Return tasks that match: the newest, newest first; by their ends, those that ended last; of a run, its first.

    With `oldest`, all but those of a run are listed the other way round; those of a run by `run_sort`. With `needles`,
    only those that may have been given what is looked for.

    A page takes as long as any other, whatever one looks for: it looks at a bounded number of rows, and so may have few
    tasks, or none, and yet not be the last. The tasks of a run stand among others where the run began. The turns of
    code that waits are listed with its run only.
    """
    parameters = _parameters(wanted, limit, before, needles)
    in_order = _OLDEST if oldest and not wanted.run else {}
    horizon = None
    if wanted.run or wanted.by_end:
        statement = _LIST_OF_RUN[run_sort] if wanted.run else _LIST_BY_END
    else:
        statement = _LIST
        if needles.data or not _is_found_at_once(wanted):
            horizon = in_order.get(_HORIZON, _HORIZON).first(connection, parameters)
    rows = in_order.get(statement, statement)(connection, parameters, horizon=horizon and horizon.hex)
    found = [TaskView(**_columns(row)) for row in rows]
    if len(found) == limit:
        if wanted.run or wanted.by_end:
            return TaskPage(found, found[-1].id)
        return TaskPage(found, (max if in_order else min)(task.id for task in found))
    if wanted.by_end and not wanted.run:
        horizon = in_order.get(_LAST_LOOKED_AT, _LAST_LOOKED_AT).first(connection, parameters)
    return TaskPage(found, horizon)


def _is_found_at_once(wanted: TaskFilter) -> bool:
    """Say whether an index finds it: then a page may look at all rows."""
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
    """Return as many tasks that match as are asked for, if so many are found page after page within a second."""
    found: list[TaskView] = []
    last = time.monotonic() + LONGEST_WALK
    while True:
        limits: Any = {"limit": limit - len(found), "before": before, "oldest": oldest, "run_sort": run_sort}
        page = page_of_tasks(connection, wanted, **limits)
        found += page.tasks
        before = page.next
        if before is None or len(found) == limit or time.monotonic() >= last:
            return TaskPage(found, before)


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
        "most": MOST_ENDS_LOOKED_AT if wanted.by_end else MOST_LOOKED_AT,
        **needles.parameters,
    }


_FIND = Statement[Row](f"""
SELECT /* insights.tasks.find */ {_OPEN} FROM orchestrator.tasks WHERE id = ANY(%(ids)s::uuid[])
 UNION ALL
SELECT {_ENDED} FROM orchestrator.ended_tasks WHERE id = ANY(%(ids)s::uuid[])
""")


def find_tasks(connection: Connection, ids: Sequence[bytes]) -> list[TaskView]:
    """Return those of these tasks that there are."""
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
    """Return all that is known of a task, or None if there is none of that id."""
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
    found = {field.name: getattr(row, field.name) for field in fields(TaskView)}
    return {**found, "step": name_of(row.step)}
