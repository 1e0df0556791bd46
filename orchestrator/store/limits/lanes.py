"""Tasks that wait in lanes, and the rates that some of them keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection

from orchestrator.domain.limits.lanes import Rest, Share, Stock
from orchestrator.domain.states import TaskState, sources_of
from orchestrator.store import arrays
from orchestrator.store.statement import Statement
from orchestrator.store.tables import READY_IN_LANE, READY_PLAIN
from orchestrator.store.tasks.transitions import CLAIMED, NEXT_ATTEMPT, Claimed, among, claimed, identifier


class Arrival(NamedTuple):
    """A task that is ready in a lane."""

    queue: str
    lane: str
    priority: int
    options: str | None
    is_first: bool
    """There are others behind it of which nobody tells."""


# Readiness is no condition of the probe: it would let the planner walk the index of all that is ready, for each id.
_ARRIVED = Statement(
    f"""
SELECT t.queue, t.lane, t.priority, t.options::text, arrived.is_first
  FROM unnest(%(ids)s::uuid[], %(first)s::boolean[]) AS arrived(id, is_first)
 CROSS JOIN LATERAL (
       SELECT queue, lane, priority, options, {READY_IN_LANE} AS is_ready FROM orchestrator.tasks
        WHERE id = arrived.id LIMIT 1) AS t
 WHERE t.is_ready
"""
)


def arrived(connection: Connection, tasks: Sequence[tuple[bytes, bool]]) -> list[Arrival]:
    """Return where tasks of which the inbox tells stand ready; each is marked if it is the first of several."""
    parameters = {
        "ids": arrays.uuids(task for task, _ in tasks),
        "first": arrays.numbers(is_first for _, is_first in tasks),
    }
    return [Arrival(*row) for row in _ARRIVED(connection, parameters)]


def _stock(queue: str, lane: str, most: str) -> str:
    """Return a join that counts what is ready in a lane: `stock(top, known, total)`, all null if nothing is."""
    return f"""CROSS JOIN LATERAL (
       SELECT found[1] AS top, cardinality(array_positions(found, found[1])) AS known, cardinality(found) AS total
         FROM (SELECT ARRAY(
                      SELECT priority FROM orchestrator.tasks
                       WHERE queue = {queue} AND lane = {lane} AND {READY_IN_LANE}
                       ORDER BY priority DESC, seq LIMIT {most}) AS found OFFSET 0) AS ready) AS stock"""


def _stock_of(top: int | None, known: int, total: int, most: int) -> Stock | None:
    if top is None:
        return None
    return Stock(top, known, Rest.NOTHING if known == total < most else Rest.SOMETHING)


class Head(NamedTuple):
    """A lane that has something ready."""

    queue: str
    lane: str
    options: str | None
    stock: Stock | None


_FIRST = f"SELECT queue, lane, priority, options FROM orchestrator.tasks WHERE {READY_IN_LANE}"
_ORDER = "ORDER BY queue, lane, priority DESC, seq LIMIT 1"
COUNTED = 64
"""How many tasks are counted in a lane that is not in a hurry."""

_LANES = Statement(
    f"""
WITH RECURSIVE found AS (
    ({_FIRST} AND (queue, lane) > (%(queue)s::text, %(lane)s::text) {_ORDER})
    UNION ALL
    SELECT following.* FROM found
     CROSS JOIN LATERAL ({_FIRST} AND (queue, lane) > (found.queue, found.lane) {_ORDER}) AS following
)
SELECT queue, lane, options::text, stock.*
  FROM (SELECT * FROM found LIMIT %(limit)s) AS head {_stock("head.queue", "head.lane", str(COUNTED))}
"""
)


def lanes_after(connection: Connection, queue: str, lane: str, limit: int) -> list[Head]:
    """Return the lanes after this one in which something is ready: two index probes each, however full they are."""
    rows = _LANES(connection, {"queue": queue, "lane": lane, "limit": limit})
    return [Head(row[0], row[1], row[2], _stock_of(row[3], row[4], row[5], COUNTED)) for row in rows]


_CLAIM = Statement(
    f"""
UPDATE orchestrator.tasks t
   SET status = 'dispatched', attempt = {NEXT_ATTEMPT}, dispatched_at = %(now)s::timestamptz
 WHERE t.ctid = ANY (ARRAY(
       SELECT next.ctid
         FROM unnest(%(queues)s::text[], %(lanes)s::text[], %(priorities)s::smallint[], %(turns)s::int[])
              AS share(queue, lane, priority, turns)
        CROSS JOIN LATERAL (
              SELECT ctid FROM orchestrator.tasks
               WHERE queue = share.queue AND lane = share.lane AND priority = share.priority AND {READY_IN_LANE}
               ORDER BY seq LIMIT share.turns) AS next
       ) || ARRAY(
       SELECT next.ctid
         FROM unnest(%(plain_queues)s::text[], %(plain_priorities)s::smallint[], %(plain_turns)s::int[])
              AS share(queue, priority, turns)
        CROSS JOIN LATERAL (
              SELECT ctid FROM orchestrator.tasks
               WHERE queue = share.queue AND priority = share.priority AND {READY_PLAIN}
               ORDER BY seq LIMIT share.turns) AS next))
   AND t.status IN {among(sources_of(TaskState.DISPATCHED))}
RETURNING {CLAIMED}
"""
)


def claim(connection: Connection, shares: Sequence[Share], now: datetime) -> list[Claimed]:
    """Claim what each lane has been given, oldest first; of the priority that it was given for."""
    in_lanes = [share for share in shares if share.lane is not None]
    plain = [share for share in shares if share.lane is None]
    parameters = {
        "now": now,
        "queues": arrays.words(share.queue for share in in_lanes),
        "lanes": arrays.words(share.lane for share in in_lanes),
        "priorities": arrays.numbers(share.priority for share in in_lanes),
        "turns": arrays.numbers(share.turns for share in in_lanes),
        "plain_queues": arrays.words(share.queue for share in plain),
        "plain_priorities": arrays.numbers(share.priority for share in plain),
        "plain_turns": arrays.numbers(share.turns for share in plain),
    }
    return claimed(_CLAIM(connection, parameters))


_LOOK = Statement(
    f"""
SELECT lane.queue, lane.name, stock.*
  FROM unnest(%(lane_queues)s::text[], %(lanes)s::text[]) AS lane(queue, name)
       {_stock("lane.queue", "lane.name", "%(most)s::int")}
 UNION ALL
SELECT queue.name, NULL, first.priority, NULL, NULL
  FROM unnest(%(queues)s::text[]) AS queue(name)
 CROSS JOIN LATERAL (
       SELECT priority FROM orchestrator.tasks
        WHERE queue = queue.name AND {READY_PLAIN} ORDER BY priority DESC, seq LIMIT 1) AS first
"""
)


class Ready(NamedTuple):
    """What is ready in some queues."""

    plain: dict[str, int]
    """The priority of the first task outside of all lanes, for the queues that have one."""
    stocks: dict[tuple[str, str], Stock | None]
    """By queue and lane, for the lanes that were asked for."""


def look(connection: Connection, queues: Iterable[str], lanes: Sequence[tuple[str, str]], room: int) -> Ready:
    """Return what is ready in queues, and in some of their lanes: counted as far as matters to so much room."""
    most = max(COUNTED, 2 * room // max(1, len(lanes)))
    parameters = {
        "lane_queues": arrays.words(queue for queue, _ in lanes),
        "lanes": arrays.words(lane for _, lane in lanes),
        "queues": arrays.words(queues),
        "most": most,
    }
    ready = Ready({}, {})
    for queue, lane, top, known, total in _LOOK(connection, parameters):
        if lane is None:
            ready.plain[queue] = top
        else:
            ready.stocks[queue, lane] = _stock_of(top, known, total, most)
    return ready


_LANES_OF = Statement(
    """
SELECT held.id::text, held.attempt, coalesce(open.lane, ended.lane)
  FROM unnest(%(ids)s::uuid[], %(attempts)s::bigint[]) AS held(id, attempt)
  LEFT JOIN LATERAL (SELECT lane FROM orchestrator.tasks WHERE id = held.id LIMIT 1) AS open ON true
  LEFT JOIN LATERAL (SELECT lane FROM orchestrator.ended_tasks WHERE id = held.id LIMIT 1) AS ended ON true
 WHERE coalesce(open.lane, ended.lane) IS NOT NULL
"""
)


def lanes_of(connection: Connection, attempts: Sequence[tuple[bytes, int]]) -> dict[tuple[bytes, int], str]:
    """Return the lanes of attempts, open or ended, that have one."""
    parameters = {
        "ids": arrays.uuids(task for task, _ in attempts),
        "attempts": arrays.numbers(attempt for _, attempt in attempts),
    }
    return {(identifier(row[0]), row[1]): row[2] for row in _LANES_OF(connection, parameters)}


# -- buckets

_BUCKETS = "SELECT name, extract(epoch FROM due)::double precision FROM orchestrator.buckets WHERE due > now()"


def buckets(connection: Connection) -> dict[str, float]:
    """Return every bucket that is not full, by name, as seconds since 1970."""
    return {row[0]: row[1] for row in connection.exec_driver_sql(_BUCKETS)}


_SAVE = Statement(
    """
INSERT INTO orchestrator.buckets (name, due)
SELECT name, to_timestamp(due) FROM unnest(%(names)s::text[], %(dues)s::double precision[]) AS b(name, due)
    ON CONFLICT (name) DO UPDATE SET due = excluded.due
"""
)


def save_buckets(connection: Connection, due: Mapping[str, float]) -> None:
    """Save buckets that have been used."""
    _SAVE(connection, {"names": list(due), "dues": arrays.numbers(due.values())})


_PRUNE = """
DELETE FROM orchestrator.buckets WHERE ctid = ANY (ARRAY(
       SELECT ctid FROM orchestrator.buckets WHERE due < now() - interval '1 minute'
        LIMIT %(limit)s FOR UPDATE SKIP LOCKED))
"""


def prune_buckets(connection: Connection, limit: int) -> int:
    """Forget buckets that have been full for a while, and so are as good as absent; return how many."""
    return connection.exec_driver_sql(_PRUNE, {"limit": limit}).rowcount
