"""What runs of workflows as code wait for beside tasks: timers and promises. And answers for those who ask them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection

from orchestrator.domain.tasks.task import TaskError
from orchestrator.store import arrays
from orchestrator.store.statement import Statement
from orchestrator.store.tasks.transitions import identifier

_START_TIMERS = Statement(
    """
INSERT INTO orchestrator.timers (run_id, id, due)
SELECT n.run_id, n.id, to_timestamp(n.due)
  FROM unnest(%(runs)s::uuid[], %(ids)s::uuid[], %(dues)s::double precision[]) AS n(run_id, id, due)
    ON CONFLICT DO NOTHING
"""
)


def start_timers(connection: Connection, timers: Sequence[tuple[bytes, bytes, float]]) -> None:
    """Create timers: run, id, and the Unix time at which it is due."""
    parameters = {
        "runs": arrays.uuids(run for run, _, _ in timers),
        "ids": arrays.uuids(timer for _, timer, _ in timers),
        "dues": arrays.numbers(due for _, _, due in timers),
    }
    _START_TIMERS(connection, parameters)


_FORGET_TIMERS = Statement(
    """
DELETE FROM orchestrator.timers t USING unnest(%(runs)s::uuid[], %(ids)s::uuid[]) AS gone(run_id, id)
 WHERE t.run_id = gone.run_id AND t.id = gone.id
"""
)
_FORGET_PROMISES = Statement(
    """
WITH gone AS (
    DELETE FROM orchestrator.promises p USING unnest(%(runs)s::uuid[], %(ids)s::uuid[]) AS gone(run_id, id)
     WHERE p.run_id = gone.run_id AND p.id = gone.id
    RETURNING p.run_id, p.name
)
INSERT INTO orchestrator.resolutions (run_id, name, number)
SELECT DISTINCT run_id, name, 0 FROM gone
    ON CONFLICT DO NOTHING
"""
)


def forget_timers(connection: Connection, timers: Sequence[tuple[bytes, bytes]]) -> None:
    """Remove timers, by run and id."""
    _FORGET_TIMERS(connection, {"runs": arrays.uuids(r for r, _ in timers), "ids": arrays.uuids(t for _, t in timers)})


def forget_promises(connection: Connection, promises: Sequence[tuple[bytes, bytes]]) -> None:
    """Remove promises, by run and id; that there was one of its name is remembered (`store/code/resolutions.py`)."""
    parameters = {"runs": arrays.uuids(run for run, _ in promises), "ids": arrays.uuids(one for _, one in promises)}
    _FORGET_PROMISES(connection, parameters)


_FIRE = Statement(
    """
WITH fired AS (
    DELETE FROM orchestrator.timers
     WHERE ctid = ANY (ARRAY(
           SELECT ctid FROM orchestrator.timers WHERE due <= %(now)s::timestamptz ORDER BY due, id LIMIT %(limit)s))
    RETURNING run_id, id, due
)
SELECT run_id::text, id::text FROM fired ORDER BY due, id
"""
)


def fire_timers(connection: Connection, now: datetime, limit: int) -> list[tuple[bytes, bytes]]:
    """Remove due timers, and return their runs and ids in the order in which they were due."""
    return [(identifier(row[0]), identifier(row[1])) for row in _FIRE(connection, {"now": now, "limit": limit})]


_CREATE_PROMISES = Statement(
    """
INSERT INTO orchestrator.promises (run_id, id, name, ordinal)
SELECT * FROM unnest(%(runs)s::uuid[], %(ids)s::uuid[], %(names)s::text[], %(ordinals)s::int[])
    ON CONFLICT DO NOTHING
"""
)


class NewPromise(NamedTuple):
    """A promise that somebody outside is to keep."""

    run: bytes
    id: bytes
    name: str
    ordinal: int


def create_promises(connection: Connection, promises: Sequence[NewPromise]) -> None:
    """Create promises."""
    parameters = {
        "runs": arrays.uuids(promise.run for promise in promises),
        "ids": arrays.uuids(promise.id for promise in promises),
        "names": [promise.name for promise in promises],
        "ordinals": arrays.numbers(promise.ordinal for promise in promises),
    }
    _CREATE_PROMISES(connection, parameters)


_OPEN_PROMISES = Statement(
    """
SELECT p.run_id::text, p.id::text, p.name FROM unnest(%(runs)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (SELECT * FROM orchestrator.promises WHERE run_id = wanted.id OFFSET 0) AS p
 ORDER BY p.run_id, p.ordinal
"""
)


def open_promises(connection: Connection, runs: Sequence[bytes]) -> list[tuple[bytes, bytes, str]]:
    """Return run, id and name of the open promises of runs, oldest first."""
    rows = _OPEN_PROMISES(connection, {"runs": arrays.uuids(runs)})
    return [(identifier(row[0]), identifier(row[1]), row[2]) for row in rows]


class Answered(NamedTuple):
    """What came of a request."""

    id: bytes
    result: bytes | None = None
    error: TaskError | None = None


_ANSWER = Statement(
    """
WITH old AS (
    DELETE FROM orchestrator.answers WHERE at < %(now)s::timestamptz - interval '1 hour'
)
INSERT INTO orchestrator.answers (id, at, result, error)
SELECT n.id, %(now)s::timestamptz, n.result, n.error
  FROM unnest(%(ids)s::uuid[], %(results)s::bytea[], %(errors)s::jsonb[]) AS n(id, result, error)
    ON CONFLICT (id) DO NOTHING
"""
)


def answer(connection: Connection, answers: Iterable[Answered], now: datetime) -> None:
    """Keep answers for those who asked; the first to a request counts."""
    rows = list(answers)
    parameters = {
        "now": now,
        "ids": arrays.uuids(row.id for row in rows),
        "results": arrays.blobs(row.result for row in rows),
        "errors": [row.error and _json(row.error) for row in rows],
    }
    _ANSWER(connection, parameters)


_FIND_ANSWER = "SELECT result, error FROM orchestrator.answers WHERE id = %(id)s::uuid"


def find_answer(connection: Connection, request: bytes) -> Answered | None:
    """Return the answer to a request, if there is one yet."""
    row = connection.exec_driver_sql(_FIND_ANSWER, {"id": request.hex()}).one_or_none()
    if row is None:
        return None
    error = TaskError.stored(row[1])
    return Answered(request, None if row[0] is None else bytes(row[0]), error)


def _json(error: TaskError) -> str:
    return error.to_json()
