"""Limits of workflows that the leaders of several shards keep together.

A run begins only under the lock of its lane, which a leader has until its tick is committed, so that what it counts in
all shards stays true. Nobody waits for such a lock: the run tries again. The oldest waiting run of all shards is next,
and its leader finds out by itself that there is room. One leader alone uses none of this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import Connection

from orchestrator.store.sql import Prepared, Statement

# By a statement of its own: the next one sees what was committed before the lock was had.
_LOCK = Prepared[str]("""
SELECT /* run_lanes.lock */ lane FROM unnest(%(lanes)s::text[]) AS asked(lane)
 WHERE pg_try_advisory_xact_lock(hashtextextended('orchestrator.' || lane, 2))
""")


def try_lanes(connection: Connection, lanes: Iterable[str]) -> set[str]:
    """Lock lanes until the transaction ends; return those that no other leader has locked."""
    return set(_LOCK(connection, lanes=[*lanes]))


_PARKED = "lane = {}.lane AND ended_at IS NULL AND status = 'pending' AND parked"
_UNPARK = Prepared[str](f"""
WITH /* run_lanes.unpark */ room AS MATERIALIZED (
    SELECT asked.lane, mine.lane_limit
           - (SELECT count(*) FROM orchestrator.all_runs WHERE lane = asked.lane AND status = 'running') AS number
      FROM unnest(%(lanes)s::text[]) AS asked(lane)
     CROSS JOIN LATERAL (
           SELECT lane_limit FROM orchestrator.runs WHERE {_PARKED.format("asked")} ORDER BY id LIMIT 1) AS mine
), next AS MATERIALIZED (
    SELECT oldest.id FROM room
     CROSS JOIN LATERAL (
           SELECT id FROM orchestrator.all_runs
            WHERE lane = room.lane AND ended_at IS NULL AND status = 'pending' AND NOT cancelling
            ORDER BY id LIMIT greatest(room.number, 0)) AS oldest
), freed AS (
    UPDATE orchestrator.runs r SET parked = false
      FROM next CROSS JOIN LATERAL (SELECT ctid AS place FROM orchestrator.runs WHERE id = next.id LIMIT 1) AS found
     WHERE r.ctid = found.place AND r.parked
    RETURNING r.id
)
SELECT lane FROM room
""")


def unpark(connection: Connection, lanes: Iterable[str]) -> set[str]:
    """Let those parked runs of lanes try again that are next of all shards; return the lanes that had parked runs."""
    return set(_UNPARK(connection, lanes=[*lanes]))


_LANES = Statement[str]("""
SELECT /* run_lanes.parked */ DISTINCT lane FROM orchestrator.runs
 WHERE lane IS NOT NULL AND ended_at IS NULL AND status = 'pending' AND parked
""")


def parked_lanes(connection: Connection) -> Sequence[str]:
    """Return the lanes in which runs of this shard are parked."""
    return _LANES(connection)
