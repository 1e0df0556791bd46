"""Ready tasks in lanes, rate-limit buckets, and limits that shards share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection

from orchestrator.domain.limits.lanes import Rest, Share, Stock
from orchestrator.store.batches import Batch
from orchestrator.store.sql import Prepared, Row, Statement
from orchestrator.store.tables.tasks import READY_IN_LANE, READY_PLAIN
from orchestrator.store.tasks.claims import Claimed, claiming, most_urgent_first


class Arrival(NamedTuple):
    """A task that became ready in a lane."""

    queue: str
    lane: str
    priority: int
    options: str | None
    is_first: bool
    """Whether more tasks follow in the lane without requests of their own."""
    is_ready: bool
    """Whether the task is still ready; otherwise it was claimed already."""


# Readiness is not in the WHERE: the planner might then scan the index of all ready tasks for each id.
_ARRIVALS = Batch("arrived", "id uuid, is_first boolean")
_ARRIVED = Prepared[Arrival](f"""
SELECT /* lanes.arrived */ coalesce(open.queue, ended.queue) AS queue, coalesce(open.lane, ended.lane) AS lane,
       coalesce(open.priority, ended.priority) AS priority, coalesce(open.options, ended.options)::text AS options,
       arrived.is_first, coalesce(open.is_ready, false) AS is_ready
  FROM {_ARRIVALS}
  LEFT JOIN LATERAL (
       SELECT queue, lane, priority, options, {READY_IN_LANE} AS is_ready FROM orchestrator.tasks
        WHERE id = arrived.id LIMIT 1) AS open ON true
  LEFT JOIN LATERAL (
       SELECT queue, lane, priority, options FROM orchestrator.ended_tasks
        WHERE open.queue IS NULL AND id = arrived.id LIMIT 1) AS ended ON true
 WHERE coalesce(open.lane, ended.lane) IS NOT NULL
""")


def arrived(connection: Connection, tasks: Sequence[tuple[bytes, bool]]) -> list[Arrival]:
    """Return the lanes of tasks with arrival requests, each with whether it is the first of several."""
    return _ARRIVED(connection, _ARRIVALS(tasks))


def _stock_join(queue: str, lane: str, most: str) -> str:
    """Return a join that counts the ready tasks of a lane: `stock(top, known, total)`, all null if there are none."""
    return f"""CROSS JOIN LATERAL (
       SELECT found[1] AS top, cardinality(array_positions(found, found[1])) AS known, cardinality(found) AS total
         FROM (SELECT ARRAY(
                      SELECT priority FROM orchestrator.tasks
                       WHERE queue = {queue} AND lane = {lane} AND {READY_IN_LANE}
                       ORDER BY priority DESC, seq LIMIT {most}) AS found OFFSET 0) AS ready) AS stock"""


def _stock_of(row: Row, most: int) -> Stock | None:
    if row.top is None:
        return None
    return Stock(row.top, row.known, Rest.NOTHING if row.known == row.total < most else Rest.SOMETHING)


class ReadyLane(NamedTuple):
    queue: str
    lane: str
    options: str | None
    stock: Stock | None


_FIRST = f"SELECT queue, lane, priority, options FROM orchestrator.tasks WHERE {READY_IN_LANE}"
_ORDER = "ORDER BY queue, lane, priority DESC, seq LIMIT 1"
COUNTED = 64
"""Ready tasks to count in a lane, unless more could be claimed at once."""

_LANES = Prepared[Row](f"""
WITH /* lanes.after */ RECURSIVE found AS (
    ({_FIRST} AND (queue, lane) > (%(queue)s::text, %(lane)s::text) {_ORDER})
    UNION ALL
    SELECT following.* FROM found
     CROSS JOIN LATERAL ({_FIRST} AND (queue, lane) > (found.queue, found.lane) {_ORDER}) AS following
)
SELECT queue, lane, options::text AS options, stock.*
  FROM (SELECT * FROM found LIMIT %(limit)s) AS head {_stock_join("head.queue", "head.lane", str(COUNTED))}
""")


def lanes_after(connection: Connection, queue: str, lane: str, limit: int) -> list[ReadyLane]:
    """Return the next lanes with ready tasks after this one: two index probes for each, however full it is."""
    rows = _LANES(connection, queue=queue, lane=lane, limit=limit)
    return [ReadyLane(row.queue, row.lane, row.options, _stock_of(row, COUNTED)) for row in rows]


_SHARES = Batch("share", "queue text, lane text, priority smallint, turns int")
_PLAIN = Batch("plain", "queue text, priority smallint, turns int")
_CLAIM = claiming(
    "lanes.claim",
    f"""ARRAY(
       SELECT next.ctid
         FROM {_SHARES}
        CROSS JOIN LATERAL (
              SELECT ctid FROM orchestrator.tasks
               WHERE queue = share.queue AND lane = share.lane AND priority = share.priority AND {READY_IN_LANE}
               ORDER BY seq LIMIT share.turns) AS next
       ) || ARRAY(
       SELECT next.ctid
         FROM {_PLAIN}
        CROSS JOIN LATERAL (
              SELECT ctid FROM orchestrator.tasks
               WHERE queue = plain.queue AND priority = plain.priority AND {READY_PLAIN}
               ORDER BY seq LIMIT plain.turns) AS next)""",
)


def claim(connection: Connection, shares: Sequence[Share], now: datetime) -> list[Claimed]:
    """Claim the tasks granted to each lane and priority, oldest first."""
    in_lanes = [(share.queue, share.lane, share.priority, share.turns) for share in shares if share.lane is not None]
    plain = [(share.queue, share.priority, share.turns) for share in shares if share.lane is None]
    return most_urgent_first(_CLAIM(connection, _SHARES(in_lanes), _PLAIN(plain), now=now))


_REQUESTED = Batch("lane", "queue text, name text")
_READ_READY = Prepared[Row](f"""
SELECT /* lanes.read_ready */ lane.queue, lane.name AS lane, stock.*
  FROM {_REQUESTED}
       {_stock_join("lane.queue", "lane.name", "%(most)s::int")}
 UNION ALL
SELECT queue.name, NULL, first.priority, NULL, NULL
  FROM unnest(%(queues)s::text[]) AS queue(name)
 CROSS JOIN LATERAL (
       SELECT priority FROM orchestrator.tasks
        WHERE queue = queue.name AND {READY_PLAIN} ORDER BY priority DESC, seq LIMIT 1) AS first
""")


class Ready(NamedTuple):
    """Ready tasks of some queues."""

    plain: dict[str, int]
    """By queue, the priority of the first ready task without a lane; queues without such a task are missing."""
    stocks: dict[tuple[str, str], Stock | None]
    """By queue and lane, the stock of the requested lanes."""


def read_ready(connection: Connection, queues: Iterable[str], lanes: Sequence[tuple[str, str]], room: int) -> Ready:
    """Return the ready tasks of queues and lanes, counted only as far as `room` could be used."""
    most = max(COUNTED, 2 * room // max(1, len(lanes)))
    ready = Ready({}, {})
    for row in _READ_READY(connection, _REQUESTED(lanes), queues=queues, most=most):
        if row.lane is None:
            ready.plain[row.queue] = row.top
        else:
            ready.stocks[row.queue, row.lane] = _stock_of(row, most)
    return ready


_HELD = Batch("held", "id uuid, attempt bigint")
_LANES_OF = Prepared[Row](f"""
SELECT /* lanes.of */ held.id, held.attempt, coalesce(open.lane, ended.lane) AS lane
  FROM {_HELD}
  LEFT JOIN LATERAL (SELECT lane FROM orchestrator.tasks WHERE id = held.id LIMIT 1) AS open ON true
  LEFT JOIN LATERAL (SELECT lane FROM orchestrator.ended_tasks WHERE id = held.id LIMIT 1) AS ended ON true
 WHERE coalesce(open.lane, ended.lane) IS NOT NULL
""")


def lanes_of(connection: Connection, attempts: Sequence[tuple[bytes, int]]) -> dict[tuple[bytes, int], str]:
    """Return the lanes of attempts, open or ended; attempts without a lane are missing."""
    return {(row.id, row.attempt): row.lane for row in _LANES_OF(connection, _HELD(attempts))}


# -- buckets
@Statement.function("""
SELECT /* lanes.buckets */ name, extract(epoch FROM due)::double precision FROM orchestrator.buckets WHERE due > now()
""")
def buckets(connection: Connection) -> dict[str, float]:
    """Return the buckets that are not full: by name, the time at which each is full, in seconds since 1970."""


_DUE = Batch("b", "name text, due double precision")
_SAVE = Prepared[None](f"""
INSERT /* lanes.save_buckets */ INTO orchestrator.buckets (name, due)
SELECT name, to_timestamp(due) FROM {_DUE}
    ON CONFLICT (name) DO UPDATE SET due = excluded.due
""")


def save_buckets(connection: Connection, due: Mapping[str, float]) -> None:
    """Save buckets that have been used."""
    _SAVE(connection, _DUE(due.items()))


# -- limits shared by the leaders of several shards: the number of tasks that each has in flight.
#
# A leader locks the names from which it is about to claim, in one order for all leaders, until its tick is committed.
# So the sum is exact, and two leaders wait for each other only where they share a limit. A single leader uses none of
# this. A leader claims nothing under a shared limit until every shard takes part: until then, the others' use is
# unknown.

TAKES_PART = ""
"""A name that each shard stores once."""

_LOCK = Prepared[None]("""
SELECT /* shared.lock */ pg_advisory_xact_lock(hashtextextended('orchestrator.' || name, 1))
  FROM unnest(%(names)s::text[]) AS limited(name)
""")
_READ = Prepared[Row]("""
SELECT /* shared.read */ name, sum(held)::int AS held, NULL::double precision AS due FROM orchestrator.lane_use
 WHERE name = ANY(%(names)s::text[]) AND shard <> %(shard)s GROUP BY name
 UNION ALL
SELECT name, NULL, extract(epoch FROM due)::double precision FROM orchestrator.buckets
 WHERE name = ANY(%(buckets)s::text[])
""")


def lock(
    connection: Connection, shard: int, names: Sequence[str], buckets: Sequence[str]
) -> tuple[dict[str, int], dict[str, float]]:
    """Lock limits until the transaction ends; return the other shards' use of each, and when buckets are full."""
    _LOCK.defer(connection, names=sorted(names))
    rows = _READ(connection, names=[*names, TAKES_PART], buckets=buckets, shard=shard)
    held = {row.name: row.held for row in rows if row.held is not None}
    return held, {row.name: row.due for row in rows if row.due is not None}


_HELD_BY_ALL = Batch("use", "name text, held int")
_SAVE_SHARED = Prepared[None](f"""
INSERT /* shared.save */ INTO orchestrator.lane_use AS mine (name, shard, held)
SELECT use.name, %(shard)s::int, use.held FROM {_HELD_BY_ALL}
    ON CONFLICT (name, shard) DO UPDATE SET held = excluded.held
""")
_FORGET = Prepared[None](
    "DELETE /* shared.forget */ FROM orchestrator.lane_use WHERE shard = %(shard)s AND name = ANY(%(names)s::text[])"
)


@Prepared.function("SELECT /* shared.mine */ name, held FROM orchestrator.lane_use WHERE shard = %(shard)s")
def mine(connection: Connection, shard: int) -> dict[str, int]:
    """Return the use of limits that this shard has stored."""


def save(connection: Connection, shard: int, held: Mapping[str, int]) -> None:
    """Store the changed numbers of tasks in flight of this shard, by limit."""
    if in_use := [(name, number) for name, number in sorted(held.items()) if number > 0]:
        _SAVE_SHARED(connection, _HELD_BY_ALL(in_use), shard=shard)
    if unused := [name for name, number in held.items() if number <= 0]:
        _FORGET(connection, names=unused, shard=shard)
