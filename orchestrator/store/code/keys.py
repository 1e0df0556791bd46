"""Ids of people's own for runs of workflows as code: one run has such an id at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.store import arrays
from orchestrator.store.statement import Statement
from orchestrator.store.tasks.transitions import identifier

OWN_ID = "right(k.key, -length(workflow) - CASE WHEN strpos(workflow, '/') > 0 THEN 2 ELSE 1 END)"
"""The id that somebody has chosen: it stands behind the name of the workflow (`domain/limits/names.scoped`)."""

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


_FIND = f"""
SELECT r.id, r.workflow, {OWN_ID} FROM orchestrator.run_keys k JOIN orchestrator.runs r ON r.id = k.run_id
 WHERE k.key = %(id)s OR (right(k.key, %(length)s) = %(id)s AND {OWN_ID} = %(id)s)
 UNION ALL
SELECT id, workflow, key FROM orchestrator.runs WHERE key = %(id)s
"""


class Found(NamedTuple):
    """A run, and the id of their own that somebody gave it."""

    run: UUID
    workflow: str
    key: str


def find(connection: Connection, key: str) -> list[Found]:
    """Return the runs that have a chosen id, or idempotency key: one a workflow. `workflow/id` is that of one."""
    rows = connection.exec_driver_sql(_FIND, {"id": key, "length": len(key)})
    return [Found(*row) for row in rows]


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
