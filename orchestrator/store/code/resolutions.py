"""What people said of promises that the code of runs does not wait for yet (`domain/code/promises.py`).

A row of number 0 says only that a promise of the name was settled or given up, so that who comes second is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.code.promises import Resolution
from orchestrator.domain.tasks.task import TaskError
from orchestrator.store import arrays
from orchestrator.store.statement import Statement
from orchestrator.store.tasks.transitions import identifier


class Kept(NamedTuple):
    """A resolution that waits for its promise."""

    run: bytes
    number: int
    """Its place among those of its name, from 1; 0 marks a name of which a promise was settled, and holds nothing."""
    what: Resolution


_OF_RUNS = Statement(
    """
SELECT k.run_id::text, k.number, k.name, k.value, k.error FROM unnest(%(runs)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (SELECT * FROM orchestrator.resolutions WHERE run_id = wanted.id OFFSET 0) AS k
 ORDER BY k.run_id, k.name, k.number
"""
)


def of_runs(connection: Connection, runs: Iterable[bytes]) -> list[Kept]:
    """Return everything that is known of names of promises in runs, in order."""
    return [
        Kept(
            identifier(row[0]),
            row[1],
            Resolution(
                row[2],
                None if row[3] is None else bytes(row[3]),
                row[4] and TaskError(row[4]["kind"], row[4]["message"]),
            ),
        )
        for row in _OF_RUNS(connection, {"runs": arrays.uuids(runs)})
    ]


_KEEP = Statement(
    """
INSERT INTO orchestrator.resolutions (run_id, name, number, value, error)
SELECT n.run_id, n.name, n.number, n.value, n.error
  FROM unnest(%(runs)s::uuid[], %(names)s::text[], %(numbers)s::int[], %(values)s::bytea[], %(errors)s::jsonb[])
       AS n(run_id, name, number, value, error)
 CROSS JOIN LATERAL (
       SELECT FROM orchestrator.runs WHERE id = n.run_id AND code AND ended_at IS NULL LIMIT 1) AS open
    ON CONFLICT DO NOTHING
RETURNING run_id::text, name
"""
)


def keep(connection: Connection, rows: Sequence[Kept]) -> set[tuple[bytes, str]]:
    """Keep resolutions for runs that are open; return those runs, with the names."""
    parameters = {
        "runs": arrays.uuids(row.run for row in rows),
        "names": [row.what.name for row in rows],
        "numbers": arrays.numbers(row.number for row in rows),
        "values": arrays.blobs(row.what.value for row in rows),
        "errors": [row.what.error and _json(row.what.error) for row in rows],
    }
    return {(identifier(row[0]), row[1]) for row in _KEEP(connection, parameters)}


_REMOVE = Statement(
    """
DELETE FROM orchestrator.resolutions k
 USING unnest(%(runs)s::uuid[], %(names)s::text[], %(numbers)s::int[]) AS gone(run_id, name, number)
 CROSS JOIN LATERAL (
       SELECT ctid AS place FROM orchestrator.resolutions
        WHERE run_id = gone.run_id AND name = gone.name AND number = gone.number LIMIT 1) AS found
 WHERE k.ctid = found.place
"""
)


def remove(connection: Connection, rows: Sequence[Kept]) -> None:
    """Forget resolutions that have found their promises."""
    parameters = {
        "runs": arrays.uuids(row.run for row in rows),
        "names": [row.what.name for row in rows],
        "numbers": arrays.numbers(row.number for row in rows),
    }
    _REMOVE(connection, parameters)


def numbered(run: bytes, some: Iterable[Resolution]) -> list[Kept]:
    """Return resolutions in the order in which promises of their names will have them."""
    return [Kept(run, number, what) for number, what in enumerate(some, 1)]


def _json(error: TaskError) -> str:
    return msgspec.json.encode({"kind": error.kind, "message": error.message}).decode()
