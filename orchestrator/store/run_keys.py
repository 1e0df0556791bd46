"""Ids of people's own for runs of workflows as code: one run has such an id at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import Connection

from orchestrator.store import arrays
from orchestrator.store.statement import Statement
from orchestrator.store.transitions import identifier

_TAKE = """
INSERT INTO orchestrator.run_keys AS held (key, run_id) VALUES (%(key)s, %(run)s::uuid)
    ON CONFLICT (key) DO UPDATE SET run_id = excluded.run_id
 WHERE %(anew)s AND NOT EXISTS (SELECT FROM orchestrator.runs r WHERE r.id = held.run_id AND r.ended_at IS NULL)
RETURNING run_id::text
"""
_HOLDER = """
SELECT k.run_id::text, r.status FROM orchestrator.run_keys k LEFT JOIN orchestrator.runs r ON r.id = k.run_id
 WHERE k.key = %(key)s
"""


def take(connection: Connection, key: str, run: bytes, *, anew: bool) -> tuple[bytes, str] | None:
    """Let a run have a chosen id, in the transaction that starts it; else return the run that has it, and its state.

    `anew` takes it over from a run that has ended.
    """
    parameters = {"key": key, "run": run.hex(), "anew": anew}
    if connection.exec_driver_sql(_TAKE, parameters).one_or_none() is not None:
        return None
    row = connection.exec_driver_sql(_HOLDER, {"key": key}).one()
    return identifier(row[0]), row[1]


_HOLDERS = Statement("SELECT key, run_id::text FROM orchestrator.run_keys WHERE key = ANY(%(keys)s::text[])")


def holders(connection: Connection, keys: Sequence[str]) -> dict[str, bytes]:
    """Return the runs that have chosen ids."""
    return {row[0]: identifier(row[1]) for row in _HOLDERS(connection, {"keys": list(keys)})}


_PASS_ON = Statement(
    """
UPDATE orchestrator.run_keys k SET run_id = p.new
  FROM unnest(%(old)s::uuid[], %(new)s::uuid[]) AS p(old, new)
 CROSS JOIN LATERAL (SELECT ctid AS place FROM orchestrator.run_keys WHERE run_id = p.old OFFSET 0) AS found
 WHERE k.ctid = found.place
RETURNING p.new::text
"""
)


def pass_on(connection: Connection, successors: Iterable[tuple[bytes, bytes]]) -> set[bytes]:
    """Let the successors of runs have the ids that those were started under; return those that have one now.

    A client may be giving the id of a run that has ended to another one at this moment; then that one keeps it.
    """
    pairs = list(successors)
    parameters = {"old": arrays.uuids(old for old, _ in pairs), "new": arrays.uuids(new for _, new in pairs)}
    return {identifier(row[0]) for row in _PASS_ON(connection, parameters)}
