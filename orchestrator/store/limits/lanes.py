"""Tasks that wait in lanes, and the rates that some of them keep."""

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
    """A task that is ready in a lane."""

    queue: str
    lane: str
    priority: int
    options: str | None
    is_first: bool
    """Other tasks stand behind it, without requests of their own."""
    is_ready: bool
    """It still waits; else it has been claimed already."""


# Readiness is no condition of the probe: it would let the planner walk the index of all that is ready, for each id.
_TOLD = Batch("arrived", "id uuid, is_first boolean")
_ARRIVED = Prepared[Arrival](f"""
SELECT /* lanes.arrived */ coalesce(open.queue, ended.queue) AS queue, coalesce(open.lane, ended.lane) AS lane,
       coalesce(open.priority, ended.priority) AS priority, coalesce(open.options, ended.options)::text AS options,
       arrived.is_first, coalesce(open.is_ready, false) AS is_ready
  FROM {_TOLD}
  LEFT JOIN LATERAL (
       SELECT queue, lane, priority, options, {READY_IN_LANE} AS is_ready FROM orchestrator.tasks
        WHERE id = arrived.id LIMIT 1) AS open ON true
  LEFT JOIN LATERAL (
       SELECT queue, lane, priority, options FROM orchestrator.ended_tasks
        WHERE open.queue IS NULL AND id = arrived.id LIMIT 1) AS ended ON true
 WHERE coalesce(open.lane, ended.lane) IS NOT NULL
""")


def arrived(connection: Connection, tasks: Sequence[tuple[bytes, bool]]) -> list[Arrival]:
    """Return the lanes of tasks that the inbox names; each is marked if it is the first of several."""
    return _ARRIVED(connection, _TOLD(tasks))


def _stock(queue: str, lane: str, most: str) -> str:
    """Return a join that counts what is ready in a lane: `stock(top, known, total)`, all null if nothing is."""
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
"""How many tasks are counted in a lane that is not in a hurry."""

_LANES = Prepared[Row](f"""
WITH /* lanes.after */ RECURSIVE found AS (
    ({_FIRST} AND (queue, lane) > (%(queue)s::text, %(lane)s::text) {_ORDER})
    UNION ALL
    SELECT following.* FROM found
     CROSS JOIN LATERAL ({_FIRST} AND (queue, lane) > (found.queue, found.lane) {_ORDER}) AS following
)
SELECT queue, lane, options::text AS options, stock.*
  FROM (SELECT * FROM found LIMIT %(limit)s) AS head {_stock("head.queue", "head.lane", str(COUNTED))}
""")


def lanes_after(connection: Connection, queue: str, lane: str, limit: int) -> list[ReadyLane]:
    """Return the lanes after this one in which something is ready: two index probes each, however full they are."""
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
    """Claim what each lane has been given, oldest first; of the priority that it was given for."""
    in_lanes = [(share.queue, share.lane, share.priority, share.turns) for share in shares if share.lane is not None]
    plain = [(share.queue, share.priority, share.turns) for share in shares if share.lane is None]
    return most_urgent_first(_CLAIM(connection, _SHARES(in_lanes), _PLAIN(plain), now=now))


_ASKED = Batch("lane", "queue text, name text")
_LOOK = Prepared[Row](f"""
SELECT /* lanes.read_ready */ lane.queue, lane.name AS lane, stock.*
  FROM {_ASKED}
       {_stock("lane.queue", "lane.name", "%(most)s::int")}
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
    """The priority of the first task outside of all lanes, for the queues that have one."""
    stocks: dict[tuple[str, str], Stock | None]
    """By queue and lane, for the lanes that were asked for."""


def read_ready(connection: Connection, queues: Iterable[str], lanes: Sequence[tuple[str, str]], room: int) -> Ready:
    """Return what is ready in queues, and in some of their lanes: counted as far as matters to so much room."""
    most = max(COUNTED, 2 * room // max(1, len(lanes)))
    ready = Ready({}, {})
    for row in _LOOK(connection, _ASKED(lanes), queues=queues, most=most):
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
    """Return the lanes of attempts, open or ended, that have one."""
    return {(row.id, row.attempt): row.lane for row in _LANES_OF(connection, _HELD(attempts))}


# -- buckets
@Statement.function("""
SELECT /* lanes.buckets */ name, extract(epoch FROM due)::double precision FROM orchestrator.buckets WHERE due > now()
""")
def buckets(connection: Connection) -> dict[str, float]:
    """Return every bucket that is not full, by name, as seconds since 1970."""


_DUE = Batch("b", "name text, due double precision")
_SAVE = Prepared[None](f"""
INSERT /* lanes.save_buckets */ INTO orchestrator.buckets (name, due)
SELECT name, to_timestamp(due) FROM {_DUE}
    ON CONFLICT (name) DO UPDATE SET due = excluded.due
""")


def save_buckets(connection: Connection, due: Mapping[str, float]) -> None:
    """Save buckets that have been used."""
    _SAVE(connection, _DUE(due.items()))


# -- limits that the leaders of several shards keep together: how much each of them has in flight.
#
# A leader locks the names that it is about to claim from, in one order for all, until its tick is committed. So the
# sum is exact, and two leaders wait for each other only where they share a limit. One leader alone uses none of this.
# So a leader gives nothing out of a limit before each shard has said that it takes part: until then others may hold
# anything.

TAKES_PART = ""
"""A name that each shard holds once."""

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
    """Lock limits until the transaction ends; return what other shards hold of them, and when buckets are due."""
    _LOCK.later(connection, names=sorted(names))
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
    """Return what this shard has said that it holds."""


def save(connection: Connection, shard: int, held: Mapping[str, int]) -> None:
    """Store what this shard holds now, of what has changed."""
    if some := [(name, number) for name, number in sorted(held.items()) if number > 0]:
        _SAVE_SHARED(connection, _HELD_BY_ALL(some), shard=shard)
    if none := [name for name, number in held.items() if number <= 0]:
        _FORGET(connection, names=none, shard=shard)
