"""The events that a run's code is shown in its next turn, and their size; and last turns.

Histories are append-only, so the events up to a number never change. Events that are too large for one message may be
read long after the turn was planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection

from orchestrator.domain.code.history import ActivationApplied, Event, HistoryItem
from orchestrator.domain.states import IN_FLIGHT_STATES
from orchestrator.references import MARK
from orchestrator.store import payloads
from orchestrator.store.batches import Batch
from orchestrator.store.code.histories import EVENTS, FACTS, by_run, encoded, event, event_rows, not_before
from orchestrator.store.sql import Prepared, Row
from orchestrator.store.tasks.transitions import among, current_attempt


class Unshown(NamedTuple):
    """A run to activate, and the amount of events for its code."""

    id: bytes
    workflow: str
    version: int
    after: int
    """The number of the last event that the code was shown, in activation `cached`; 0 to show the whole history."""
    through: int
    """The number of the last event."""
    cached: int
    size: int
    """The approximate size of the events in bytes."""
    events: list[Event] | None = None
    """The events, if they are few and small; otherwise `events` or `page` reads them."""


_MAX_INLINE = 64_000
"""Events up to this size in bytes are read together with their size."""

# Large values are not read, only their length.
_WANTED = Batch("wanted", "id uuid, whole boolean")
_UNSHOWN = Prepared[Row](f"""
SELECT /* turns.unshown */ r.id, r.workflow, r.version, r.after, r.last_event AS through,
       CASE WHEN r.after > 0 THEN r.cached ELSE 0 END AS cached, h.size, e.number, e.at, e.data
  FROM {_WANTED}
 CROSS JOIN LATERAL (
       SELECT id, workflow, version, last_event, cached,
              CASE WHEN wanted.whole OR cached = 0 THEN 0 ELSE shown END AS after
         FROM orchestrator.runs WHERE id = wanted.id LIMIT 1) AS r
 CROSS JOIN LATERAL (
       SELECT coalesce(sum(octet_length(data) + 32), 0) AS size FROM orchestrator.histories
        WHERE run_id = r.id AND number > r.after AND (r.after = 0 OR kind = ANY(%(facts)s::text[])) OFFSET 0) AS h
  LEFT JOIN LATERAL (
       SELECT number, extract(epoch FROM at)::double precision AS at, data FROM orchestrator.histories
        WHERE h.size <= {_MAX_INLINE} AND run_id = r.id AND number > r.after
          AND (r.after = 0 OR kind = ANY(%(facts)s::text[]))
        ORDER BY number OFFSET 0) AS e ON true
""")


def unshown(connection: Connection, wanted: Mapping[bytes, bool]) -> list[Unshown]:
    """Return the new events for the code of runs, or their size; the whole history for runs whose value is true."""
    by_id: dict[bytes, Unshown] = {}
    for row in _UNSHOWN(connection, _WANTED(wanted.items()), facts=FACTS):
        if row.id not in by_id:
            by_id[row.id] = Unshown(*row[:7])._replace(events=[] if row.size <= _MAX_INLINE else None)
        run_events = by_id[row.id].events
        if run_events is not None and row.number is not None:
            run_events.append(event(row))
    return [by_id[run] for run in wanted if run in by_id]


_AFTER = Batch("wanted", "id uuid, after int")
_EVENTS = Prepared[Row](f"""
SELECT /* turns.events */ h.run_id, h.number, extract(epoch FROM h.at)::double precision AS at, h.data
  FROM {_AFTER}
 CROSS JOIN LATERAL (
       SELECT run_id, number, at, data FROM orchestrator.histories
        WHERE run_id = wanted.id AND number > wanted.after AND (wanted.after = 0 OR kind = ANY(%(facts)s::text[]))
        ORDER BY number OFFSET 0) AS h
""")


def events(connection: Connection, runs: Sequence[Unshown]) -> dict[bytes, list[Event]]:
    """Return the events: new facts, or the whole history."""
    by_id = by_run(_EVENTS(connection, _AFTER((run.id, run.after) for run in runs), facts=FACTS))
    return {run.id: by_id.get(run.id, []) for run in runs}


_MAX_EVENTS = 5_000
"""The maximum number of events on a page, however small they are."""

_PAGE = Prepared[Row](f"""
SELECT /* turns.page */ number, at, data FROM (
       SELECT number, extract(epoch FROM at)::double precision AS at, data, octet_length(data) AS size,
              sum(octet_length(data)) OVER (ORDER BY number) AS total
         FROM (SELECT number, at, data FROM orchestrator.histories
                WHERE run_id = %(run)s::uuid AND number > %(after)s::int AND number <= %(through)s::int
                  AND (%(whole)s::boolean OR kind = ANY(%(facts)s::text[]))
                ORDER BY number LIMIT {_MAX_EVENTS}) AS next) AS page
 WHERE total <= %(most)s::bigint OR total = size
 ORDER BY number
""")


def page(connection: Connection, run: Unshown, after: int, most: int) -> list[Event]:
    """Return events after a number, up to `most` bytes but at least one event; empty if there is none."""
    rows = _PAGE(connection, run=run.id, after=after, through=run.through, whole=run.after == 0, facts=FACTS, most=most)
    return [event(row) for row in rows]


_TURNS = Batch("r", "id uuid, attempt int, delay double precision")
_PUT_OFF = Prepared[None](f"""
UPDATE /* turns.put_off */ orchestrator.tasks t
   SET status = 'pending', dispatched_at = NULL, wake_at = %(now)s::timestamptz + r.delay * interval '1 second'
  FROM {_TURNS}
 {current_attempt()}
 WHERE t.ctid = found.place
""")


def postpone(connection: Connection, turns: Sequence[tuple[bytes, int, float]], now: datetime) -> None:
    """Return claimed turn tasks to pending with a delay, for lack of room; `worker` still has the code in memory."""
    _PUT_OFF(connection, _TURNS(turns), now=now)


# -- last turns


ALL_EVENTS = 2**31 - 1
"""Larger than any event number."""
_MESSAGES = """(SELECT kind, target, body FROM orchestrator.inbox ORDER BY id LIMIT 1000) AS oldest
             WHERE kind IN ('signal', 'update')"""
"""Signals and updates for code among the oldest requests. Their bodies may be large."""
_LAST_TURNS = Batch("g", "id uuid, attempt int, through int, count int")
_APPEND_LAST = Prepared[tuple[bytes, int]](f"""
WITH /* turns.append_last */ ahead AS (
    UPDATE orchestrator.runs r SET last_event = r.last_event + g.count
      FROM {_LAST_TURNS}
     CROSS JOIN LATERAL (
           SELECT FROM orchestrator.tasks
            WHERE id = g.id AND attempt = g.attempt AND status IN {among(IN_FLIGHT_STATES)} LIMIT 1) AS task
     CROSS JOIN LATERAL (
           SELECT ctid AS place FROM orchestrator.runs
            WHERE id = g.id AND code AND ended_at IS NULL AND last_event <= g.through LIMIT 1) AS found
     WHERE r.ctid = found.place AND (g.through = {ALL_EVENTS} OR g.id NOT IN (SELECT target FROM {_MESSAGES}))
    RETURNING r.id, r.last_event - g.count AS before, {not_before("r.last_event - g.count")} AS at
), kept AS (
    INSERT INTO orchestrator.histories (run_id, number, at, kind, data)
    SELECT e.run_id, ahead.before + e.place, ahead.at, e.kind, e.data
      FROM {EVENTS} JOIN ahead ON ahead.id = e.run_id
)
SELECT id, before FROM ahead
""")


_LOCK_RUNS = Prepared[None]("""
SELECT /* turns.hold */ FROM orchestrator.runs WHERE id = ANY(%(runs)s::uuid[]) ORDER BY id FOR UPDATE
""")


class LastTurn(NamedTuple):
    """An activation in which the code has ended."""

    id: bytes
    attempt: int
    through: int
    """The end is applied if no event came after this number and no message is pending; always if `ALL_EVENTS`."""
    events: Sequence[HistoryItem]


def append_last(connection: Connection, turns: Sequence[LastTurn], now: datetime) -> dict[bytes, int]:
    """Append the events of last turns that are current and have seen all events; return the runs, each with the number
    of its previous last event.

    Unless a turn ends in any case, its run is locked first, so senders of messages wait for the commit and then see the
    end. Messages committed before the lock are found by the check that follows.
    """
    ahead = [(turn.id, turn.attempt, turn.through, len(turn.events)) for turn in turns]
    if ending := [turn.id for turn in turns if turn.through != ALL_EVENTS]:
        _LOCK_RUNS.defer(connection, runs=ending)
    rows = [row for turn in turns for row in event_rows(turn.id, turn.events)]
    if any(MARK in data for *_, data in rows):
        payloads.keep_named(connection, rows)
    return dict(_APPEND_LAST(connection, _LAST_TURNS(ahead), EVENTS(rows), now=now))


_MAX_UNSEEN = 100
_UNSEEN = Batch("wanted", "id uuid, through int")
_UNSEEN_MESSAGES = Prepared[Row](f"""
SELECT /* turns.unseen_messages */ wanted.id AS run_id, h.number, h.at, h.data
  FROM {_UNSEEN}
 CROSS JOIN LATERAL (SELECT FROM orchestrator.runs WHERE id = wanted.id AND code AND ended_at IS NULL LIMIT 1) AS r
  LEFT JOIN LATERAL (
       SELECT number, extract(epoch FROM at)::double precision AS at, data,
              sum(octet_length(data)) OVER (ORDER BY number) - octet_length(data) AS before
         FROM (SELECT number, at, data FROM orchestrator.histories
                WHERE run_id = wanted.id AND number > wanted.through
                  AND kind IN ('signal_received', 'update_requested', 'run_cancel_requested')
                ORDER BY number LIMIT {_MAX_UNSEEN}) AS next) AS h ON h.before < {_MAX_INLINE}
""")


def unseen_messages(connection: Connection, runs: Iterable[tuple[bytes, int]]) -> dict[bytes, list[Event]]:
    """Return the first messages and cancel requests after a number in the histories of open runs."""
    by_id: dict[bytes, list[Event]] = {}
    for row in _UNSEEN_MESSAGES(connection, _UNSEEN(runs)):
        by_id.setdefault(row.run_id, []).extend([] if row.number is None else [event(row)])
    return by_id


@Prepared.function(f"""
SELECT /* turns.with_messages */ DISTINCT target FROM (
       SELECT target, body FROM {_MESSAGES} AND target = ANY(%(runs)s::uuid[]) OFFSET 0) AS waiting
 WHERE NOT jsonb_exists(body, 'start')
""")
def with_messages(connection: Connection, runs: Sequence[bytes]) -> set[bytes]:
    """Return the runs with accepted signals or updates that are not in their histories yet.

    Signals that may start a run of their own are left out: they do that.
    """


_REFUSED = encoded(ActivationApplied(0))[:-2]
"""The prefix of markers of refused ends: no other marker is through 0."""


@Prepared.function("""
SELECT /* turns.once_refused */ wanted.id FROM unnest(%(runs)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (
       SELECT FROM orchestrator.histories WHERE run_id = wanted.id AND kind = 'activation_applied'
          AND substring(data FOR octet_length(%(mark)s::bytea)) = %(mark)s::bytea LIMIT 1) AS h
""")
def once_refused(connection: Connection, runs: Sequence[bytes], mark: bytes = _REFUSED) -> list[bytes]:
    """Return the runs in whose histories an end was refused."""
