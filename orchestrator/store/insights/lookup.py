"""Finds tasks and runs by what people remember, and their owners.

A list or a search scans tasks for a second at most; the next page of a list continues there. Ids may be abbreviated as
in git: a prefix is a range in the primary key's index, and the two neighbors of an id there determine its shortest
unique prefix. Lists display the ends of ids; these are looked for among the newest rows.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, NamedTuple, get_args
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.domain.dag.composed import PREFIX
from orchestrator.domain.ids import derived_id
from orchestrator.domain.tasks.task import own_key
from orchestrator.store.fleet import IS_FRESH
from orchestrator.store.insights.run_lists import RunFilter, page_of_runs
from orchestrator.store.insights.runs import RunView, runs_by_key
from orchestrator.store.insights.tasks import TaskFilter, TaskView, find_tasks, list_tasks
from orchestrator.store.sql import Row, Statement
from orchestrator.store.tables.tasks import DELAYED

_ID = re.compile(r"[0-9a-f]{4,32}")


@dataclass(frozen=True, kw_only=True)
class Found:
    """The matches, newest first, a few of each kind."""

    tasks_by_id: list[IdMatch]
    """Tasks whose ids begin with the text or, if there are none, end with it."""
    runs_by_id: list[IdMatch]
    """Runs whose ids begin with the text or, if there are none, end with it."""
    tasks: list[TaskView]
    """Tasks with this idempotency or unique key, or with the text in their name or step."""
    runs: list[RunView]
    """Runs with the text in their workflow's name, or with this tag, key or chosen id."""
    failures: list[TaskView]
    """Failed tasks with the text in their error."""


def search(connection: Connection, text: str, limit: int, *, queues: str = "", workflows: str = "") -> Found:
    """Return recent tasks and runs that match a text in any way.

    Only queues and workflows whose names begin with `queues` and `workflows` count.
    """
    digits = text.lower().replace("-", "")
    by_workflow = page_of_runs(connection, RunFilter(workflow=text, within=workflows), limit=limit).runs
    by_tag = page_of_runs(connection, RunFilter(tags=(text,), within=workflows), limit=limit).runs
    by_part = page_of_runs(connection, RunFilter(part=text, within=workflows), limit=limit).runs
    runs = {run.id: run for run in (*runs_by_key(connection, text, limit, workflows), *by_workflow, *by_tag, *by_part)}
    by_key = tasks_by_key(connection, text, limit, queues)
    by_name = list_tasks(connection, TaskFilter(part=text, within=queues), limit=limit).tasks
    return Found(
        tasks_by_id=find_by_partial_id(connection, "task", digits, limit, queues) if is_id(digits) else [],
        runs_by_id=find_by_partial_id(connection, "run", digits, limit, workflows) if is_id(digits) else [],
        tasks=[*{task.id: task for task in (*by_key, *by_name)}.values()][:limit],
        runs=sorted(runs.values(), key=_newest, reverse=True)[:limit],
        failures=list_tasks(connection, TaskFilter(error=text, within=queues), limit=limit).tasks,
    )


_MAX_NAMES = 2_000
_BY_KEY = Statement[UUID]("""
SELECT /* insights.tasks.by_key */ task_id FROM orchestrator.unique_keys WHERE key = ANY(%(keys)s::text[])
 LIMIT %(limit)s
""")


def tasks_by_key(connection: Connection, key: str, limit: int, within: str = "") -> list[TaskView]:
    """Return tasks with this idempotency or unique key, trying all task names that workers know."""
    names = [*kinds_of_names(connection)][:_MAX_NAMES]
    keys = [candidate for name in names for candidate in (own_key("once", name, key), own_key("unique", name, key))]
    keys.append(own_key("once", "", f"{key}/0"))  # the key of the first of several tasks that were enqueued together
    ids = _BY_KEY(connection, keys=keys, limit=limit)
    tasks = find_tasks(connection, [id.bytes for id in ids]) if ids else []
    return [task for task in tasks if task.queue.startswith(within)]


def _newest(run: RunView) -> tuple[object, UUID]:
    return run.created_at, run.id


# -- ids


Kind = Literal["task", "run"]
_TABLES = {"task": ("orchestrator.tasks", "orchestrator.ended_tasks"), "run": ("orchestrator.runs",)}
_MIN_END = 8
"""Digits that suffice to look for the end of an id: as many as lists display."""
_MAX_ENDS_SCANNED = 100_000
"""Newest rows of each table that are scanned for the end of an id."""
_OWNERS = {"task": "queue", "run": "workflow"}
_TIME = 13
"""The characters of an id that encode its time: later ids differ there, unless they derive from the id."""


@dataclass(frozen=True, kw_only=True)
class IdMatch:
    """A task or a run in a list of ambiguous ids."""

    id: UUID
    name: str
    status: str
    created_at: datetime


_BEGINS = "id BETWEEN %(first)s::uuid AND %(last)s::uuid"
_ENDS = f"""id IN (SELECT id FROM (SELECT id FROM {{table}} ORDER BY id DESC LIMIT {_MAX_ENDS_SCANNED}) AS newest
                    WHERE right(replace(id::text, '-', ''), length(%(end)s)) = %(end)s)"""


def _matching(kind: Kind, how: str, condition: str) -> Statement[IdMatch]:
    tables = " UNION ALL ".join(
        f"(SELECT id, name, status, created_at FROM {table}"
        f" WHERE {condition.format(table=table)}"
        f" AND (%(within)s::text = '' OR starts_with({_OWNERS[kind]}, %(within)s::text))"
        f" ORDER BY id DESC LIMIT %(most)s)"
        for table in _TABLES[kind]
    )
    return Statement[IdMatch](
        f"SELECT /* insights.ids.{kind}_{how} */ * FROM ({tables}) AS found ORDER BY id DESC LIMIT %(most)s"
    )


def _neighbors_of(kind: Kind) -> Statement[tuple[str, str]]:
    neighbors = " UNION ALL ".join(
        f"(SELECT id FROM {table} WHERE id {beside} shown.id ORDER BY id {order} LIMIT 1)"
        for table in _TABLES[kind]
        for beside, order in (("<", "DESC"), (">", "ASC"))
    )
    return Statement[tuple[str, str]](f"""
SELECT /* insights.ids.beside_{kind} */ shown.id::text, beside.id::text
  FROM unnest(%(ids)s::uuid[]) AS shown(id) CROSS JOIN LATERAL ({neighbors}) AS beside
""")


_BEGIN_WITH = {kind: _matching(kind, "begins", _BEGINS) for kind in get_args(Kind)}
_END_WITH = {kind: _matching(kind, "ends", _ENDS) for kind in get_args(Kind)}
_NEIGHBORS = {kind: _neighbors_of(kind) for kind in get_args(Kind)}


def is_id(digits: str) -> bool:
    """Return whether the digits suffice to look for an id."""
    return _ID.fullmatch(digits) is not None


def find_by_partial_id(connection: Connection, kind: Kind, digits: str, most: int, within: str = "") -> list[IdMatch]:
    """Return the newest tasks or runs whose ids begin or, if there are none, end with these hexadecimal digits.

    The name of their queue or workflow begins with `within`.
    """
    first, last = digits.ljust(32, "0"), digits.ljust(32, "f")
    matches = _BEGIN_WITH[kind](connection, first=first, last=last, most=most, within=within)
    if matches or len(digits) < _MIN_END:
        return matches
    return _END_WITH[kind](connection, end=digits, most=most, within=within)


def distinguishing_length(connection: Connection, kind: Kind, shown: Sequence[UUID]) -> int:
    """Return the number of characters that distinguish each of these ids from all others."""
    rows = _NEIGHBORS[kind](connection, ids=[identifier.bytes for identifier in shown])
    return max((_difference(one, beside) for one, beside in rows), default=0) or _TIME


def _difference(left: str, right: str) -> int:
    return max(_TIME, next(index for index, pair in enumerate(zip(left, right, strict=True), 1) if pair[0] != pair[1]))


# -- owners: the queue and workflow that decide whether an API key may use a task or run


class TaskOwner(NamedTuple):
    """The queue and workflow of a task."""

    id: UUID
    queue: str
    in_run: bool
    workflow: str | None
    """The workflow of the task's run."""
    is_turn: bool
    """Whether the task is a turn task: an action on it is an action on the run."""


class RunOwner(NamedTuple):
    """The workflow of a run."""

    id: UUID
    workflow: str | None


_OF_TASKS = Statement[TaskOwner]("""
SELECT /* insights.owners.tasks */ t.id, t.queue, t.run_id IS NOT NULL AS in_run, r.workflow,
       t.run_id IS NOT NULL AND t.run_id = t.id AS is_turn
  FROM (SELECT id, queue, run_id FROM orchestrator.tasks WHERE id = ANY(%(ids)s::uuid[])
         UNION ALL
        SELECT id, queue, run_id FROM orchestrator.ended_tasks WHERE id = ANY(%(ids)s::uuid[])) AS t
  LEFT JOIN orchestrator.runs r ON r.id = t.run_id
""")
_OF_RUNS = Statement[RunOwner](
    "SELECT /* insights.owners.runs */ id, workflow FROM orchestrator.runs WHERE id = ANY(%(ids)s::uuid[])"
)


def find_task_owners(connection: Connection, tasks: Collection[UUID]) -> dict[UUID, TaskOwner]:
    """Return the owners of the tasks that exist."""
    return {owner.id: owner for owner in _OF_TASKS(connection, ids=[task.bytes for task in tasks])}


def find_run_owners(connection: Connection, runs: Collection[UUID]) -> dict[UUID, RunOwner]:
    """Return the owners of the runs that exist."""
    return {owner.id: owner for owner in _OF_RUNS(connection, ids=[run.bytes for run in runs])}


# -- names of tasks that live workers have registered, and of workflows and flows, which are not tasks


UNHEARD = ""
"""A pseudo-name, present if live workers are not heard of: no scheduler leads, or it cannot read Redis."""

# A schedule of a task is a workflow of the same name, with the task as its step. For workflows as code, workers
# announce both `name@1` and `name`.
_KINDS = Statement[Row](f"""
WITH /* insights.names.kinds */ announced AS (
    SELECT DISTINCT known AS name FROM (
        SELECT DISTINCT names FROM orchestrator.workers WHERE state = 'live' AND {IS_FRESH}) AS live
     CROSS JOIN LATERAL unnest(names) AS known
)
SELECT name, 'flow' AS kind FROM (SELECT DISTINCT name FROM orchestrator.flows) AS published
 UNION ALL
SELECT name, 'workflow' FROM (
    SELECT DISTINCT ON (name) name, definition FROM orchestrator.workflows ORDER BY name, version DESC) AS latest
 WHERE NOT jsonb_path_exists(definition, '$.steps[*] ? (@.task == $name)', jsonb_build_object('name', name))
 UNION ALL
SELECT name, 'task' FROM announced
 UNION ALL
SELECT regexp_replace(name, '@[0-9]{{1,9}}$', ''), 'code' FROM announced WHERE name ~ '@[0-9]{{1,9}}$'
 UNION ALL
SELECT '{UNHEARD}', '' WHERE EXISTS (SELECT FROM orchestrator.workers WHERE state = 'live' AND NOT {IS_FRESH})
""")


def kinds_of_names(connection: Connection) -> dict[str, str]:
    """Return the type of each name: `task`, `code`, `workflow` or `flow`; tasks take precedence over the last two."""
    return {row.name: row.kind for row in _KINDS(connection)}


# -- what enqueued a task or started a run, and what a task enqueued.
#
# A task stores its parent. The ids of what a task enqueues derive from its own id, the attempt, and the number of
# earlier calls in that attempt. So children are looked up in the primary keys, one id at a time, without storing
# anything.

MAX_ATTEMPTS = 3
"""Last attempts of a task that are examined."""
MAX_CALLS = 300
"""First calls of each attempt that are examined."""
_MAX_CALLBACKS = 10


@dataclass(frozen=True, kw_only=True)
class Relative:
    """A parent or child of a task: a task or a run."""

    id: UUID
    """The id of the task or run."""
    kind: str
    """`task` or `run`."""
    name: str
    """For a run, the name of its workflow; a composition has a name of its own."""
    queue: str | None
    """The queue of a task."""
    workflow: str | None
    """The workflow of a run."""
    status: str
    """The state."""
    created_at: datetime
    """When the task was enqueued or the run was started."""
    ended_at: datetime | None
    """When the task or run ended."""
    due: datetime | None = None
    """The time for which a delayed task waits."""


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """The parent of a task, and what the task enqueued."""

    parent: Relative | None
    """None if no task enqueued this one, or if the parent is deleted."""
    children: list[Relative]
    """Children in the order in which they were enqueued; tasks of a child run are not listed."""
    is_part: bool
    """Whether there may be more children than were examined."""


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
    """Return a task as a parent; None if it is deleted."""
    return _FIND.first(connection, ids=[task.bytes], in_runs=True)


def lineage(connection: Connection, task: UUID, parent: UUID | None, attempts: Sequence[int]) -> Lineage:
    """Return the parent of a task, and the children that these attempts enqueued."""
    parent_task = None if parent is None else find_relative(connection, parent)
    last = sorted(attempts)[-MAX_ATTEMPTS:]
    ids = [id for attempt in last for id in _ids(task.bytes, attempt)]
    children = {child.id.bytes: child for child in _FIND(connection, ids=ids, in_runs=False)} if ids else {}
    full = any(derived_id(task.bytes, attempt, MAX_CALLS) in children for attempt in last)
    ordered = [children[id] for id in ids if id in children]
    return Lineage(parent=parent_task, children=ordered, is_part=full or len(attempts) > len(last))


def _ids(task: bytes, attempt: int) -> list[bytes]:
    """Return the ids of the first calls of an attempt, and of the callbacks after its end."""
    enqueued = [derived_id(task, attempt, number) for number in range(1, MAX_CALLS + 1)]
    ends = [derived_id(task, attempt, end, index) for end in ("success", "failure") for index in range(_MAX_CALLBACKS)]
    return enqueued + ends
