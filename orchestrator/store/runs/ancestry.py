"""Ancestors of runs: numbers of descendants, and child runs in a deadlock; and lanes that shards share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sqlalchemy import Connection

from orchestrator.store.batches import Batch
from orchestrator.store.sql import Prepared, Row, Statement

_NUMBERS = Batch("g", "id uuid, number int")
_ADD_DESCENDANTS = Prepared[bytes](f"""
WITH /* ancestry.count_descendants */ wanted AS (
    SELECT g.id, g.number, r.place, r.descendants + g.number > %(limit)s AS too_many
      FROM {_NUMBERS}
     CROSS JOIN LATERAL (
           SELECT ctid AS place, descendants FROM orchestrator.runs WHERE id = g.id LIMIT 1) AS r
), grown AS (
    UPDATE orchestrator.runs r SET descendants = r.descendants + wanted.number
      FROM wanted WHERE r.ctid = wanted.place AND NOT wanted.too_many
)
SELECT id FROM wanted WHERE too_many
""")


def count_descendants(connection: Connection, numbers: Mapping[bytes, int], limit: int) -> set[bytes]:
    """Add to the numbers of descendants of root runs; return the roots that would get more than `limit`."""
    return set(_ADD_DESCENDANTS(connection, _NUMBERS(numbers.items()), limit=limit))


_ANCESTRY = Prepared[Row]("""
SELECT /* ancestry.places */ r.id, coalesce(r.root, r.id) AS root, r.depth FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (SELECT id, root, depth FROM orchestrator.runs WHERE id = wanted.id LIMIT 1) AS r
""")


def roots_and_depths(connection: Connection, ids: Iterable[bytes]) -> dict[bytes, tuple[bytes, int]]:
    """Return the root and the number of ancestors of each run."""
    return {row.id: (row.root, row.depth) for row in _ANCESTRY(connection, ids=ids)}


# A run in a lane ends only after its descendants. If every running run of a lane has a descendant that waits for the
# same lane, none of them ever ends.
_WAITING_FOR_THEMSELVES = """
WITH /* {name} */ RECURSIVE asked AS MATERIALIZED (
    SELECT r.id, r.lane, r.lane_limit, r.parent_run FROM unnest(%(ids)s::uuid[]) AS wanted(id)
     CROSS JOIN LATERAL (SELECT * FROM {runs} WHERE id = wanted.id LIMIT 1) AS r
), lanes AS MATERIALIZED (
    SELECT DISTINCT lane FROM asked
), parked AS (
    SELECT id, lane, parent_run FROM asked
     UNION
    SELECT r.id, lanes.lane, r.parent_run FROM lanes
     CROSS JOIN LATERAL (
           SELECT id, parent_run FROM {runs}
            WHERE lane = lanes.lane AND status = 'pending' AND parked AND parent_run IS NOT NULL LIMIT %(limit)s) AS r
), above (id, lane, upper) AS (
    SELECT id, lane, parent_run FROM parked
     UNION ALL
    SELECT above.id, above.lane, r.parent_run FROM above
     CROSS JOIN LATERAL (SELECT parent_run FROM {runs} WHERE id = above.upper LIMIT 1) AS r
     WHERE r.parent_run IS NOT NULL
), holders AS MATERIALIZED (
    SELECT lanes.lane, r.id FROM lanes
     CROSS JOIN LATERAL (
           SELECT id FROM {runs} WHERE lane = lanes.lane AND status = 'running' OFFSET 0) AS r
), blocked AS (
    SELECT lane FROM holders
     GROUP BY lane HAVING bool_and(EXISTS (SELECT FROM above WHERE above.lane = holders.lane AND upper = holders.id))
)
SELECT asked.id, asked.lane_limit, asked.lane, asked.parent_run FROM asked JOIN blocked USING (lane)
 WHERE EXISTS (SELECT FROM above JOIN holders ON holders.lane = above.lane AND holders.id = above.upper
                WHERE above.id = asked.id)
 ORDER BY asked.parent_run
"""
_WAITING_ALONE = Prepared[Row](
    _WAITING_FOR_THEMSELVES.format(name="ancestry.waiting_for_themselves", runs="orchestrator.runs")
)
_WAITING_SHARED = Prepared[Row](
    _WAITING_FOR_THEMSELVES.format(name="ancestry.waiting_shared", runs="orchestrator.all_runs")
)


def deadlocked(
    connection: Connection, ids: Sequence[bytes], limit: int, *, is_shared: bool = False
) -> dict[bytes, int]:
    """Return waiting child runs that can never begin, with their lane's limit: all holders of the lane wait for runs
    that wait for it. For each lane, return the children of only one run: when they fail, there may be room for the
    rest."""
    parent_of_lane: dict[str, bytes] = {}
    deadlocked: dict[bytes, int] = {}
    for row in (_WAITING_SHARED if is_shared else _WAITING_ALONE)(connection, ids=ids, limit=limit):
        if parent_of_lane.setdefault(row.lane, row.parent_run) == row.parent_run:
            deadlocked[row.id] = row.lane_limit
    return deadlocked


# -- concurrency limits that several shards share.
#
# A run begins only under the lock of its lane, which the leader holds until its tick is committed, so the count over
# all shards stays true. No leader waits for such a lock: the run is tried again. The oldest waiting run of all shards
# is next, and its leader finds the room by polling. A single leader uses none of this.

# A separate statement: the next one sees everything that was committed before the lock was granted.
_LOCK = Prepared[str]("""
SELECT /* run_lanes.lock */ lane FROM unnest(%(lanes)s::text[]) AS asked(lane)
 WHERE pg_try_advisory_xact_lock(hashtextextended('orchestrator.' || lane, 2))
""")


def try_lanes(connection: Connection, lanes: Iterable[str]) -> set[str]:
    """Lock lanes until the transaction ends; return the lanes that no other leader has locked."""
    return set(_LOCK(connection, lanes=[*lanes]))


_PARKED = "lane = {}.lane AND ended_at IS NULL AND status = 'pending' AND parked"
_UNPARK = Prepared[tuple[str, bool]](f"""
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
SELECT lane, EXISTS (SELECT FROM freed) AS any_freed FROM room
""")


def unpark(connection: Connection, lanes: Iterable[str]) -> tuple[set[str], bool]:
    """Unpark the runs of lanes that are next over all shards and have room.

    Return the lanes with parked runs, and whether any run was unparked.
    """
    unparked = dict(_UNPARK(connection, lanes=[*lanes]))
    return {*unparked}, any(unparked.values())


@Statement.function("""
SELECT /* run_lanes.parked */ lane, max(lane_limit) FROM orchestrator.runs
 WHERE lane IS NOT NULL AND ended_at IS NULL AND status = 'pending' AND parked GROUP BY lane
""")
def parked_lanes(connection: Connection) -> dict[str, int]:
    """Return the lanes in which runs of this shard are parked, with their limits."""
