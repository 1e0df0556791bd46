"""Turns that code has taken: apply turns that are still current, and block their turn tasks again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import NamedTuple

from sqlalchemy import Connection

from orchestrator.domain.code.history import HistoryItem
from orchestrator.domain.states import TaskState, sources_of
from orchestrator.references import MARK
from orchestrator.store import payloads
from orchestrator.store.batches import Batch, Blob
from orchestrator.store.code.histories import EVENTS, event_rows, not_before
from orchestrator.store.sql import Prepared, Values
from orchestrator.store.tasks.transitions import (
    SUCCEEDED,
    SUCCESSES,
    Moved,
    Success,
    all_of,
    among,
    current_attempt,
    succeeding,
)


class Turn(NamedTuple):
    """The result of an activation after which the code waits for further events."""

    id: bytes
    attempt: int
    through: int
    seen: bool
    """Whether the code was shown events; otherwise it only answered queries."""
    cached: int
    worker: str
    events: Sequence[HistoryItem]
    """Events to append: a marker and records."""
    opened: int
    """The number of tasks and child runs to create."""
    waiting: str | None = None
    """JSON of what the code waits for."""
    version: int = 0
    """The version of the code that took the turn, which the run keeps; 0 if unknown."""
    follows: bytes | None = None
    """For a next turn: the task whose success the code was shown; that success is the first of `events`."""
    at: float | None = None
    """For a next turn: the time of that success."""


_TURNS = Batch(
    "g",
    "id uuid, attempt int, through int, seen boolean, cached int, worker text, count int, opened int, waiting jsonb, "
    "version int, follows uuid, at double precision",
)
_NEXT_TURN = f"""CROSS JOIN LATERAL (
           SELECT ctid AS place FROM orchestrator.tasks
            WHERE id = r.id AND attempt = r.attempt - 1 AND status IN {among(sources_of(TaskState.DISPATCHED))}
              AND blockers > 0 AND worker = r.worker
              AND attempt >= (SELECT max(fence) FROM orchestrator.leases) LIMIT 1) AS found
     CROSS JOIN LATERAL (
           SELECT last_event + 1 AS last_event FROM orchestrator.runs
            WHERE id = r.id AND code AND ended_at IS NULL AND stuck IS NULL AND last_event = r.through - 1
            LIMIT 1) AS run"""
"""Finds the turn task of a run whose code was waiting, if nothing has happened to the run since its last turn and this
worker took that turn: the code in another worker's memory may have seen other events."""
_SENT_TURN = f"""{current_attempt()}
     CROSS JOIN LATERAL (SELECT last_event FROM orchestrator.runs WHERE id = r.id LIMIT 1) AS run"""
_TURNS_ALONE = 20
"""Turns after which a run whose process died may share a process with other runs again."""
_IS_RISKY = f"""(t.losses > 0 AND EXISTS (
           SELECT FROM orchestrator.attempts
            WHERE task_id = t.id AND attempt > t.attempt - {_TURNS_ALONE} AND outcome = 'lost'))"""


def _suspending(name: str, turn_task: str, at: str, ended: int = 0, first: str = "", last: str = "") -> Prepared[Moved]:
    """Return the statement that blocks turn tasks and appends events.

    `turn_task` finds each turn task, `at` is the time of the first event, `ended` is the number of tasks of the run
    that end with the turn; `first` ends them, and `last` returns rows.
    """
    return Prepared[Moved](f"""
WITH /* {name} */ {first} given AS MATERIALIZED (
    SELECT * FROM {_TURNS}
), back AS (
    UPDATE orchestrator.tasks t
       SET status = 'pending', blockers = CASE WHEN run.last_event > r.through THEN 0 ELSE 1 END, worker = r.worker,
           attempt = r.attempt, dispatched_at = NULL, started_at = NULL, failures = 0,
           losses = CASE WHEN {_IS_RISKY} THEN 1 ELSE 0 END, alone = {_IS_RISKY}
      FROM given r
     {turn_task}
     WHERE t.ctid = found.place
    RETURNING t.id, t.queue, t.attempt
), ahead AS (
    UPDATE orchestrator.runs r
       SET last_event = r.last_event + g.count, cached = g.cached, total = r.total + g.opened,
           open = r.open + g.opened - {ended}, success = r.success + {ended},
           shown = CASE WHEN g.seen THEN g.through ELSE r.shown END,
           waiting = CASE WHEN g.seen THEN g.waiting ELSE r.waiting END,
           version = CASE WHEN g.seen AND g.version > 0 THEN g.version ELSE r.version END
      FROM back JOIN given g ON g.id = back.id
     CROSS JOIN LATERAL (SELECT ctid AS place FROM orchestrator.runs WHERE id = g.id LIMIT 1) AS found
     WHERE r.ctid = found.place
    RETURNING r.id, r.last_event - g.count AS before, {at} AS at
), kept AS (
    INSERT INTO orchestrator.histories (run_id, number, at, kind, data)
    SELECT e.run_id, ahead.before + e.place,
           CASE e.place WHEN 1 THEN ahead.at ELSE greatest(ahead.at, %(now)s::timestamptz) END, e.kind, e.data
      FROM {EVENTS} JOIN ahead ON ahead.id = e.run_id
)
{last or "SELECT id, 'pending' AS state, queue, id AS run_id, attempt, 'dispatched' AS before FROM back"}
""")


_SUSPEND = _suspending("turns.suspend", _SENT_TURN, not_before("r.last_event - g.count"))
_stepping = partial(
    _suspending,
    turn_task=f"JOIN gone ON gone.id = r.follows AND gone.run_id = r.id {_NEXT_TURN}",
    at="to_timestamp(g.at)",
    ended=1,
    first=f"{succeeding()},",
)
_STEP = _stepping(
    "turns.step",
    last=f"""{SUCCEEDED} UNION ALL
SELECT id, 'pending', queue, id, attempt, 'pending', '', NULL, NULL, NULL, NULL, NULL, NULL FROM back""",
)
_STEP_LATER = _stepping("turns.step_later", last=all_of("back"))


def suspend(connection: Connection, turns: Sequence[Turn], now: datetime) -> list[Moved]:
    """Block turn tasks, or make them ready if new facts came meanwhile, and append the events of the turns.

    A run whose process died runs alone until it has taken `_TURNS_ALONE` turns.
    """
    return _SUSPEND(connection, *_batches(connection, turns), now=now)


def step(
    connection: Connection,
    successes: Sequence[Success],
    turns: Sequence[Turn],
    now: datetime,
    foreseen: Mapping[bytes, Moved] | None = None,
) -> list[Moved]:
    """End tasks whose current attempt succeeded, and apply the next turns that workers took after these successes.

    A turn is applied only if the event shown to the code really is the next one. Return the tasks and the turn tasks.
    With `foreseen` ends, defer this to the next statement, which fails unless all turns are applied.
    """
    batches = SUCCESSES(successes), *_batches(connection, turns)
    if foreseen is None:
        return _STEP(connection, *batches, now=now)
    _STEP_LATER.defer(connection, *batches, now=now, number=len(turns))
    turn_tasks = [Moved(turn.id, "pending", "", turn.id, turn.attempt, "pending") for turn in turns]
    return [*(foreseen[row.id] for row in successes), *turn_tasks]


def _batches(connection: Connection, turns: Sequence[Turn]) -> tuple[Values, Values]:
    """Return turns, and their events, as batches."""
    turn_rows = [
        (
            turn.id,
            turn.attempt,
            turn.through,
            turn.seen,
            turn.cached,
            turn.worker,
            len(turn.events),
            turn.opened,
            turn.waiting,
            turn.version,
            turn.follows,
            turn.at,
        )
        for turn in turns
    ]
    rows = [row for turn in turns for row in event_rows(turn.id, turn.events)]
    if any(MARK in data for *_, data in rows):
        payloads.keep_named(connection, rows)
    return _TURNS(turn_rows), EVENTS(rows)


class NextTurn(NamedTuple):
    """A final turn that a worker took on its own, and the event that the worker showed to the code."""

    id: bytes
    attempt: int
    through: int
    at: float
    data: Blob
    """The encoded event."""
    worker: str


_NEXT = Batch("r", NextTurn)
_TAKE = Prepared[bytes](f"""
WITH /* turns.take_next */ taken AS (
    UPDATE orchestrator.tasks t
       SET status = 'dispatched', attempt = r.attempt, dispatched_at = %(now)s::timestamptz,
           started_at = %(now)s::timestamptz
      FROM {_NEXT}
     {_NEXT_TURN}
     WHERE t.ctid = found.place
    RETURNING t.id, r.through, r.at, r.data
), ahead AS (
    UPDATE orchestrator.runs r
       SET last_event = taken.through, open = r.open - 1, success = r.success + 1
      FROM taken
     CROSS JOIN LATERAL (SELECT ctid AS place FROM orchestrator.runs WHERE id = taken.id LIMIT 1) AS found
     WHERE r.ctid = found.place
), kept AS (
    INSERT INTO orchestrator.histories (run_id, number, at, kind, data)
    SELECT id, through, to_timestamp(at), 'task_completed', data FROM taken
)
SELECT id FROM taken
""")


def take_next(connection: Connection, turns: Sequence[NextTurn], now: datetime) -> set[bytes]:
    """Accept turns that workers took on their own if the event shown to the code really is the next one.

    Return the accepted runs: their turns are now in flight, like turns that were sent.
    """
    return set(_TAKE(connection, _NEXT(turns), now=now))
