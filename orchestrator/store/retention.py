"""Deletes what ended long ago, a slice at a time.

Tasks and runs are deleted in the order in which they ended. The caller remembers how far a walk has come, so that no
slice looks again at what earlier slices have deleted or left. Every function is one or two short statements: no lock is
held for long, and none is waited for.

A run is deleted before its tasks, so a run never lacks some of its tasks. If that is interrupted, tasks and child runs
without their run are left, and are deleted like those that never had one. The history of a run of code goes before the
run's turn task, so a turn task without its run may have no history.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Literal, NamedTuple
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.store import throughput
from orchestrator.store.sql import Row, Statement

BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)
FIRST = bytes(16)
"""The id before all others."""

Kind = Literal["success", "failed"]

_STATES: dict[Kind, str] = {"success": "status = 'success'", "failed": "status <> 'success'"}


def prepare(connection: Connection) -> None:
    """Keep the planner to indexes, whatever it believes about the tables: every statement is about a few rows.

    Where a table has no index to use, its scan counts as immensely expensive, and Postgres would compile the statement.
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
"""Rows that expire: keys whose period is over, buckets that have been full for a while and so are not needed, old
counts, sessions that have ended, answers that were not fetched in time, and releases of workers long gone."""
EXPIRING = tuple(_EXPIRED)
_FORGET_EXPIRED = {
    table: Statement[None](f"""
DELETE /* retention.{table} */ FROM orchestrator.{table} WHERE ctid = ANY (ARRAY(
       SELECT ctid FROM orchestrator.{table} WHERE {which} LIMIT %(limit)s FOR UPDATE SKIP LOCKED))
""")
    for table, which in _EXPIRED.items()
}


def forget_expired(connection: Connection, table: str, limit: int) -> int:
    """Forget what is over by itself in a table; return how many rows."""
    return _FORGET_EXPIRED[table].count(connection, limit=limit)


class Walk(NamedTuple):
    """Rows with the same retention."""

    kind: Kind
    """`failed` stands for everything that did not succeed."""
    seconds: float
    """How long it is kept."""
    queues: tuple[str, ...]
    """The queues that it is about, or that it is not about."""
    others: bool
    """It is about all queues but those."""


_QUEUES = Statement[Row]("""
SELECT /* retention.queues */ name, retention_success, retention_failed FROM orchestrator.queues ORDER BY name
""")


def walks(connection: Connection, success: float, failed: float) -> list[Walk]:
    """Return how long tasks are kept, as the settings and the queues say; what is kept for ever is not in it."""
    rows = _QUEUES(connection)
    kinds: tuple[tuple[Kind, float], ...] = (("success", success), ("failed", failed))
    found: list[Walk] = []
    for kind, usual in kinds:
        kept = {row.name: getattr(row, f"retention_{kind}") for row in rows}
        own = {queue: seconds for queue, seconds in kept.items() if seconds is not None}
        found.append(Walk(kind, usual, tuple(own), others=True))
        for seconds in sorted(set(own.values())):
            queues = tuple(queue for queue, value in own.items() if value == seconds)
            found.append(Walk(kind, seconds, queues, others=False))
    return [walk for walk in found if walk.seconds > 0]


class Slice(NamedTuple):
    """Some neighbours in time."""

    upto: datetime
    """When the last of them ended."""
    full: bool
    """There may be more behind it."""
    late: float
    """Seconds since the last of them was due to be forgotten."""


# A tick ends many tasks at the same moment, and those are never divided: a slice may hold a few more than its limit.
_NEXT = """
SELECT /* retention.next_{name} */ max(ended_at), count(*),
       extract(epoch FROM now() - max(ended_at))::double precision - %(seconds)s::double precision FROM (
       SELECT ended_at FROM orchestrator.{table}
        WHERE ended_at > %(after)s AND ended_at < now() - %(seconds)s::double precision * interval '1 second'{states}
        ORDER BY ended_at LIMIT %(limit)s) AS next
"""
_Next = Statement[tuple[datetime | None, int, float]]
_NEXT_TASKS: dict[Kind, _Next] = {  # what did not succeed has an index of its own, past which success would be walked
    "success": _Next(_NEXT.format(name="success", table="ended_tasks", states="")),
    "failed": _Next(_NEXT.format(name="failed", table="ended_tasks", states=f" AND {_STATES['failed']}")),
}
_NEXT_RUNS = _Next(_NEXT.format(name="runs", table="runs", states=""))


def next_tasks(connection: Connection, walk: Walk, after: datetime, limit: int) -> Slice | None:
    """Return the slice of ended tasks that comes next on a walk, if it is old enough."""
    return _next(connection, _NEXT_TASKS[walk.kind], walk.seconds, after, limit)


def next_runs(connection: Connection, seconds: float, after: datetime, limit: int) -> Slice | None:
    """Return the slice of runs that comes next, if it is old enough."""
    return _next(connection, _NEXT_RUNS, seconds, after, limit)


def _next(connection: Connection, statement: _Next, seconds: float, after: datetime, limit: int) -> Slice | None:
    upto, count, late = statement.one(connection, after=after, seconds=seconds, limit=limit)
    return None if upto is None else Slice(upto, count >= limit, late)


# The rows are chosen and locked first, without waiting: the leader may be opening some of them again.
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
_LEFT_OF_SLICE: dict[Kind, Statement[UUID]] = {
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
    """Forget what a walk is about of one slice, but no task that has a run, nor any run's own; return how many."""
    return _FORGET_SLICE[walk.kind].one(connection, _parameters(walk, after, upto))


def left_runs(connection: Connection, walk: Walk, after: datetime, upto: datetime) -> list[bytes]:
    """Return runs of code that are gone although their turn tasks, in one slice of a walk, are not: half forgotten."""
    return [run.bytes for run in _LEFT_OF_SLICE[walk.kind](connection, _parameters(walk, after, upto))]


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
    """Delete the runs of one slice that have no parent; return their ids."""
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


def _forget_own(connection: Connection, runs: Sequence[bytes], limit: int) -> Iterator[int]:
    """Forget events and tasks of runs that are gone."""
    for statement in (_FORGET_EVENTS_OF, _FORGET_TASKS_OF):
        while (forgotten := statement.one(connection, runs=runs, limit=limit)) > 0:
            yield forgotten


def forget_rest(connection: Connection, runs: Sequence[bytes], limit: int) -> Iterator[int]:
    """Forget what belonged to runs that are gone, their child runs included; yields after every statement."""
    while runs:
        yield from _forget_own(connection, runs, limit)
        children: list[bytes] = []
        while found := _FORGET_CHILDREN(connection, runs=runs, limit=limit):
            children += (run.bytes for run in found)
            yield len(found)
        runs = children


# -- runs that somebody has deleted

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
_SETTLE = Statement[None]("""
DELETE /* retention.settle */ FROM orchestrator.deletions d WHERE run_id = ANY (%(runs)s::uuid[])
   AND NOT EXISTS (SELECT FROM orchestrator.runs r WHERE r.id = d.run_id AND r.ended_at IS NOT NULL)
""")


def next_deleted(connection: Connection, after: bytes, limit: int) -> list[bytes]:
    """Return the runs behind `after` that somebody has deleted."""
    return [run.bytes for run in _DELETED(connection, after=after, limit=limit)]


def forget_deleted(connection: Connection, runs: Sequence[bytes], limit: int) -> Iterator[int]:
    """Forget runs that somebody has deleted; yields after every statement.

    A run is named in `deletions` until all that is its own is gone, and its children are named there before it goes:
    whatever interrupts this, the next round goes on. One that was opened again since stays.
    """
    _DELETE_CHILDREN(connection, runs=runs)
    yield len(_FORGET_DELETED(connection, runs=runs))
    kept = {run.bytes for run in _KEPT(connection, runs=runs)}
    yield from _forget_own(connection, [run for run in runs if run not in kept], limit)
    _SETTLE(connection, runs=runs)
