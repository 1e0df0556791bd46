"""Tasks that wait in lanes, and the rates that some of them keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection

from orchestrator.domain.lanes import Share
from orchestrator.domain.states import TaskState, sources_of
from orchestrator.store import arrays
from orchestrator.store.statement import Statement
from orchestrator.store.tables import READY_IN_LANE, READY_PLAIN
from orchestrator.store.transitions import CLAIMED, Claimed, among, claimed, identifier


class Head(NamedTuple):
    """The first task of a lane that has something ready."""

    queue: str
    lane: str
    priority: int
    options: str | None


# Readiness is no condition of the probe: it would let the planner walk the index of all that is ready, for each id.
_ARRIVED = Statement(
    f"""
SELECT t.queue, t.lane, t.priority, t.options::text
  FROM unnest(%(ids)s::uuid[]) AS arrived(id)
 CROSS JOIN LATERAL (
       SELECT queue, lane, priority, options, {READY_IN_LANE} AS is_ready FROM orchestrator.tasks
        WHERE id = arrived.id LIMIT 1) AS t
 WHERE t.is_ready
"""
)


def arrived(connection: Connection, ids: Sequence[bytes]) -> list[Head]:
    """Return where tasks of which the inbox tells stand ready."""
    return [Head(*row) for row in _ARRIVED(connection, {"ids": arrays.uuids(ids)})]


_FIRST = f"SELECT queue, lane, priority, options FROM orchestrator.tasks WHERE {READY_IN_LANE}"
_ORDER = "ORDER BY queue, lane, priority DESC, seq LIMIT 1"

_LANES = Statement(
    f"""
WITH RECURSIVE found AS (
    ({_FIRST} AND (queue, lane) > (%(queue)s::text, %(lane)s::text) {_ORDER})
    UNION ALL
    SELECT following.* FROM found
     CROSS JOIN LATERAL ({_FIRST} AND (queue, lane) > (found.queue, found.lane) {_ORDER}) AS following
)
SELECT queue, lane, priority, options::text FROM found LIMIT %(limit)s
"""
)


def lanes_after(connection: Connection, queue: str, lane: str, limit: int) -> list[Head]:
    """Return the lanes after this one in which something is ready: one index probe each, however full they are."""
    return [Head(*row) for row in _LANES(connection, {"queue": queue, "lane": lane, "limit": limit})]


_CLAIM = Statement(
    f"""
UPDATE orchestrator.tasks t
   SET status = 'dispatched', attempt = t.attempt + 1, dispatched_at = %(now)s::timestamptz
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


_TOPS = Statement(
    f"""
SELECT lane.queue, lane.name, first.priority
  FROM unnest(%(queues)s::text[], %(lanes)s::text[]) AS lane(queue, name)
  LEFT JOIN LATERAL (
       SELECT priority FROM orchestrator.tasks
        WHERE queue = lane.queue AND lane = lane.name AND {READY_IN_LANE}
        ORDER BY priority DESC, seq LIMIT 1) AS first ON true
"""
)


def tops(connection: Connection, lanes: Sequence[tuple[str, str]]) -> list[tuple[str, str, int | None]]:
    """Return queue, lane, and the priority of its first ready task, or None if it is empty."""
    parameters = {
        "queues": arrays.words(queue for queue, _ in lanes),
        "lanes": arrays.words(lane for _, lane in lanes),
    }
    return [(row[0], row[1], row[2]) for row in _TOPS(connection, parameters)]


_PLAIN_TOPS = Statement(
    f"""
SELECT queue.name, first.priority
  FROM unnest(%(queues)s::text[]) AS queue(name)
 CROSS JOIN LATERAL (
       SELECT priority FROM orchestrator.tasks
        WHERE queue = queue.name AND {READY_PLAIN} ORDER BY priority DESC, seq LIMIT 1) AS first
"""
)


def plain_tops(connection: Connection, queues: Iterable[str]) -> dict[str, int]:
    """Return the priority of the first ready task outside of all lanes, for the queues that have one."""
    return {row[0]: row[1] for row in _PLAIN_TOPS(connection, {"queues": list(queues)})}


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
