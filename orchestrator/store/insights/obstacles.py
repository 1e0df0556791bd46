"""Why a task, the tasks of a run, or the oldest tasks of a queue do not start."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.domain.limits.lane_limits import gate_of
from orchestrator.domain.states import IN_FLIGHT_STATES
from orchestrator.domain.tasks.obstacles import (
    UNHEARD,
    executor_of_hold,
    key_of_hold,
    no_data_key,
    no_database,
    no_executor,
    no_leader,
    no_worker,
    paused,
    unknown_task,
)
from orchestrator.store.fleet import IS_FRESH
from orchestrator.store.insights.fleet import ARE_HEARD, IS_KNOWN, IS_SERVING, QueueCounts
from orchestrator.store.shards import without_leader
from orchestrator.store.sql import Row, Statement
from orchestrator.store.tables.columns import one_of
from orchestrator.store.tables.tasks import DELAYED, NOBODY, PARKED, READY, READY_IN_LANE, READY_PLAIN

_WAITING = f"(({READY}) OR (status = 'pending' AND {NOBODY})) AND created_at < now() - interval '2 seconds'"
"""Newer tasks may not be checked against the workers yet: heartbeats are copied about once a second."""

_FOUND = f"""queue, CASE WHEN {NOBODY} THEN name END AS unknown, hold,
       EXISTS (SELECT FROM orchestrator.queues AS q WHERE q.name = found.queue AND q.paused) AS paused,
       EXISTS (SELECT FROM orchestrator.workers
                WHERE state = 'live' AND {IS_FRESH} AND found.queue = ANY(queues)) AS served, {ARE_HEARD} AS heard,
       hold = 'unknown' AND {IS_KNOWN.format(task="found")} AS handed_back"""

# For a run, check a thousand open tasks: it may have a million, but in few queues.
_OBSTACLES = Statement[Row](f"""
SELECT /* insights.obstacles */ DISTINCT {_FOUND}
  FROM (SELECT * FROM orchestrator.tasks WHERE id = %(id)s::uuid
         UNION ALL
        (SELECT * FROM orchestrator.tasks WHERE run_id = %(id)s::uuid LIMIT 1000)) AS found
 WHERE {_WAITING}
 ORDER BY 1, 2
""")


def find_obstacles(connection: Connection, identifier: bytes) -> list[str]:
    """Return why a task or a run cannot continue; empty if it can, or waits for its time or for other tasks."""
    if unled := without_leader(connection, [identifier]):
        return [no_leader(unled[identifier])]
    messages = (_obstacle(row) for row in _OBSTACLES(connection, id=identifier))
    return [*dict.fromkeys(message for message in messages if message is not None)]


def _obstacle(row: Row) -> str | None:
    if row.paused:
        return paused(row.queue)
    if not row.heard:
        return UNHEARD
    if not row.served:
        return no_worker(row.queue)
    if row.unknown is None:
        return None
    if (key := key_of_hold(row.hold)) is not None:
        return no_data_key(row.queue, repr(row.unknown), key)
    if (needed := executor_of_hold(row.hold)) is not None:
        return no_executor(row.queue, repr(row.unknown), needed)
    return (no_database if row.handed_back else unknown_task)(row.queue, repr(row.unknown))


class Wait(NamedTuple):
    """A waiting task, and the reason."""

    id: UUID
    name: str
    created_at: datetime
    why: str


class _Room(NamedTuple):
    """The limits of a queue, and how much of them is in use."""

    concurrency: int | None
    rate: float | None
    in_flight: int
    slots: int


_BUSY = f"""busy AS MATERIALIZED (
    SELECT id, lane FROM orchestrator.tasks WHERE {one_of(IN_FLIGHT_STATES)} AND lane IS NOT NULL
)"""
_WAITS = f"""id, name, created_at, blockers, lane, options, id = run_id AS is_turn, {DELAYED} AS is_due,
       ARRAY(SELECT busy.id FROM busy WHERE busy.lane = found.lane) AS of_lane,
       ARRAY(SELECT busy.id FROM busy
              WHERE split_part(busy.lane, '|', 1) = split_part(found.lane, '|', 1)) AS of_gate, {_FOUND}"""
_MAX_SCANNED = 1_000
# Of ready tasks, take the first in the order of each index; of other tasks, those of the queue among the oldest
# overall.
_OLDEST = Statement[Row](f"""
WITH /* insights.longest_waits */ candidates AS (
    (SELECT id FROM orchestrator.tasks WHERE queue = %(queue)s::text AND {READY_PLAIN}
      ORDER BY queue, priority DESC, seq LIMIT {_MAX_SCANNED})
     UNION
    (SELECT id FROM orchestrator.tasks WHERE queue = %(queue)s::text AND {READY_IN_LANE}
      ORDER BY queue, lane, priority DESC, seq LIMIT {_MAX_SCANNED})
     UNION
    (SELECT id FROM (SELECT * FROM orchestrator.tasks ORDER BY id LIMIT {10 * _MAX_SCANNED}) AS old
      WHERE queue = %(queue)s::text AND status = 'pending' AND NOT ({DELAYED}) AND NOT {PARKED})
), {_BUSY}
SELECT {_WAITS}
  FROM (SELECT * FROM orchestrator.tasks WHERE id IN (SELECT id FROM candidates) AND status = 'pending'
         ORDER BY created_at LIMIT %(limit)s) AS found ORDER BY created_at
""")


def longest_waits(connection: Connection, queue: QueueCounts, *, limit: int = 10) -> list[Wait]:
    """Return the tasks of a queue that have been waiting longest, with the reasons. Delayed tasks and turn tasks of
    code that waits for an event are left out."""
    rows = _OLDEST(connection, queue=queue.queue, limit=limit)
    unled = without_leader(connection, [row.id.bytes for row in rows])
    room = _Room(queue.concurrency, queue.rate, queue.running + queue.dispatched, queue.slots)
    return [Wait(row.id, row.name, row.created_at, _why(row, room, unled)) for row in rows]


_WAITING_TASK = Statement[Row](f"""
WITH /* insights.waits_for */ {_BUSY}
SELECT {_WAITS}
  FROM orchestrator.tasks AS found
 WHERE id = %(id)s::uuid AND status = 'pending' AND NOT ({DELAYED} AND wake_at > clock_timestamp())
""")
_ROOM = Statement[_Room](f"""
SELECT /* insights.waits_for.room */ q.concurrency, q.rate,
       (SELECT count(*) FROM orchestrator.tasks WHERE {one_of(IN_FLIGHT_STATES)} AND queue = named.queue) AS in_flight,
       (SELECT coalesce(sum(slots), 0) FROM orchestrator.workers WHERE {IS_SERVING} AND named.queue = ANY(queues))
         AS slots
  FROM (SELECT %(queue)s::text AS queue) AS named LEFT JOIN orchestrator.queues AS q ON q.name = named.queue
""")


def waits_for(connection: Connection, task: UUID) -> str | None:
    """Return why a task waits; None if it does not wait, or is delayed."""
    row = _WAITING_TASK.first(connection, id=task.hex)
    if row is None:
        return None
    unled = without_leader(connection, [task.bytes])
    return _why(row, _ROOM.one(connection, queue=row.queue), unled) if unled or not row.is_due else None


def _why(row: Row, queue: _Room, unled: Mapping[bytes, int]) -> str:
    """Return why a task waits: an obstacle, or else the limit for which it may wait."""
    if row.id.bytes in unled:
        return no_leader(unled[row.id.bytes])
    if row.blockers and row.is_turn:
        return "Its code waits for a promise, a signal, a timer, a task or another run"
    if row.blockers:
        return "Waiting on dependencies"
    limit, in_flight = queue.concurrency, queue.in_flight
    reasons = (
        (limit and in_flight >= limit, f"The limit of the queue: {limit} at once"),
        (row.lane and gate_of(row.lane), _limit(row)),
        (row.lane, "Its turn among the keys of the queue"),
        (queue.rate, f"The rate of the queue: {queue.rate:g} a second" if queue.rate else ""),
        (in_flight >= queue.slots, f"No capacity: the workers have {queue.slots} slots"),
        (row.hold, "No capacity: the workers that know the task are busy"),
    )
    return _obstacle(row) or next((reason for holds, reason in reasons if holds), "Its turn")


def _limit(row: Row) -> str:
    """Return the limit of a task or its key, and the tasks that use it up."""
    gate, _, key = (row.lane or "").partition("|")
    options, subject = row.options or {}, f"task {gate}" + (f" for the key {key!r}" if key else "")
    for limit, owner, holders in (
        (options.get("concurrency"), subject, row.of_lane),
        (options.get("total_concurrency"), f"task {gate} for all keys", row.of_gate),
    ):
        if limit and len(holders) >= limit:
            return f"The limit of {owner}: {limit} at once, which {_describe_holders(holders)}"
    return f"The rate of {subject}" if options.keys() & {"rate", "total_rate"} else f"A limit of {subject}"


def _describe_holders(holders: list[UUID]) -> str:
    rest = f" and {len(holders) - 1:,} more have" if len(holders) > 1 else " has"
    return f"task {holders[0]}{rest}"
