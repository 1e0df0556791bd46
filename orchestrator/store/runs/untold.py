"""What happened to runs that could not be told in the same tick."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.runs.happened import Happened
from orchestrator.store import arrays
from orchestrator.store.runs.trees import ByTurns
from orchestrator.store.statement import Statement
from orchestrator.store.tasks.transitions import identifier

_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(Happened).decode

_WAITING = Statement(
    """
SELECT id::text FROM (
       SELECT id FROM orchestrator.runs WHERE stuck IS NOT NULL AND ended_at IS NULL AND NOT code
        ORDER BY id LIMIT %(limit)s) AS stuck
 UNION ALL
SELECT run_id::text FROM (SELECT run_id FROM orchestrator.untold ORDER BY run_id LIMIT %(limit)s) AS late
"""
)


def waiting(connection: Connection, limit: int) -> set[bytes] | None:
    """Return the runs that are not told anything at the moment, unless there may be more than so many.

    Some are stuck, others have to wait for their turn.
    """
    rows = _WAITING(connection, {"limit": limit + 1})
    return None if len(rows) > limit else {identifier(row[0]) for row in rows}


_WAITING_AMONG = Statement(
    """
SELECT w.id::text FROM unnest(%(runs)s::uuid[]) AS w(id)
 WHERE (SELECT true FROM orchestrator.untold WHERE run_id = w.id LIMIT 1)
    OR (SELECT stuck IS NOT NULL AND ended_at IS NULL AND NOT code FROM orchestrator.runs WHERE id = w.id LIMIT 1)
"""
)


def waiting_among(connection: Connection, runs: Iterable[bytes]) -> set[bytes]:
    """Return those of these runs that are not told anything at the moment."""
    return {identifier(row[0]) for row in _WAITING_AMONG(connection, {"runs": arrays.uuids(runs)})}


_ADD = Statement(
    """
INSERT INTO orchestrator.untold (run_id, held, body)
SELECT n.run_id, %(held)s::boolean OR coalesce(
       (SELECT stuck IS NOT NULL FROM orchestrator.runs WHERE id = n.run_id), true), n.body
  FROM unnest(%(runs)s::uuid[], %(bodies)s::bytea[]) WITH ORDINALITY AS n(run_id, body, place) ORDER BY n.place
"""
)


def add(connection: Connection, some: Iterable[tuple[bytes, Happened]], *, is_over: bool = False) -> None:
    """Keep what happened until runs can be told: those that are stuck when they are freed, others in the next tick.

    If the runs are over, they are told when they have begun again.
    """
    rows = list(some)
    if not rows:
        return
    parameters = {
        "held": is_over,
        "runs": arrays.uuids(run for run, _ in rows),
        "bodies": arrays.blobs(_encode(happened) for _, happened in rows),
    }
    _ADD(connection, parameters)


_RELEASE = Statement(
    """
UPDATE orchestrator.untold u SET held = false
 WHERE u.run_id = ANY (%(runs)s::uuid[]) AND u.held
   AND (SELECT stuck IS NULL FROM orchestrator.runs WHERE id = u.run_id)
"""
)


def release(connection: Connection, runs: Sequence[bytes]) -> None:
    """Let runs be told that have begun again."""
    _RELEASE(connection, {"runs": arrays.uuids(runs)})


class Place(NamedTuple):
    """What waits at one place of the line."""

    id: int
    run: bytes
    size: int


class Line:
    """What is to be told next; of each run in order."""

    def __init__(self) -> None:
        self._find = ByTurns("untold", "NOT held", "id, run_id::text, octet_length(body)", run="run_id")

    def __call__(self, connection: Connection, limit: int) -> list[Place]:
        """Return so many places of the line."""
        return [Place(row[0], identifier(row[1]), row[2]) for row in self._find(connection, limit)]


_READ = Statement(
    """
SELECT id, run_id::text, body FROM orchestrator.untold WHERE id = ANY (%(ids)s::bigint[]) ORDER BY id
"""
)


class Waited(NamedTuple):
    """What one run has not been told, or the first of it, and where in the line that stands."""

    run: bytes
    ids: list[int]
    happened: list[Happened]


def read(connection: Connection, ids: Sequence[int]) -> list[Waited]:
    """Return what waits at these places of the line, by run."""
    found: dict[bytes, Waited] = {}
    for place, run, body in _READ(connection, {"ids": list(ids)}):
        key = identifier(run)
        waited = found.setdefault(key, Waited(key, [], []))
        waited.ids.append(place)
        waited.happened.append(_decode(body))
    return list(found.values())


# The rows that it deletes are there for all of the statement.
_REMOVE = Statement(
    """
WITH gone AS (DELETE FROM orchestrator.untold WHERE id = ANY (%(ids)s::bigint[]) RETURNING run_id)
SELECT DISTINCT run_id::text FROM gone
 WHERE (SELECT true FROM orchestrator.untold u
         WHERE u.run_id = gone.run_id AND u.id <> ALL (%(ids)s::bigint[]) LIMIT 1)
"""
)


def remove(connection: Connection, ids: Sequence[int]) -> set[bytes]:
    """Keep no longer what waits at these places; return the runs among theirs for which there is more."""
    return {identifier(row[0]) for row in _REMOVE(connection, {"ids": list(ids)})}


_TAKE_OF = Statement(
    """
WITH gone AS (
    DELETE FROM orchestrator.untold WHERE run_id = ANY (%(runs)s::uuid[]) RETURNING id, run_id, body
), freed AS (
    UPDATE orchestrator.runs SET stuck = NULL WHERE id = ANY (%(runs)s::uuid[])
)
SELECT run_id::text, body FROM gone ORDER BY id
"""
)


def take_of(connection: Connection, runs: Sequence[bytes]) -> dict[bytes, list[Happened]]:
    """Return, and no longer keep, all that these runs have not been told; none of them is stuck any more."""
    found: dict[bytes, list[Happened]] = {}
    for run, body in _TAKE_OF(connection, {"runs": arrays.uuids(runs)}):
        found.setdefault(identifier(run), []).append(_decode(body))
    return found
