"""Decides which stored payloads are still referenced.

A payload belongs to an owner: the run of the task that wrote it, or else the task. A row of another task or run may
copy a reference (a callback's argument, a step that a rerun keeps, a child's result in a run's history); that task or
run is then a *keeper* of the owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.references import owners_in
from orchestrator.store.batches import Batch
from orchestrator.store.sql import Statement

_EXISTS = """(EXISTS (SELECT FROM orchestrator.ended_tasks e WHERE e.id = {id})
           OR EXISTS (SELECT FROM orchestrator.tasks t WHERE t.id = {id})
           OR EXISTS (SELECT FROM orchestrator.runs r WHERE r.id = {id}))"""

_GONE = Statement[UUID](f"""
SELECT /* payloads.gone */ o.id FROM unnest(%(owners)s::uuid[]) AS o (id)
 WHERE NOT {_EXISTS.format(id="o.id")}
   AND NOT EXISTS (SELECT FROM orchestrator.payload_keeps k
                    WHERE k.owner = o.id AND {_EXISTS.format(id="k.keeper")})
""")


def deleted_owners(connection: Connection, owners: Sequence[bytes]) -> set[bytes]:
    """Return the owners that are deleted and have no remaining keeper."""
    return {owner.bytes for owner in _GONE(connection, owners=owners)}


_ATTEMPTS = Statement[tuple[UUID, int]]("""
SELECT /* payloads.attempts */ id, attempt FROM orchestrator.ended_tasks WHERE id = ANY (%(tasks)s::uuid[])
 UNION ALL
SELECT id, attempt FROM orchestrator.tasks WHERE id = ANY (%(tasks)s::uuid[])
""")


def attempts(connection: Connection, tasks: Sequence[bytes]) -> dict[bytes, int]:
    """Return the number of the current or last attempt of each task that exists."""
    return {task.bytes: attempt for task, attempt in _ATTEMPTS(connection, tasks=tasks)}


_OPEN = Statement[UUID](
    "SELECT /* payloads.open_tasks */ id FROM orchestrator.tasks WHERE id = ANY (%(tasks)s::uuid[])"
)


def open_tasks(connection: Connection, tasks: Sequence[bytes]) -> set[bytes]:
    """Return the tasks that have not ended: the output of their executions may still be read."""
    return {task.bytes for task in _OPEN(connection, tasks=tasks)}


_PAIRS = Batch("pairs", "owner uuid, keeper uuid")
_KEEP = Statement[None](f"""
INSERT /* payloads.keep */ INTO orchestrator.payload_keeps (owner, keeper)
SELECT DISTINCT pairs.owner, pairs.keeper FROM {_PAIRS} ON CONFLICT DO NOTHING
""")


def add_keepers(connection: Connection, pairs: Iterable[tuple[bytes, bytes]]) -> None:
    """Record keepers of owners, in the transaction that copies the references."""
    _KEEP(connection, _PAIRS(sorted(set(pairs))))


def keep_named(connection: Connection, events: Iterable[tuple[bytes, int, str, bytes]]) -> None:
    """Record the keepers for events of runs that reference other owners: a child's result, a forwarded signal."""
    pairs = {(owner, run) for run, _, _, data in events for owner in owners_in(data) if owner != run}
    if pairs:
        add_keepers(connection, pairs)


@Statement.function("""
INSERT /* payloads.keep_all */ INTO orchestrator.payload_keeps (owner, keeper)
SELECT %(run)s::uuid, %(new)s::uuid
 UNION SELECT owner, %(new)s::uuid FROM orchestrator.payload_keeps WHERE keeper = %(run)s::uuid
ON CONFLICT DO NOTHING
""")
def copy_keepers(connection: Connection, run: bytes, new: bytes) -> None:
    """Record that the run `new` references everything that `run` references: rows were copied."""


@Statement.function(f"""
WITH /* payloads.prune */ old AS (
    DELETE FROM orchestrator.payload_keeps WHERE ctid = ANY (ARRAY(
           SELECT ctid FROM orchestrator.payload_keeps k WHERE NOT {_EXISTS.format(id="k.keeper")} LIMIT %(limit)s))
    RETURNING 1
)
SELECT count(*) FROM old
""")
def prune(connection: Connection, limit: int) -> int:
    """Delete records of keepers that no longer exist; return their number."""
