"""What runs of workflows as code wait for beside tasks: timers and promises; and answers to requests."""

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

_GONE = Batch("gone", "run_id uuid, id uuid")

_APART = 2e-6
"""Seconds between timers of one time: the least that neither a double nor Postgres rounds away."""
_TIMERS = Batch("n", "run_id uuid, id uuid, due double precision")
_START_TIMERS = Prepared[None](f"""
INSERT /* expectations.start_timers */ INTO orchestrator.timers (run_id, id, due)
SELECT n.run_id, n.id, to_timestamp(n.due)
  FROM {_TIMERS}
    ON CONFLICT DO NOTHING
""")


def start_timers(connection: Connection, timers: Sequence[tuple[bytes, bytes, float]]) -> None:
    """Create timers: run, id, and the Unix time at which it is due. Those of one time fire in this order."""
    earlier: Counter[tuple[bytes, float]] = Counter()
    rows: list[tuple[bytes, bytes, float]] = []
    for run, timer, due in timers:
        rows.append((run, timer, due + earlier[run, due] * _APART))
        earlier[run, due] += 1
    _START_TIMERS(connection, _TIMERS(rows))


_FORGET_TIMERS = Prepared[None](f"""
DELETE /* expectations.forget_timers */ FROM orchestrator.timers t USING {_GONE}
 CROSS JOIN LATERAL (
       SELECT ctid AS tid FROM orchestrator.timers WHERE run_id = gone.run_id AND id = gone.id LIMIT 1) AS found
 WHERE t.ctid = found.tid
""")
_FORGET_PROMISES = Prepared[tuple[bytes, bytes]](f"""
WITH /* expectations.forget_promises */ gone AS (
    DELETE FROM orchestrator.promises p USING {_GONE}
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
    """Remove timers, by run and id."""
    _FORGET_TIMERS(connection, _GONE(timers))


def forget_promises(connection: Connection, promises: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Remove promises, by run and id; return those that were open.

    That there was one of its name is remembered (`store/code/expectations.py`).
    """
    return _FORGET_PROMISES(connection, _GONE(promises))


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
    """Remove due timers, and return their runs and ids in the order in which they were due."""


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
    """Return the waits of these names for the ends of runs."""


def rename_waits(connection: Connection, renamed: Sequence[NewPromise]) -> None:
    """Let waits wait for the runs in which others go on."""
    _RENAME_WAITS(connection, _RENAMED(renamed))


@Prepared.function("""
SELECT /* expectations.open_promises */ p.run_id, p.id, p.name FROM unnest(%(runs)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (SELECT * FROM orchestrator.promises WHERE run_id = wanted.id OFFSET 0) AS p
 ORDER BY p.run_id, p.ordinal
""")
def open_promises(connection: Connection, runs: Sequence[bytes]) -> list[tuple[bytes, bytes, str]]:
    """Return run, id and name of the open promises of runs, oldest first."""


class Answered(NamedTuple):
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


def answer(connection: Connection, answers: Iterable[Answered], now: datetime) -> None:
    """Store answers to requests; the first to a request counts."""
    rows = _ANSWERS((one.id, one.result, one.error and one.error.to_json()) for one in answers)
    _ANSWER(connection, rows, now=now)


@Prepared.function(
    "DELETE /* expectations.forget_answers */ FROM orchestrator.answers WHERE id = ANY(%(requests)s::uuid[])"
)
def forget_answers(connection: Connection, requests: Iterable[bytes]) -> None:
    """Forget answers to requests, which are done again."""


_FIND_ANSWER = Statement[Row](
    "SELECT /* expectations.find_answer */ result, error FROM orchestrator.answers WHERE id = %(id)s::uuid"
)


def find_answer(connection: Connection, request: bytes) -> Answered | None:
    row = _FIND_ANSWER.first(connection, id=request)
    if row is None:
        return None
    return Answered(request, None if row.result is None else bytes(row.result), TaskError.stored(row.error))


# -- answers to promises that the code of runs does not wait for yet (`domain/code/promises.py`).
#
# A row of number 0 says that a promise of the name was settled or given up, so a second answer is refused.


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


_SETTLED = Batch("gone", "run_id uuid, name text, number int")
_REMOVE = Prepared[None](f"""
DELETE /* resolutions.remove */ FROM orchestrator.resolutions k
 USING {_SETTLED}
 CROSS JOIN LATERAL (
       SELECT ctid AS place FROM orchestrator.resolutions
        WHERE run_id = gone.run_id AND name = gone.name AND number = gone.number LIMIT 1) AS found
 WHERE k.ctid = found.place
""")


def remove(connection: Connection, rows: Sequence[Kept]) -> None:
    """Forget resolutions that have found their promises."""
    _REMOVE(connection, _SETTLED((row.run, row.what.name, row.number) for row in rows))


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
