"""Histories of runs of workflows as code: appended to by number, never rewritten.

The tick appends all its events of all runs with one statement, and what it costs does not depend on how long a
history is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, get_args

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.code import history
from orchestrator.domain.code.history import Event
from orchestrator.store import arrays
from orchestrator.store.runs.life import Delta
from orchestrator.store.statement import Statement
from orchestrator.store.tasks.transitions import Moved, current_attempt, identifier, moved_rows

What = history.Fact | history.Record | history.Mark
_encode = msgspec.msgpack.Encoder().encode
_decode: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(What)
FACTS = [str(fact.__struct_config__.tag) for fact in get_args(history.Fact)]
"""The kinds of events that code is shown."""

EVENTS = """unnest(%(event_runs)s::uuid[], %(places)s::int[], %(kinds)s::text[], %(data)s::bytea[])
           AS e(run_id, place, kind, data)"""
"""The events of a batch; `place` counts from 1 within a run."""


def event_parameters(events: Iterable[tuple[bytes, Sequence[What]]]) -> dict[str, Any]:
    """Return the parameters of `EVENTS`."""
    flat = [(run, place, what) for run, some in events for place, what in enumerate(some, 1)]
    return {
        "event_runs": arrays.uuids(run for run, _, _ in flat),
        "places": arrays.numbers(place for _, place, _ in flat),
        "kinds": [str(what.__struct_config__.tag) for _, _, what in flat],
        "data": arrays.blobs(_encode(what) for _, _, what in flat),
    }


_APPEND = Statement(
    f"""
WITH ahead AS (
    UPDATE orchestrator.runs r
       SET last_event = r.last_event + d.count, open = r.open + d.opened, success = r.success + d.success,
           failed = r.failed + d.failed, cancelled = r.cancelled + d.cancelled
      FROM unnest(%(ids)s::uuid[], %(counts)s::int[], %(opened)s::int[], %(success)s::int[], %(failed)s::int[],
                  %(cancelled)s::int[])
           AS d(id, count, opened, success, failed, cancelled)
     CROSS JOIN LATERAL (
           SELECT ctid AS place FROM orchestrator.runs
            WHERE id = d.id AND code AND ended_at IS NULL LIMIT 1) AS found
     WHERE r.ctid = found.place
    RETURNING r.id, r.last_event - d.count AS before, r.stuck IS NULL AS free
), kept AS (
    INSERT INTO orchestrator.histories (run_id, number, at, kind, data)
    SELECT e.run_id, ahead.before + e.place, %(now)s::timestamptz, e.kind, e.data
      FROM {EVENTS} JOIN ahead ON ahead.id = e.run_id
), woken AS (
    UPDATE orchestrator.tasks t SET blockers = 0
      FROM ahead
     CROSS JOIN LATERAL (
           SELECT ctid AS place FROM orchestrator.tasks
            WHERE id = ahead.id AND status = 'pending' AND blockers > 0 LIMIT 1) AS found
     WHERE %(wake)s::boolean AND ahead.free AND t.ctid = found.place
)
SELECT id::text FROM ahead
"""
)


def append(
    connection: Connection,
    events: Mapping[bytes, Sequence[What]],
    now: datetime,
    *,
    wake: bool = True,
    deltas: Mapping[bytes, Delta] | None = None,
) -> set[bytes]:
    """Append events to the histories of open runs, whose code is to `wake` for them; return the runs that were open.

    `deltas` say how much the counters of those runs change.
    """
    changes = [deltas.get(run, {}) if deltas else {} for run in events]
    counters = {
        column: arrays.numbers(change.get(column, 0) for change in changes)
        for column in ("opened", "success", "failed", "cancelled")
    }
    parameters = {
        **counters,
        "now": now,
        "wake": wake,
        "ids": arrays.uuids(events),
        "counts": arrays.numbers(len(some) for some in events.values()),
        **event_parameters(events.items()),
    }
    return {identifier(row[0]) for row in _APPEND(connection, parameters)}


_SUSPEND = Statement(
    f"""
WITH given AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::uuid[], %(attempts)s::int[], %(throughs)s::int[], %(seen)s::boolean[],
                         %(cached)s::int[], %(workers)s::text[], %(counts)s::int[], %(opened)s::int[],
                         %(waiting)s::jsonb[], %(versions)s::int[])
             AS g(id, attempt, through, seen, cached, worker, count, opened, waiting, version)
), back AS (
    UPDATE orchestrator.tasks t
       SET status = 'pending', blockers = CASE WHEN run.last_event > r.through THEN 0 ELSE 1 END, worker = r.worker,
           dispatched_at = NULL, started_at = NULL, losses = 0, alone = false
      FROM given r
     {current_attempt()}
     CROSS JOIN LATERAL (SELECT last_event FROM orchestrator.runs WHERE id = r.id LIMIT 1) AS run
     WHERE t.ctid = found.place
    RETURNING t.id, t.queue, t.attempt
), ahead AS (
    UPDATE orchestrator.runs r
       SET last_event = r.last_event + g.count, cached = g.cached, total = r.total + g.opened, open = r.open + g.opened,
           shown = CASE WHEN g.seen THEN g.through ELSE r.shown END,
           waiting = CASE WHEN g.seen THEN g.waiting ELSE r.waiting END,
           version = CASE WHEN g.seen AND g.version > 0 THEN g.version ELSE r.version END
      FROM back JOIN given g ON g.id = back.id
     CROSS JOIN LATERAL (SELECT ctid AS place FROM orchestrator.runs WHERE id = g.id LIMIT 1) AS found
     WHERE r.ctid = found.place
    RETURNING r.id, r.last_event - g.count AS before
), kept AS (
    INSERT INTO orchestrator.histories (run_id, number, at, kind, data)
    SELECT e.run_id, ahead.before + e.place, %(now)s::timestamptz, e.kind, e.data
      FROM {EVENTS} JOIN ahead ON ahead.id = e.run_id
)
SELECT id::text, 'pending', queue, id::text, attempt, 'dispatched' FROM back
"""
)


class Turn(NamedTuple):
    """An activation after which the code waits for more."""

    id: bytes
    attempt: int
    through: int
    seen: bool
    """The code was shown events; else it only answered queries."""
    cached: int
    worker: str
    events: Sequence[What]
    """To be appended: a mark and records."""
    opened: int
    """Tasks and child runs that it starts."""
    waiting: str | None = None
    """Where it waits, as JSON."""
    version: int = 0
    """Of the code that took it: the run goes on with that; 0 where nobody says."""


def suspend(connection: Connection, turns: Sequence[Turn], now: datetime) -> list[Moved]:
    """Put the runs' own tasks back to sleep, or to ready where facts came meanwhile, and append what the code did."""
    parameters = {
        "now": now,
        "ids": arrays.uuids(turn.id for turn in turns),
        "attempts": arrays.numbers(turn.attempt for turn in turns),
        "throughs": arrays.numbers(turn.through for turn in turns),
        "seen": arrays.numbers(turn.seen for turn in turns),
        "cached": arrays.numbers(turn.cached for turn in turns),
        "workers": arrays.words(turn.worker for turn in turns),
        "counts": arrays.numbers(len(turn.events) for turn in turns),
        "opened": arrays.numbers(turn.opened for turn in turns),
        "waiting": [turn.waiting for turn in turns],
        "versions": arrays.numbers(turn.version for turn in turns),
        **event_parameters((turn.id, turn.events) for turn in turns),
    }
    return moved_rows(_SUSPEND(connection, parameters))


_READ = """
SELECT number, extract(epoch FROM at)::double precision, data FROM orchestrator.histories
 WHERE run_id = %(run)s::uuid ORDER BY number
"""


def read(connection: Connection, run: bytes) -> list[Event]:
    """Return the whole history of a run."""
    return [event(*row) for row in connection.exec_driver_sql(_READ, {"run": run.hex()})]


def event(number: int, at: float, data: bytes) -> Event:
    """Return an event as it is stored."""
    return Event(number, at, _decode.decode(data))


_BEGINNINGS = Statement(
    """
SELECT h.run_id::text, h.data FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (
       SELECT run_id, data FROM orchestrator.histories WHERE run_id = wanted.id AND number = 1 LIMIT 1) AS h
"""
)


def first_event(data: bytes) -> history.RunStarted:
    """Return how a run began, as it is stored."""
    what = _decode.decode(data)
    assert isinstance(what, history.RunStarted)
    return what


def beginnings(connection: Connection, runs: Sequence[bytes]) -> dict[bytes, history.RunStarted]:
    """Return how runs began."""
    rows = _BEGINNINGS(connection, {"ids": arrays.uuids(runs)})
    return {identifier(row[0]): _decode.decode(row[1]) for row in rows}


_SAID_BY_CODE = """
SELECT data FROM orchestrator.histories
 WHERE run_id = %(run)s::uuid AND (number = 1 OR kind = ANY(%(kinds)s::text[])) ORDER BY number
"""


def said_by_code(connection: Connection, run: bytes, *, with_timers: bool) -> list[What]:
    """Return how a run began, that it repeats another one if it does, what its code has set and cleared for people to
    see, and the timers that it started.
    """
    kinds = ["state_set", "state_cleared", "run_reset", *(["timer_started"] if with_timers else [])]
    rows = connection.exec_driver_sql(_SAID_BY_CODE, {"run": run.hex(), "kinds": kinds})
    return [_decode.decode(row[0]) for row in rows]


_READ_ALL = Statement(
    """
SELECT h.run_id::text, h.number, extract(epoch FROM h.at)::double precision, h.data
  FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (
       SELECT * FROM orchestrator.histories WHERE run_id = wanted.id ORDER BY number OFFSET 0) AS h
"""
)


def read_all(connection: Connection, runs: Iterable[bytes]) -> dict[bytes, list[Event]]:
    """Return the whole histories of runs."""
    found: dict[bytes, list[Event]] = {}
    for row in _READ_ALL(connection, {"ids": arrays.uuids(runs)}):
        found.setdefault(identifier(row[0]), []).append(Event(row[1], row[2], _decode.decode(row[3])))
    return found


_SAID = Statement(
    """
SELECT h.run_id::text, h.number, extract(epoch FROM h.at)::double precision, h.data
  FROM unnest(%(ids)s::uuid[], %(seen)s::int[]) AS wanted(id, seen)
 CROSS JOIN LATERAL (
       SELECT * FROM orchestrator.histories
        WHERE run_id = wanted.id AND (number > wanted.seen OR kind = 'signal_received') ORDER BY number OFFSET 0) AS h
"""
)


def said(connection: Connection, runs: Sequence[tuple[bytes, int]]) -> dict[bytes, list[Event]]:
    """Return, in order, the signals that runs were ever sent, and their events after a number."""
    parameters = {"ids": arrays.uuids(run for run, _ in runs), "seen": arrays.numbers(seen for _, seen in runs)}
    found: dict[bytes, list[Event]] = {}
    for row in _SAID(connection, parameters):
        found.setdefault(identifier(row[0]), []).append(event(*row[1:]))
    return found


_PROMISES = Statement(
    """
SELECT run_id::text, data FROM orchestrator.histories
 WHERE run_id = ANY(%(ids)s::uuid[]) AND kind = 'promise_created' ORDER BY run_id, number
"""
)


def promises(connection: Connection, runs: Sequence[bytes]) -> dict[bytes, list[history.PromiseCreated]]:
    """Return the promises that the code of runs has ever made."""
    found: dict[bytes, list[history.PromiseCreated]] = {}
    for row in _PROMISES(connection, {"ids": arrays.uuids(runs)}):
        found.setdefault(identifier(row[0]), []).append(_decode.decode(row[1]))
    return found
