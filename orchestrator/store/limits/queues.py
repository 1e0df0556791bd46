"""Settings of a queue: paused or not, limits, and the retention of ended tasks.

Clients write the settings; a request in the inbox notifies the leader.
"""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.dag.definition import named_queues
from orchestrator.domain.flow.definition import named_queues as queues_of_flow
from orchestrator.domain.limits.buckets import Rate, bucket_size
from orchestrator.store import inbox
from orchestrator.store.dag import workflows
from orchestrator.store.flow import runs as flows
from orchestrator.store.inbox import RequestKind
from orchestrator.store.sql import Prepared, Row, Statement
from orchestrator.store.tables.tasks import DELAYED

_NO_TARGET = bytes(16)


class QueueRow(NamedTuple):
    name: str
    paused: bool = False
    concurrency: int | None = None
    rate: Rate | None = None


_READ = Statement[Row](f"""
SELECT /* queues.read */ name, coalesce(paused, false) OR purged.name IS NOT NULL AS paused, concurrency, rate, burst
  FROM orchestrator.queues
  FULL JOIN (SELECT DISTINCT body->>'queue' AS name FROM orchestrator.inbox
              WHERE kind = '{RequestKind.PURGE}') AS purged USING (name)
 ORDER BY name
""")


def read(connection: Connection) -> list[QueueRow]:
    """Return all queues with settings. A queue that is being purged counts as paused."""
    return [
        QueueRow(row.name, row.paused, row.concurrency, Rate(row.rate, 1.0, row.burst) if row.rate else None)
        for row in _READ(connection)
    ]


_NAMED = Statement[str]("""
SELECT /* queues.named */ name FROM orchestrator.queues
 UNION SELECT unnest(queues) FROM orchestrator.workers
 UNION SELECT queue FROM orchestrator.tasks
 UNION SELECT queue FROM (SELECT queue FROM orchestrator.ended_tasks ORDER BY ended_at DESC LIMIT 10000) AS newest
""")


def named(connection: Connection) -> list[str]:
    """Return all queues that have a setting, a worker, an open task, one of the last ended tasks, or a workflow."""
    return sorted(of_workflows(connection).union(_NAMED(connection)))


_OF_CODE = Statement[str](
    "SELECT /* queues.of_code */ DISTINCT code->>'queue' FROM orchestrator.schedules WHERE code IS NOT NULL"
)


def of_workflows(connection: Connection) -> set[str]:
    """Return all queues that an applied workflow, a published flow, or a schedule of a workflow as code names."""
    of_code = set(_OF_CODE(connection))
    of_flows = (queues_of_flow(stored.flow) for stored in flows.list_latest(connection))
    of_dags = (named_queues(stored.definition) for stored in workflows.list_latest(connection))
    return of_code.union(*of_dags, *of_flows)


_PAUSE = Statement[None]("""
INSERT /* queues.pause */ INTO orchestrator.queues AS queue (name, paused) VALUES (%(name)s, true)
    ON CONFLICT (name) DO UPDATE SET paused = true WHERE NOT queue.paused
""")
_RESUME = Statement[None](
    "UPDATE /* queues.resume */ orchestrator.queues SET paused = false WHERE name = %(name)s AND paused"
)


def set_paused(connection: Connection, name: str, paused: bool) -> bool:
    """Pause or resume a queue. Return whether that changed anything. Needs a transaction."""
    if not (_PAUSE if paused else _RESUME).count(connection, name=name):
        return False
    inbox.add(connection, RequestKind.QUEUES, _NO_TARGET)
    return True


_LIMIT = Statement[None]("""
INSERT /* queues.limit */ INTO orchestrator.queues (name, concurrency, rate, burst)
VALUES (%(name)s, %(concurrency)s, %(rate)s, %(burst)s)
    ON CONFLICT (name) DO UPDATE
   SET concurrency = excluded.concurrency, rate = excluded.rate, burst = excluded.burst
""")


def set_limits(connection: Connection, name: str, concurrency: int | None, rate: Rate | None) -> None:
    """Set or remove the limits of a queue; needs a transaction."""
    per_second = rate.count / rate.per if rate else None
    burst = bucket_size(rate) if rate else None
    _LIMIT(connection, name=name, concurrency=concurrency, rate=per_second, burst=burst)
    inbox.add(connection, RequestKind.QUEUES, _NO_TARGET)


@Statement.function("""
INSERT /* queues.retain */ INTO orchestrator.queues (name, retention_success, retention_failed)
VALUES (%(name)s, %(success)s, %(failed)s)
    ON CONFLICT (name) DO UPDATE
   SET retention_success = excluded.retention_success, retention_failed = excluded.retention_failed
""")
def set_retention(connection: Connection, name: str, success: float | None, failed: float | None) -> None:
    """Set the retention of a queue's ended tasks in seconds: 0 keeps them for ever, None uses the settings."""


def request_purge(connection: Connection, name: str) -> None:
    """Ask the leader to cancel the tasks that now wait in a queue."""
    inbox.add(connection, RequestKind.PURGE, _NO_TARGET, msgspec.json.encode({"queue": name}).decode())


# Recursive, one task per step: for a plain range the planner may sort all tasks instead of using the index.
_SLICE = Prepared[Row]("""
WITH /* queues.slice */ RECURSIVE found AS (
    (SELECT id, queue, status, created_at FROM orchestrator.tasks WHERE id > %(after)s::uuid ORDER BY id LIMIT 1)
    UNION ALL
    SELECT following.* FROM found
     CROSS JOIN LATERAL (
           SELECT id, queue, status, created_at FROM orchestrator.tasks
            WHERE id > found.id ORDER BY id LIMIT 1) AS following
)
SELECT id, queue = %(queue)s::text AND status = ANY(%(states)s::text[])
       AND created_at <= %(before)s::timestamptz AS is_waiting
  FROM found LIMIT %(limit)s
""")


class Slice(NamedTuple):
    """A part of the open tasks."""

    waiting: list[bytes]
    """The tasks of this part that wait in the queue."""
    last: bytes | None
    """The `after` of the next slice; None if this is the last."""


def waiting_tasks(
    connection: Connection, queue: str, before: datetime, after: bytes, limit: int, *, dispatched: bool = False
) -> Slice:
    """Scan `limit` open tasks after an id; return those that have been waiting in a queue since before a time.

    With `dispatched`, also return dispatched tasks. No index covers ready, delayed and blocked tasks of a queue
    together, so all open tasks are scanned once.
    """
    states = ["pending", "dispatched"] if dispatched else ["pending"]
    rows = _SLICE(connection, queue=queue, before=before, after=after, limit=limit, states=states)
    return Slice([row.id for row in rows if row.is_waiting], rows[-1].id if len(rows) == limit else None)


_OPEN = Statement[int]("SELECT /* queues.open */ count(*) FROM orchestrator.tasks WHERE queue = %(queue)s")


def open_tasks(connection: Connection, name: str) -> int:
    """Return the number of open tasks of a queue."""
    return _OPEN.one(connection, queue=name)


@Statement.function("""
SELECT /* queues.count_open */ count(*) FROM (
       SELECT FROM orchestrator.tasks WHERE queue = %(queue)s LIMIT %(most)s::bigint) AS counted
""")
def count_open(connection: Connection, queue: str, most: int) -> int:
    """Return the number of open tasks of a queue, up to `most`."""


@Statement.function("""
SELECT /* queues.count_all_open */ count(*) FROM (SELECT FROM orchestrator.tasks LIMIT %(most)s::bigint) AS counted
""")
def count_all_open(connection: Connection, most: int) -> int:
    """Return the number of open tasks, up to `most`."""


@Statement.function(
    f"SELECT /* queues.delayed */ count(*), min(wake_at) FROM orchestrator.tasks WHERE queue = %(name)s AND {DELAYED}"
)
def delayed(connection: Connection, name: str) -> tuple[int, datetime | None]:
    """Return the number of delayed tasks of a queue, and the earliest time for which one waits."""
