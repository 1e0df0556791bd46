"""Timers and promises of workflows as code, and answers to requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.code.other_runs import WAIT
from orchestrator.domain.code.promises import Resolution
from orchestrator.domain.tasks.task import TaskError
from orchestrator.store.batches import Batch
from orchestrator.store.inbox import RequestKind
from orchestrator.store.sql import Prepared, Row, Statement

_TO_DELETE = Batch("gone", "run_id uuid, id uuid")

_TIMER_STEP = 2e-6
"""Seconds between timers with the same due time: the smallest step that neither a double nor Postgres rounds away."""
_TIMERS = Batch("n", "run_id uuid, id uuid, due double precision")
_START_TIMERS = Prepared[None](f"""
INSERT /* expectations.start_timers */ INTO orchestrator.timers (run_id, id, due)
SELECT n.run_id, n.id, to_timestamp(n.due)
  FROM {_TIMERS}
    ON CONFLICT DO NOTHING
""")


def start_timers(connection: Connection, timers: Sequence[tuple[bytes, bytes, float]]) -> None:
    """Insert timers: run, id, and the due time in Unix seconds. Timers with the same due time fire in this order."""
    earlier: Counter[tuple[bytes, float]] = Counter()
    rows: list[tuple[bytes, bytes, float]] = []
    for run, timer, due in timers:
        rows.append((run, timer, due + earlier[run, due] * _TIMER_STEP))
        earlier[run, due] += 1
    _START_TIMERS(connection, _TIMERS(rows))


_FORGET_TIMERS = Prepared[None](f"""
DELETE /* expectations.forget_timers */ FROM orchestrator.timers t USING {_TO_DELETE}
 CROSS JOIN LATERAL (
       SELECT ctid AS tid FROM orchestrator.timers WHERE run_id = gone.run_id AND id = gone.id LIMIT 1) AS found
 WHERE t.ctid = found.tid
""")
_FORGET_PROMISES = Prepared[tuple[bytes, bytes]](f"""
WITH /* expectations.forget_promises */ gone AS (
    DELETE FROM orchestrator.promises p USING {_TO_DELETE}
     CROSS JOIN LATERAL (
           SELECT ctid AS tid FROM orchestrator.promises WHERE run_id = gone.run_id AND id = gone.id LIMIT 1) AS found
     WHERE p.ctid = found.tid
    RETURNING p.run_id, p.id, p.name
), noted AS (
    INSERT INTO orchestrator.resolutions (run_id, name, number)
    SELECT DISTINCT run_id, name, 0 FROM gone
        ON CONFLICT DO NOTHING
)
SELECT run_id, id FROM gone
""")


def forget_timers(connection: Connection, timers: Sequence[tuple[bytes, bytes]]) -> None:
    """Delete timers, by run and id."""
    _FORGET_TIMERS(connection, _TO_DELETE(timers))


def forget_promises(connection: Connection, promises: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Delete promises, by run and id; return those that were open.

    A resolution with number 0 records that a promise of this name existed.
    """
    return _FORGET_PROMISES(connection, _TO_DELETE(promises))


@Prepared.function("""
WITH /* expectations.fire_timers */ fired AS (
    DELETE FROM orchestrator.timers
     WHERE ctid = ANY (ARRAY(
           SELECT ctid FROM orchestrator.timers WHERE due <= %(now)s::timestamptz ORDER BY due, id LIMIT %(limit)s))
    RETURNING run_id, id, due
)
SELECT run_id, id FROM fired ORDER BY due, id
""")
def fire_timers(connection: Connection, now: datetime, limit: int) -> list[tuple[bytes, bytes]]:
    """Delete due timers; return their runs and ids in the order of their due times."""


class NewPromise(NamedTuple):
    """A promise that a client settles."""

    run: bytes
    id: bytes
    name: str
    ordinal: int


_PROMISES = Batch("n", NewPromise)
_CREATE_PROMISES = Prepared[None](f"""
INSERT /* expectations.create_promises */ INTO orchestrator.promises (run_id, id, name, ordinal)
SELECT * FROM {_PROMISES}
    ON CONFLICT DO NOTHING
""")


def create_promises(connection: Connection, promises: Sequence[NewPromise]) -> None:
    _CREATE_PROMISES(connection, _PROMISES(promises))


_RENAMED = Batch("n", NewPromise)
_RENAME_WAITS = Prepared[None](f"""
UPDATE /* expectations.rename_waits */ orchestrator.promises p SET name = n.name
  FROM {_RENAMED}
 CROSS JOIN LATERAL (
       SELECT ctid AS place FROM orchestrator.promises WHERE run_id = n.run AND id = n.id LIMIT 1) AS found
 WHERE p.ctid = found.place
""")


@Prepared.function(f"""
SELECT /* expectations.waits_after */ run_id AS run, id, name, ordinal FROM orchestrator.promises
 WHERE name LIKE '{WAIT}%%' AND (name, id) > (%(name)s::text, %(id)s::uuid) ORDER BY name, id LIMIT %(limit)s::int
""")
def waits_after(connection: Connection, name: str, id: bytes, limit: int) -> list[NewPromise]:
    """Return the next waits for the ends of runs, by name and id."""


@Prepared.function(f"""
SELECT /* expectations.waits */ p.run_id AS run, p.id, p.name, p.ordinal FROM unnest(%(names)s::text[]) AS wanted(name)
 CROSS JOIN LATERAL (
       SELECT * FROM orchestrator.promises WHERE name = wanted.name AND name LIKE '{WAIT}%%' OFFSET 0) AS p
""")
def waits(connection: Connection, names: Sequence[str]) -> list[NewPromise]:
    """Return the waits for the ends of runs that have these names."""


def rename_waits(connection: Connection, renamed: Sequence[NewPromise]) -> None:
    """Rename waits for runs after the successors of those runs."""
    _RENAME_WAITS(connection, _RENAMED(renamed))


@Prepared.function("""
SELECT /* expectations.open_promises */ p.run_id, p.id, p.name FROM unnest(%(runs)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (SELECT * FROM orchestrator.promises WHERE run_id = wanted.id OFFSET 0) AS p
 ORDER BY p.run_id, p.ordinal
""")
def open_promises(connection: Connection, runs: Sequence[bytes]) -> list[tuple[bytes, bytes, str]]:
    """Return run, id and name of the open promises of runs, oldest first."""


class PromiseAnswer(NamedTuple):
    id: bytes
    result: bytes | None = None
    error: TaskError | None = None


_ANSWERS = Batch("n", "id uuid, result bytea, error jsonb")
_ANSWER = Prepared[None](f"""
INSERT /* expectations.answer */ INTO orchestrator.answers (id, at, result, error)
SELECT n.id, %(now)s::timestamptz, n.result, n.error
  FROM {_ANSWERS}
    ON CONFLICT (id) DO NOTHING
""")


def answer(connection: Connection, answers: Iterable[PromiseAnswer], now: datetime) -> None:
    """Store answers to requests; the first answer to a request counts."""
    rows = _ANSWERS((answered.id, answered.result, answered.error and answered.error.to_json()) for answered in answers)
    _ANSWER(connection, rows, now=now)


@Prepared.function(
    "DELETE /* expectations.forget_answers */ FROM orchestrator.answers WHERE id = ANY(%(requests)s::uuid[])"
)
def forget_answers(connection: Connection, requests: Iterable[bytes]) -> None:
    """Delete answers to requests that are processed again."""


_FIND_ANSWER = Statement[Row](
    "SELECT /* expectations.find_answer */ result, error FROM orchestrator.answers WHERE id = %(id)s::uuid"
)


def find_answer(connection: Connection, request: bytes) -> PromiseAnswer | None:
    row = _FIND_ANSWER.first(connection, id=request)
    if row is None:
        return None
    return PromiseAnswer(request, None if row.result is None else bytes(row.result), TaskError.stored(row.error))


# -- answers to promises that the code of runs has not created yet (`domain/code/promises.py`).
#
# A row with number 0 says that a promise of this name was settled or abandoned, so a second answer is refused.


class StoredResolution(NamedTuple):
    """A resolution that is stored until its promise is created."""

    run: bytes
    number: int
    """The position among resolutions of the same name, from 1; 0 marks the name of a settled promise."""
    what: Resolution


_OF_RUNS = Prepared[Row]("""
SELECT /* resolutions.of_runs */ k.run_id, k.number, k.name, k.value, k.error
  FROM unnest(%(runs)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (SELECT * FROM orchestrator.resolutions WHERE run_id = wanted.id OFFSET 0) AS k
 ORDER BY k.run_id, k.name, k.number
""")


def of_runs(connection: Connection, runs: Iterable[bytes]) -> list[StoredResolution]:
    """Return the stored resolutions of runs, in order."""
    return [StoredResolution(row.run_id, row.number, _resolution(row)) for row in _OF_RUNS(connection, runs=runs)]


def _resolution(row: Row) -> Resolution:
    return Resolution(row.name, row.value, row.error and TaskError(row.error["kind"], row.error["message"]))


_RESOLUTIONS = Batch("n", "run_id uuid, name text, number int, value bytea, error jsonb")
_KEEP = Prepared[tuple[bytes, str]](f"""
INSERT /* resolutions.keep */ INTO orchestrator.resolutions (run_id, name, number, value, error)
SELECT n.run_id, n.name, n.number, n.value, n.error
  FROM {_RESOLUTIONS}
 CROSS JOIN LATERAL (
       SELECT FROM orchestrator.runs WHERE id = n.run_id AND code AND ended_at IS NULL LIMIT 1) AS open
    ON CONFLICT DO NOTHING
RETURNING run_id, name
""")


def store_resolutions(connection: Connection, rows: Sequence[StoredResolution]) -> set[tuple[bytes, str]]:
    """Store resolutions for open runs; return the runs and names for which that happened."""
    stored = [
        (row.run, row.what.name, row.number, row.what.value, row.what.error and _json(row.what.error)) for row in rows
    ]
    return set(_KEEP(connection, _RESOLUTIONS(stored)))


_USED_RESOLUTIONS = Batch("gone", "run_id uuid, name text, number int")
_REMOVE = Prepared[None](f"""
DELETE /* resolutions.remove */ FROM orchestrator.resolutions k
 USING {_USED_RESOLUTIONS}
 CROSS JOIN LATERAL (
       SELECT ctid AS place FROM orchestrator.resolutions
        WHERE run_id = gone.run_id AND name = gone.name AND number = gone.number LIMIT 1) AS found
 WHERE k.ctid = found.place
""")


def remove(connection: Connection, rows: Sequence[StoredResolution]) -> None:
    """Delete resolutions whose promises have been created."""
    _REMOVE(connection, _USED_RESOLUTIONS((row.run, row.what.name, row.number) for row in rows))


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


def lock_promises(connection: Connection, run: bytes, name: str) -> bool:
    """Lock the promises of a run until the transaction ends. Return whether all open promises of a name have answers.

    The leader decides the same way, in the order of requests: a settled promise takes no answer, and a promise that the
    code has not created yet takes the first.
    """
    _LOCK(connection, run=run)
    row = _STANDING.one(
        connection, run=run, name=name, resolve=str(RequestKind.RESOLVE), reject=str(RequestKind.REJECT)
    )
    is_answered = row.is_settled or row.under_way > 0
    return bool(is_answered and row.open <= row.under_way)


def numbered(run: bytes, resolutions: Iterable[Resolution]) -> list[StoredResolution]:
    """Return resolutions with their positions, in order."""
    return [StoredResolution(run, number, what) for number, what in enumerate(resolutions, 1)]


def _json(error: TaskError) -> str:
    return msgspec.json.encode({"kind": error.kind, "message": error.message}).decode()
