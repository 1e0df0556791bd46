"""What runs of workflows as code wait for beside tasks: timers and promises; and answers to requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection

from orchestrator.domain.code.other_runs import WAIT
from orchestrator.domain.tasks.task import TaskError
from orchestrator.store.batches import Batch
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

    That there was one of its name is remembered (`store/code/resolutions.py`).
    """
    return _FORGET_PROMISES(connection, _GONE(promises))


_FIRE = Prepared[tuple[bytes, bytes]]("""
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
    return _FIRE(connection, now=now, limit=limit)


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
    """Create promises."""
    _CREATE_PROMISES(connection, _PROMISES(promises))


_WAITS_AFTER = Prepared[NewPromise](f"""
SELECT /* expectations.waits_after */ run_id AS run, id, name, ordinal FROM orchestrator.promises
 WHERE name LIKE '{WAIT}%%' AND (name, id) > (%(name)s::text, %(id)s::uuid) ORDER BY name, id LIMIT %(limit)s::int
""")
_WAITS = Prepared[NewPromise](f"""
SELECT /* expectations.waits */ p.run_id AS run, p.id, p.name, p.ordinal FROM unnest(%(names)s::text[]) AS wanted(name)
 CROSS JOIN LATERAL (
       SELECT * FROM orchestrator.promises WHERE name = wanted.name AND name LIKE '{WAIT}%%' OFFSET 0) AS p
""")
_RENAMED = Batch("n", NewPromise)
_RENAME_WAITS = Prepared[None](f"""
UPDATE /* expectations.rename_waits */ orchestrator.promises p SET name = n.name
  FROM {_RENAMED}
 CROSS JOIN LATERAL (
       SELECT ctid AS place FROM orchestrator.promises WHERE run_id = n.run AND id = n.id LIMIT 1) AS found
 WHERE p.ctid = found.place
""")


def waits_after(connection: Connection, name: str, id: bytes, limit: int) -> list[NewPromise]:
    """Return the next waits for the ends of runs, by name and id."""
    return _WAITS_AFTER(connection, name=name, id=id, limit=limit)


def waits(connection: Connection, names: Sequence[str]) -> list[NewPromise]:
    """Return the waits of these names for the ends of runs."""
    return _WAITS(connection, names=names)


def rename_waits(connection: Connection, renamed: Sequence[NewPromise]) -> None:
    """Let waits wait for the runs in which others go on."""
    _RENAME_WAITS(connection, _RENAMED(renamed))


_OPEN_PROMISES = Prepared[tuple[bytes, bytes, str]]("""
SELECT /* expectations.open_promises */ p.run_id, p.id, p.name FROM unnest(%(runs)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (SELECT * FROM orchestrator.promises WHERE run_id = wanted.id OFFSET 0) AS p
 ORDER BY p.run_id, p.ordinal
""")


def open_promises(connection: Connection, runs: Sequence[bytes]) -> list[tuple[bytes, bytes, str]]:
    """Return run, id and name of the open promises of runs, oldest first."""
    return _OPEN_PROMISES(connection, runs=runs)


class Answered(NamedTuple):
    """The answer to a request."""

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


_FORGET_ANSWERS = Prepared[None](
    "DELETE /* expectations.forget_answers */ FROM orchestrator.answers WHERE id = ANY(%(ids)s::uuid[])"
)


def forget_answers(connection: Connection, requests: Iterable[bytes]) -> None:
    """Forget answers to requests, which are done again."""
    _FORGET_ANSWERS(connection, ids=requests)


_FIND_ANSWER = Statement[Row](
    "SELECT /* expectations.find_answer */ result, error FROM orchestrator.answers WHERE id = %(id)s::uuid"
)


def find_answer(connection: Connection, request: bytes) -> Answered | None:
    """Return the answer to a request, if there is one yet."""
    row = _FIND_ANSWER.first(connection, id=request)
    if row is None:
        return None
    return Answered(request, None if row.result is None else bytes(row.result), TaskError.stored(row.error))
