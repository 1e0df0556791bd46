"""Limits that the leaders of several shards keep together: how much each of them has in flight.

A leader locks the names that it is about to claim from, in one order for all, until its tick is committed. So the sum
is exact, and two leaders wait for each other only where they share a limit. One leader alone uses none of this. So a
leader gives nothing out of a limit before each shard has said that it takes part: until then others may hold anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import Connection

from orchestrator.store.batches import Batch
from orchestrator.store.sql import Prepared, Row

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


_HELD = Batch("use", "name text, held int")
_SAVE = Prepared[None](f"""
INSERT /* shared.save */ INTO orchestrator.lane_use AS mine (name, shard, held)
SELECT use.name, %(shard)s::int, use.held FROM {_HELD}
    ON CONFLICT (name, shard) DO UPDATE SET held = excluded.held
""")
_FORGET = Prepared[None](
    "DELETE /* shared.forget */ FROM orchestrator.lane_use WHERE shard = %(shard)s AND name = ANY(%(names)s::text[])"
)
_MINE = Prepared[tuple[str, int]](
    "SELECT /* shared.mine */ name, held FROM orchestrator.lane_use WHERE shard = %(shard)s"
)


def mine(connection: Connection, shard: int) -> dict[str, int]:
    """Return what this shard has said that it holds."""
    return dict(_MINE(connection, shard=shard))


def save(connection: Connection, shard: int, held: Mapping[str, int]) -> None:
    """Store what this shard holds now, of what has changed."""
    if some := [(name, number) for name, number in sorted(held.items()) if number > 0]:
        _SAVE(connection, _HELD(some), shard=shard)
    if none := [name for name, number in held.items() if number <= 0]:
        _FORGET(connection, names=none, shard=shard)
