"""Deletes tasks and runs that ended long ago, in slices.

Tasks and runs are deleted in the order of their end. The caller keeps a cursor for each walk, so no slice reads rows
again that earlier slices deleted or skipped. Every function runs one or two short statements: no lock is held for long,
and no statement waits for a lock.

A run is deleted before its tasks, so a run never lacks some of its tasks. After an interruption, tasks and child runs
without their run remain, and are deleted like tasks and runs without a parent. The history of a run of code is deleted
before the run's turn task, so a turn task without its run may have no history.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Literal, NamedTuple
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.store import throughput
from orchestrator.store.sql import Row, Statement

START = datetime(1970, 1, 1, tzinfo=UTC)
FIRST = bytes(16)
"""The smallest id."""

Kind = Literal["success", "failed"]

_STATES: dict[Kind, str] = {"success": "status = 'success'", "failed": "status <> 'success'"}


def prepare(connection: Connection) -> None:
    """Force index scans, whatever the planner believes about the tables: every statement is about a few rows.

    JIT is off because Postgres would compile the query for a scan that is disabled but has no alternative.
    """
    connection.exec_driver_sql(
        "SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off; SET jit = off"
    )


_EXPIRED = {
    "unique_keys": "until <= now() - interval '1 minute' ORDER BY until",
    "buckets": "due < now() - interval '1 minute'",
    "throughput": f"bucket < now() - interval '{int(throughput.KEPT.total_seconds())} s' ORDER BY bucket",
    "sessions": "expires_at <= now() ORDER BY expires_at",
    "answers": "at < now() - interval '1 hour'",
    "worker_releases": "until <= now() ORDER BY until",
}
"""Conditions of expired rows: unique keys, rate-limit buckets that have been full for a while, throughput counts,
dashboard sessions, answers that nobody fetched, and releases of workers that are long gone."""
EXPIRING = tuple(_EXPIRED)
_FORGET_EXPIRED = {
    table: Statement[None](f"""
DELETE /* retention.{table} */ FROM orchestrator.{table} WHERE ctid = ANY (ARRAY(
       SELECT ctid FROM orchestrator.{table} WHERE {which} LIMIT %(limit)s FOR UPDATE SKIP LOCKED))
""")
    for table, which in _EXPIRED.items()
}


def forget_expired(connection: Connection, table: str, limit: int) -> int:
    """Delete expired rows of a table; return their number."""
    return _FORGET_EXPIRED[table].count(connection, limit=limit)


class Walk(NamedTuple):
    """Ended tasks with the same retention period."""

    kind: Kind
    """`failed` stands for all ends but success."""
    seconds: float
    """The retention period."""
    queues: tuple[str, ...]
    """The queues to include, or with `others` to exclude."""
    others: bool
    """Whether the walk is about all queues except `queues`."""


_QUEUES = Statement[Row]("""
SELECT /* retention.queues */ name, retention_success, retention_failed FROM orchestrator.queues ORDER BY name
""")


def walks(connection: Connection, success: float, failed: float) -> list[Walk]:
    """Return a walk for each retention period in the settings and queues; tasks kept for ever have no walk."""
    rows = _QUEUES(connection)
    kinds: tuple[tuple[Kind, float], ...] = (("success", success), ("failed", failed))
    result: list[Walk] = []
    for kind, default in kinds:
        by_queue = {row.name: getattr(row, f"retention_{kind}") for row in rows}
        periods = {queue: seconds for queue, seconds in by_queue.items() if seconds is not None}
        result.append(Walk(kind, default, tuple(periods), others=True))
        for seconds in sorted(set(periods.values())):
            queues = tuple(queue for queue, value in periods.items() if value == seconds)
            result.append(Walk(kind, seconds, queues, others=False))
    return [walk for walk in result if walk.seconds > 0]


class Slice(NamedTuple):
    """A range of end times."""

    upto: datetime
    """The last end time in the slice."""
    full: bool
    """Whether more rows may follow the slice."""
    late: float
    """Seconds since the retention period of the last row expired."""


# A tick ends many tasks at the same moment, and a slice never splits them: it may be slightly larger than its limit.
_NEXT = """
SELECT /* retention.next_{name} */ max(ended_at), count(*),
       extract(epoch FROM now() - max(ended_at))::double precision - %(seconds)s::double precision FROM (
       SELECT ended_at FROM orchestrator.{table}
        WHERE ended_at > %(after)s AND ended_at < now() - %(seconds)s::double precision * interval '1 second'{states}
        ORDER BY ended_at LIMIT %(limit)s) AS next
"""
_Next = Statement[tuple[datetime | None, int, float]]
_NEXT_TASKS: dict[Kind, _Next] = {  # unsuccessful tasks have their own index, which skips success
    "success": _Next(_NEXT.format(name="success", table="ended_tasks", states="")),
    "failed": _Next(_NEXT.format(name="failed", table="ended_tasks", states=f" AND {_STATES['failed']}")),
}
_NEXT_RUNS = _Next(_NEXT.format(name="runs", table="runs", states=""))


def next_tasks(connection: Connection, walk: Walk, after: datetime, limit: int) -> Slice | None:
    """Return the next slice of ended tasks on a walk; None if the retention period of no task has expired."""
    return _next(connection, _NEXT_TASKS[walk.kind], walk.seconds, after, limit)


def next_runs(connection: Connection, seconds: float, after: datetime, limit: int) -> Slice | None:
    """Return the next slice of ended runs; None if the retention period of no run has expired."""
    return _next(connection, _NEXT_RUNS, seconds, after, limit)


def _next(connection: Connection, statement: _Next, seconds: float, after: datetime, limit: int) -> Slice | None:
    upto, count, late = statement.one(connection, after=after, seconds=seconds, limit=limit)
    return None if upto is None else Slice(upto, count >= limit, late)


# First select and lock rows, without waiting: the leader may be retrying some of the tasks.
_FORGET_TASKS = """
WITH /* retention.forget_{name} */ old AS MATERIALIZED (
    SELECT e.ctid AS place, e.id FROM orchestrator.ended_tasks e WHERE {which} FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM orchestrator.ended_tasks WHERE ctid = ANY (ARRAY(SELECT place FROM old))
), history AS (
    DELETE FROM orchestrator.attempts WHERE ctid = ANY (ARRAY(
           SELECT past.place FROM old CROSS JOIN LATERAL (
                  SELECT ctid AS place FROM orchestrator.attempts WHERE task_id = old.id OFFSET 0) AS past))
), logs AS (
    DELETE FROM orchestrator.task_logs WHERE ctid = ANY (ARRAY(
           SELECT said.place FROM old CROSS JOIN LATERAL (
                  SELECT ctid AS place FROM orchestrator.task_logs WHERE task_id = old.id OFFSET 0) AS said))
)
SELECT count(*) FROM old
"""
_FORGET_SLICE: dict[Kind, Statement[int]] = {
    kind: Statement[int](
        _FORGET_TASKS.format(
            name=kind,
            which=f"""ended_at > %(after)s AND ended_at <= %(upto)s AND {states}
           AND (queue = ANY (%(queues)s::text[])) <> %(others)s AND e.run_id IS DISTINCT FROM e.id
           AND (run_id IS NULL OR NOT EXISTS (SELECT FROM orchestrator.runs r WHERE r.id = e.run_id))""",
        )
    )
    for kind, states in _STATES.items()
}
_RUNS_OF_REMAINING_TURNS: dict[Kind, Statement[UUID]] = {
    kind: Statement[UUID](f"""
WITH /* retention.left_of_{kind} */ slice AS MATERIALIZED (
    SELECT id, run_id FROM orchestrator.ended_tasks
     WHERE ended_at > %(after)s AND ended_at <= %(upto)s AND {states}
       AND (queue = ANY (%(queues)s::text[])) <> %(others)s
)
SELECT id FROM slice
 WHERE run_id = id AND NOT EXISTS (SELECT FROM orchestrator.runs r WHERE r.id = slice.id)
""")
    for kind, states in _STATES.items()
}


def forget_tasks(connection: Connection, walk: Walk, after: datetime, upto: datetime) -> int:
    """Delete the tasks of a slice; return their number. Turn tasks and tasks whose run exists stay."""
    return _FORGET_SLICE[walk.kind].one(connection, _parameters(walk, after, upto))


def orphaned_runs(connection: Connection, walk: Walk, after: datetime, upto: datetime) -> list[bytes]:
    """Return runs of code that are deleted while their turn tasks in this slice are not: retention was interrupted."""
    return [run.bytes for run in _RUNS_OF_REMAINING_TURNS[walk.kind](connection, _parameters(walk, after, upto))]


def _parameters(walk: Walk, after: datetime, upto: datetime) -> dict[str, object]:
    return {"after": after, "upto": upto, "queues": list(walk.queues), "others": walk.others}


_FORGET_RUNS = """
DELETE /* retention.forget_{name} */ FROM orchestrator.runs WHERE ctid = ANY (ARRAY(
       SELECT ctid FROM orchestrator.runs r WHERE {which} FOR UPDATE SKIP LOCKED))
RETURNING id
"""
_FORGET_OLD_RUNS: dict[Kind, Statement[UUID]] = {
    kind: Statement[UUID](
        _FORGET_RUNS.format(
            name=f"{kind}_runs",
            which=f"""ended_at > %(after)s AND ended_at <= %(upto)s AND {states}
          AND (parent_run IS NULL OR NOT EXISTS (SELECT FROM orchestrator.runs p WHERE p.id = r.parent_run))""",
        )
    )
    for kind, states in _STATES.items()
}


def forget_runs(connection: Connection, kind: Kind, after: datetime, upto: datetime) -> list[bytes]:
    """Delete the runs of a slice that have no parent; return their ids."""
    return [run.bytes for run in _FORGET_OLD_RUNS[kind](connection, after=after, upto=upto)]


_FORGET_CHILDREN = Statement[UUID](
    _FORGET_RUNS.format(
        name="children", which="parent_run = ANY (%(runs)s::uuid[]) AND ended_at IS NOT NULL LIMIT %(limit)s"
    )
)
_FORGET_TASKS_OF = Statement[int](
    _FORGET_TASKS.format(name="tasks_of_runs", which="run_id = ANY (%(runs)s::uuid[]) LIMIT %(limit)s")
)
_FORGET_EVENTS_OF = Statement[int]("""
WITH /* retention.forget_events_of_runs */ gone AS (
    DELETE FROM orchestrator.histories WHERE ctid = ANY (ARRAY(
           SELECT ctid FROM orchestrator.histories WHERE run_id = ANY (%(runs)s::uuid[]) LIMIT %(limit)s))
    RETURNING 1
), keys AS (
    DELETE FROM orchestrator.run_keys WHERE run_id = ANY (%(runs)s::uuid[])
), untold AS (
    DELETE FROM orchestrator.untold WHERE run_id = ANY (%(runs)s::uuid[])
), nodes AS (
    DELETE FROM orchestrator.node_runs WHERE ctid = ANY (ARRAY(
           SELECT ctid FROM orchestrator.node_runs WHERE run_id = ANY (%(runs)s::uuid[]) LIMIT %(limit)s))
    RETURNING 1
)
SELECT (SELECT count(*) FROM gone) + (SELECT count(*) FROM nodes)
""")


def _delete_contents(connection: Connection, runs: Sequence[bytes], limit: int) -> Iterator[int]:
    """Delete the history and the tasks of deleted runs."""
    for statement in (_FORGET_EVENTS_OF, _FORGET_TASKS_OF):
        while (forgotten := statement.one(connection, runs=runs, limit=limit)) > 0:
            yield forgotten


def delete_remains(connection: Connection, runs: Sequence[bytes], limit: int) -> Iterator[int]:
    """Delete everything that belonged to deleted runs, child runs included; yield after every statement."""
    while runs:
        yield from _delete_contents(connection, runs, limit)
        children: list[bytes] = []
        while deleted_children := _FORGET_CHILDREN(connection, runs=runs, limit=limit):
            children += (run.bytes for run in deleted_children)
            yield len(deleted_children)
        runs = children


# -- runs that users have deleted

_DELETED = Statement[UUID]("""
SELECT /* retention.deleted */ run_id FROM orchestrator.deletions
 WHERE run_id > %(after)s::uuid ORDER BY run_id LIMIT %(limit)s
""")
_DELETE_CHILDREN = Statement[None]("""
INSERT /* retention.delete_children */ INTO orchestrator.deletions (run_id)
SELECT id FROM orchestrator.runs WHERE parent_run = ANY (%(runs)s::uuid[]) AND ended_at IS NOT NULL
ON CONFLICT DO NOTHING
""")
_FORGET_DELETED = Statement[UUID](
    _FORGET_RUNS.format(
        name="deleted_runs", which="id = ANY (%(runs)s::uuid[]) AND ended_at IS NOT NULL AND NOT closing"
    )
)
_KEPT = Statement[UUID]("SELECT /* retention.kept */ id FROM orchestrator.runs WHERE id = ANY (%(runs)s::uuid[])")
_FINISH_DELETIONS = Statement[None]("""
DELETE /* retention.settle */ FROM orchestrator.deletions d WHERE run_id = ANY (%(runs)s::uuid[])
   AND NOT EXISTS (SELECT FROM orchestrator.runs r WHERE r.id = d.run_id AND r.ended_at IS NOT NULL)
""")


def next_deleted(connection: Connection, after: bytes, limit: int) -> list[bytes]:
    """Return the runs after the id `after` that users have deleted."""
    return [run.bytes for run in _DELETED(connection, after=after, limit=limit)]


def forget_deleted(connection: Connection, runs: Sequence[bytes], limit: int) -> Iterator[int]:
    """Delete runs that users have deleted; yield after every statement.

    A run stays in `deletions` until everything of it is deleted, and its children are inserted there first: the next
    round continues after an interruption. A run that was retried since then stays.
    """
    _DELETE_CHILDREN(connection, runs=runs)
    yield len(_FORGET_DELETED(connection, runs=runs))
    existing = {run.bytes for run in _KEPT(connection, runs=runs)}
    yield from _delete_contents(connection, [run for run in runs if run not in existing], limit)
    _FINISH_DELETIONS(connection, runs=runs)
