"""Answers to promises that the code of runs does not wait for yet (`domain/code/promises.py`).

A row of number 0 says that a promise of the name was settled or given up, so a second answer is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.code.promises import Resolution
from orchestrator.domain.tasks.task import TaskError
from orchestrator.store.batches import Batch
from orchestrator.store.inbox import RequestKind
from orchestrator.store.sql import Prepared, Row, Statement


class Kept(NamedTuple):
    """A resolution that waits for its promise."""

    run: bytes
    number: int
    """Its place among those of its name, from 1; 0 marks a name of which a promise was settled, and holds nothing."""
    what: Resolution


_OF_RUNS = Prepared[Row]("""
SELECT /* resolutions.of_runs */ k.run_id, k.number, k.name, k.value, k.error
  FROM unnest(%(runs)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (SELECT * FROM orchestrator.resolutions WHERE run_id = wanted.id OFFSET 0) AS k
 ORDER BY k.run_id, k.name, k.number
""")


def of_runs(connection: Connection, runs: Iterable[bytes]) -> list[Kept]:
    """Return everything that is known of names of promises in runs, in order."""
    return [Kept(row.run_id, row.number, _resolution(row)) for row in _OF_RUNS(connection, runs=runs)]


def _resolution(row: Row) -> Resolution:
    return Resolution(row.name, row.value, row.error and TaskError(row.error["kind"], row.error["message"]))


_KEPT = Batch("n", "run_id uuid, name text, number int, value bytea, error jsonb")
_KEEP = Prepared[tuple[bytes, str]](f"""
INSERT /* resolutions.keep */ INTO orchestrator.resolutions (run_id, name, number, value, error)
SELECT n.run_id, n.name, n.number, n.value, n.error
  FROM {_KEPT}
 CROSS JOIN LATERAL (
       SELECT FROM orchestrator.runs WHERE id = n.run_id AND code AND ended_at IS NULL LIMIT 1) AS open
    ON CONFLICT DO NOTHING
RETURNING run_id, name
""")


def keep(connection: Connection, rows: Sequence[Kept]) -> set[tuple[bytes, str]]:
    """Keep resolutions for runs that are open; return those runs, with the names."""
    kept = [
        (row.run, row.what.name, row.number, row.what.value, row.what.error and _json(row.what.error)) for row in rows
    ]
    return set(_KEEP(connection, _KEPT(kept)))


_GONE = Batch("gone", "run_id uuid, name text, number int")
_REMOVE = Prepared[None](f"""
DELETE /* resolutions.remove */ FROM orchestrator.resolutions k
 USING {_GONE}
 CROSS JOIN LATERAL (
       SELECT ctid AS place FROM orchestrator.resolutions
        WHERE run_id = gone.run_id AND name = gone.name AND number = gone.number LIMIT 1) AS found
 WHERE k.ctid = found.place
""")


def remove(connection: Connection, rows: Sequence[Kept]) -> None:
    """Forget resolutions that have found their promises."""
    _REMOVE(connection, _GONE((row.run, row.what.name, row.number) for row in rows))


_LOCK = Statement[None]("""
SELECT /* resolutions.lock */ pg_advisory_xact_lock(hashtextextended('orchestrator.code.' || %(run)s::uuid::text, 0))
""")
_STANDING = Statement[Row]("""
SELECT /* resolutions.standing */
       (SELECT count(*) FROM orchestrator.promises WHERE run_id = %(run)s::uuid AND name = %(name)s) AS open,
       (SELECT count(*) FROM orchestrator.inbox
         WHERE kind IN (%(resolve)s, %(reject)s) AND target = %(run)s::uuid AND body->>'name' = %(name)s) AS under_way,
       EXISTS (SELECT FROM orchestrator.resolutions WHERE run_id = %(run)s::uuid AND name = %(name)s) AS is_settled
""")


def take_turn(connection: Connection, run: bytes, name: str) -> bool:
    """Lock the promises of a run until the end of the transaction; say whether those of a name are decided.

    Then there are answers for all open ones. The leader will find the same, in the order of requests: a decided promise
    takes none, and one that the code has not made yet takes the first.
    """
    _LOCK(connection, run=run)
    row = _STANDING.one(
        connection, run=run, name=name, resolve=str(RequestKind.RESOLVE), reject=str(RequestKind.REJECT)
    )
    is_said = row.is_settled or row.under_way > 0
    return bool(is_said and row.open <= row.under_way)


def numbered(run: bytes, some: Iterable[Resolution]) -> list[Kept]:
    """Return resolutions in the order in which promises of their names will have them."""
    return [Kept(run, number, what) for number, what in enumerate(some, 1)]


def _json(error: TaskError) -> str:
    return msgspec.json.encode({"kind": error.kind, "message": error.message}).decode()
