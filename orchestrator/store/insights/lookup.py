"""Find tasks and runs by what people remember of them, and whose they are.

A list and a search look for tasks for a second at most; the next page of the list goes on from there. Ids need not be
written out, as in git: what begins alike is a range in the index of the primary key, and how much of an id is enough
depends on its two neighbours there. Lists show the ends of ids, which are looked for among the newest.
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
    """Tasks whose id begins so; if none does, those whose id ends so."""
    runs_by_id: list[IdMatch]
    """The same of runs."""
    tasks: list[TaskView]
    """Tasks that hold this idempotency or unique key, or whose names, or those of their steps, have this in them."""
    runs: list[RunView]
    """Runs whose workflows have this in their names, or with this tag, this key, or this id of their own."""
    failures: list[TaskView]
    """Tasks that failed with this text in their error."""


def search(connection: Connection, text: str, limit: int, *, queues: str = "", workflows: str = "") -> Found:
    """Return what matches a text in any of the ways in which people remember something, among what is recent.

    Tasks are of queues, and runs of workflows, whose names begin so.
    """
    digits = text.lower().replace("-", "")
    by_workflow = page_of_runs(connection, RunFilter(workflow=text, within=workflows), limit=limit).runs
    by_tag = page_of_runs(connection, RunFilter(tags=(text,), within=workflows), limit=limit).runs
    by_part = page_of_runs(connection, RunFilter(part=text, within=workflows), limit=limit).runs
    runs = {run.id: run for run in (*runs_by_key(connection, text, limit, workflows), *by_workflow, *by_tag, *by_part)}
    by_key = tasks_by_key(connection, text, limit, queues)
    by_name = list_tasks(connection, TaskFilter(part=text, within=queues), limit=limit).tasks
    return Found(
        tasks_by_id=begin_with(connection, "task", digits, limit, queues) if is_id(digits) else [],
        runs_by_id=begin_with(connection, "run", digits, limit, workflows) if is_id(digits) else [],
        tasks=[*{task.id: task for task in (*by_key, *by_name)}.values()][:limit],
        runs=sorted(runs.values(), key=_newest, reverse=True)[:limit],
        failures=list_tasks(connection, TaskFilter(error=text, within=queues), limit=limit).tasks,
    )


_MOST_NAMES = 2_000
_BY_KEY = Statement[UUID]("""
SELECT /* insights.tasks.by_key */ task_id FROM orchestrator.unique_keys WHERE key = ANY(%(keys)s::text[])
 LIMIT %(limit)s
""")


def tasks_by_key(connection: Connection, key: str, limit: int, within: str = "") -> list[TaskView]:
    """Return tasks that hold this idempotency or unique key, of names that live workers know: a key is of a name."""
    names = [*kinds_of_names(connection)][:_MOST_NAMES]
    keys = [one for name in names for one in (own_key("once", name, key), own_key("unique", name, key))]
    keys.append(own_key("once", "", f"{key}/0"))  # the first of several that were enqueued together
    ids = _BY_KEY(connection, keys=keys, limit=limit)
    found = find_tasks(connection, [id.bytes for id in ids]) if ids else []
    return [task for task in found if task.queue.startswith(within)]


def _newest(run: RunView) -> tuple[object, UUID]:
    return run.created_at, run.id


# -- ids


Kind = Literal["task", "run"]
_TABLES = {"task": ("orchestrator.tasks", "orchestrator.ended_tasks"), "run": ("orchestrator.runs",)}
_SHORTEST_END = 8
"""Digits of the end of an id that are enough to look for: as many as lists show."""
_MOST_ENDS = 100_000
"""Newest tasks of each table, or runs, that are looked at for an end."""
_OWNERS = {"task": "queue", "run": "workflow"}
_TIME = 13
"""The characters of an id that are its time: none that is made later begins with them, unless it derives from it."""


@dataclass(frozen=True, kw_only=True)
class IdMatch:
    """A task or a run in a list of ambiguous ids."""

    id: UUID
    name: str
    status: str
    created_at: datetime


_BEGINS = "id BETWEEN %(first)s::uuid AND %(last)s::uuid"
_ENDS = f"""id IN (SELECT id FROM (SELECT id FROM {{table}} ORDER BY id DESC LIMIT {_MOST_ENDS}) AS newest
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


def _enough(kind: Kind) -> Statement[tuple[str, str]]:
    neighbours = " UNION ALL ".join(
        f"(SELECT id FROM {table} WHERE id {beside} shown.id ORDER BY id {order} LIMIT 1)"
        for table in _TABLES[kind]
        for beside, order in (("<", "DESC"), (">", "ASC"))
    )
    return Statement[tuple[str, str]](f"""
SELECT /* insights.ids.beside_{kind} */ shown.id::text, beside.id::text
  FROM unnest(%(ids)s::uuid[]) AS shown(id) CROSS JOIN LATERAL ({neighbours}) AS beside
""")


_BEGIN_WITH = {kind: _matching(kind, "begins", _BEGINS) for kind in get_args(Kind)}
_END_WITH = {kind: _matching(kind, "ends", _ENDS) for kind in get_args(Kind)}
_ENOUGH = {kind: _enough(kind) for kind in get_args(Kind)}


def is_id(digits: str) -> bool:
    """Say whether digits are enough of an id to look for it."""
    return _ID.fullmatch(digits) is not None


def begin_with(connection: Connection, kind: Kind, digits: str, most: int, within: str = "") -> list[IdMatch]:
    """Return the newest tasks or runs whose ids begin with these hexadecimal digits; if none does, end with them.

    The name of the queue or workflow that they belong to begins with `within`.
    """
    first, last = digits.ljust(32, "0"), digits.ljust(32, "f")
    found = _BEGIN_WITH[kind](connection, first=first, last=last, most=most, within=within)
    if found or len(digits) < _SHORTEST_END:
        return found
    return _END_WITH[kind](connection, end=digits, most=most, within=within)


def enough(connection: Connection, kind: Kind, shown: Sequence[UUID]) -> int:
    """Return how many characters distinguish each of these ids from all others."""
    rows = _ENOUGH[kind](connection, ids=[identifier.bytes for identifier in shown])
    return max((_difference(one, beside) for one, beside in rows), default=0) or _TIME


def _difference(one: str, other: str) -> int:
    return max(_TIME, next(place for place, pair in enumerate(zip(one, other, strict=True), 1) if pair[0] != pair[1]))


# -- owners: the queue and the workflow by which keys of the HTTP API may use something, or not


class TaskOwner(NamedTuple):
    """The queue and workflow of a task."""

    id: UUID
    queue: str
    in_run: bool
    workflow: str | None
    """Of its run."""
    is_turn: bool
    """It carries the turns of its run's code: to act on it is to act on the run."""


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
    """Return what tasks belong to; those that are not there are left out."""
    return {found.id: found for found in _OF_TASKS(connection, ids=[task.bytes for task in tasks])}


def find_run_owners(connection: Connection, runs: Collection[UUID]) -> dict[UUID, RunOwner]:
    """Return what runs belong to; those that are not there are left out."""
    return {found.id: found for found in _OF_RUNS(connection, ids=[run.bytes for run in runs])}


# -- names: those of tasks that live workers have registered, and of workflows and flows, which are no tasks


UNHEARD = ""
"""Stands among names if workers were live and are not heard of: no scheduler leads, or it cannot read Redis."""

# A schedule of a task is a workflow of its name, with that task as its step. Workers say `name@1` of code, and `name`.
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
    """Return what each name stands for that is known: `task`, `code`, `workflow` or `flow`; a task goes before the last
    two, which may have the name of one.
    """
    return {row.name: row.kind for row in _KINDS(connection)}


# -- what enqueued a task or started a run, and what a task enqueued.
#
# A task knows what enqueued it. The ids of what it enqueued follow from its own, from the attempt, and from how much
# that attempt had enqueued before, so they are looked for one by one in the primary keys, and nothing has to be kept
# for it.

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
