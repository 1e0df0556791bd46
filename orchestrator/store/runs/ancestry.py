"""Runs that were started by runs: how many there are, and which wait for themselves; lanes that shards share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sqlalchemy import Connection

from orchestrator.store.batches import Batch
from orchestrator.store.sql import Prepared, Row, Statement

_NUMBERS = Batch("g", "id uuid, number int")
_GROW = Prepared[bytes](f"""
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
    """Count runs that are started below others; return those below which there would be too many."""
    return set(_GROW(connection, _NUMBERS(numbers.items()), limit=limit))


_PLACES = Prepared[Row]("""
SELECT /* ancestry.places */ r.id, coalesce(r.root, r.id) AS root, r.depth FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (SELECT id, root, depth FROM orchestrator.runs WHERE id = wanted.id LIMIT 1) AS r
""")


def places(connection: Connection, ids: Iterable[bytes]) -> dict[bytes, tuple[bytes, int]]:
    """Return where runs stand among those that started each other: the first of them, and how many are above."""
    return {row.id: (row.root, row.depth) for row in _PLACES(connection, ids=ids)}


# A run that holds a limit ends only after the runs below it. If each holder of a limit has one below it that waits for
# the same limit, none of them ever ends.
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


def waiting_for_themselves(
    connection: Connection, ids: Sequence[bytes], limit: int, *, is_shared: bool = False
) -> dict[bytes, int]:
    """Return those of these waiting child runs that can never begin, because all holders of their limit wait for runs
    that wait for it; and how many may hold it. Of each limit only the children of one run: when they fail, the others
    may have room."""
    first: dict[str, bytes] = {}
    found: dict[bytes, int] = {}
    for row in (_WAITING_SHARED if is_shared else _WAITING_ALONE)(connection, ids=ids, limit=limit):
        if first.setdefault(row.lane, row.parent_run) == row.parent_run:
            found[row.id] = row.lane_limit
    return found


# -- limits of workflows that the leaders of several shards keep together.
#
# A run begins only under the lock of its lane, which a leader has until its tick is committed, so that what it counts
# in all shards stays true. Nobody waits for such a lock: the run tries again. The oldest waiting run of all shards is
# next, and its leader finds out by itself that there is room. One leader alone uses none of this.

# By a statement of its own: the next one sees what was committed before the lock was had.
_LOCK = Prepared[str]("""
SELECT /* run_lanes.lock */ lane FROM unnest(%(lanes)s::text[]) AS asked(lane)
 WHERE pg_try_advisory_xact_lock(hashtextextended('orchestrator.' || lane, 2))
""")


def try_lanes(connection: Connection, lanes: Iterable[str]) -> set[str]:
    """Lock lanes until the transaction ends; return those that no other leader has locked."""
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
    """Let those parked runs of lanes try again that are next of all shards and have room.

    Return the lanes that had parked runs, and whether any run tries again.
    """
    found = dict(_UNPARK(connection, lanes=[*lanes]))
    return {*found}, any(found.values())


@Statement.function("""
SELECT /* run_lanes.parked */ lane, max(lane_limit) FROM orchestrator.runs
 WHERE lane IS NOT NULL AND ended_at IS NULL AND status = 'pending' AND parked GROUP BY lane
""")
def parked_lanes(connection: Connection) -> dict[str, int]:
    """Return the lanes in which runs of this shard are parked, and their limits."""
