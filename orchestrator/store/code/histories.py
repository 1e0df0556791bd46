"""Histories of runs of workflows as code: numbered events, append-only.

One statement appends all events of all runs in a tick, at a cost that does not depend on the length of the histories.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, get_args

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.code import history
from orchestrator.domain.code.history import Event, HistoryItem
from orchestrator.references import MARK
from orchestrator.sealing import CALL, reveal
from orchestrator.store import payloads
from orchestrator.store.batches import Batch
from orchestrator.store.runs.transitions import Delta
from orchestrator.store.sql import Prepared, Row, Statement

_encode = msgspec.msgpack.Encoder().encode
_decode: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(HistoryItem)
FACTS = [str(fact.__struct_config__.tag) for fact in get_args(history.Fact)]
"""The kinds of events that code is shown."""

EVENTS = Batch("e", "run_id uuid, place int, kind text, data bytea")
"""The events of a batch; `place` counts from 1 within a run."""


def not_before(number: str) -> str:
    """Return the SQL time of events after event `number` of a run `r`: no earlier, even if a clock steps back."""
    last = f"SELECT at FROM orchestrator.histories WHERE run_id = r.id AND number = {number} LIMIT 1"
    return f"greatest(%(now)s::timestamptz, ({last}))"


def encoded(event: HistoryItem) -> bytes:
    """Return an event in its stored form."""
    return _encode(event)


def event_rows(run: bytes, events: Iterable[HistoryItem]) -> list[tuple[bytes, int, str, bytes]]:
    """Return the rows of `EVENTS` for the events of a run."""
    return [(run, place, str(item.__struct_config__.tag), _encode(item)) for place, item in enumerate(events, 1)]


def arguments(start: bytes) -> bytes:
    """Return the encoded arguments in the first event of a run."""
    item = _decode.decode(start)
    return reveal(item.payload, CALL) if isinstance(item, history.RunStarted) else b""


_COUNTED = ("opened", "success", "failed", "cancelled")
_DELTAS = Batch("d", f"id uuid, count int, {' int, '.join(_COUNTED)} int")
_APPEND = Prepared[tuple[bytes, int]](f"""
WITH /* histories.append */ ahead AS (
    UPDATE orchestrator.runs r
       SET last_event = r.last_event + d.count, open = r.open + d.opened, success = r.success + d.success,
           failed = r.failed + d.failed, cancelled = r.cancelled + d.cancelled
      FROM {_DELTAS}
     CROSS JOIN LATERAL (
           SELECT ctid AS place FROM orchestrator.runs
            WHERE id = d.id AND code AND (ended_at IS NULL OR %(late)s::boolean) LIMIT 1) AS found
     WHERE r.ctid = found.place
    RETURNING r.id, r.last_event - d.count AS before, r.stuck IS NULL AND r.status <> 'pending' AS free,
              {not_before("r.last_event - d.count")} AS at
), kept AS (
    INSERT INTO orchestrator.histories (run_id, number, at, kind, data)
    SELECT e.run_id, ahead.before + e.place, ahead.at, e.kind, e.data
      FROM {EVENTS} JOIN ahead ON ahead.id = e.run_id
), woken AS (
    UPDATE orchestrator.tasks t SET blockers = 0
      FROM ahead
     CROSS JOIN LATERAL (
           SELECT ctid AS place FROM orchestrator.tasks
            WHERE id = ahead.id AND status = 'pending' AND blockers > 0 LIMIT 1) AS found
     WHERE %(wake)s::boolean AND ahead.free AND t.ctid = found.place
)
SELECT id, before FROM ahead
""")


def append(
    connection: Connection,
    events: Mapping[bytes, Sequence[HistoryItem]],
    now: datetime,
    *,
    wake: bool = True,
    late: bool = False,
    deltas: Mapping[bytes, Delta] | None = None,
) -> dict[bytes, int]:
    """Append events to the histories of open runs, and with `wake` make their turn tasks ready; return the runs that
    were open, each with the number of its previous last event.

    With `late`, events are also appended for ended runs. `deltas` are changes of the runs' counters.
    """
    changes = deltas or {}
    ahead = [
        (run, len(items), *(changes.get(run, {}).get(column, 0) for column in _COUNTED))
        for run, items in events.items()
    ]
    rows = [row for run, items in events.items() for row in event_rows(run, items)]
    if any(MARK in data for *_, data in rows):
        payloads.keep_named(connection, rows)
    return dict(_APPEND(connection, _DELTAS(ahead), EVENTS(rows), now=now, wake=wake, late=late))


_READ = Statement[Row]("""
SELECT /* histories.read */ number, extract(epoch FROM at)::double precision AS at, data FROM orchestrator.histories
 WHERE run_id = %(run)s::uuid ORDER BY number
""")


def read(connection: Connection, run: bytes) -> list[Event]:
    """Return the whole history of a run."""
    return [event(row) for row in _READ(connection, run=run)]


def event(row: Row) -> Event:
    """Return a stored event, decoded."""
    return Event(row.number, row.at, _decode.decode(row.data))


def by_run(rows: Iterable[Row]) -> dict[bytes, list[Event]]:
    histories: dict[bytes, list[Event]] = {}
    for row in rows:
        histories.setdefault(row.run_id, []).append(event(row))
    return histories


_BEGINNINGS = Prepared[tuple[bytes, bytes]]("""
SELECT /* histories.beginnings */ h.run_id, h.data FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (
       SELECT run_id, data FROM orchestrator.histories WHERE run_id = wanted.id AND number = 1 LIMIT 1) AS h
""")


def first_event(data: bytes) -> history.RunStarted:
    """Return the first event of a run, decoded."""
    item = _decode.decode(data)
    assert isinstance(item, history.RunStarted)
    return item


def event_of(data: bytes) -> HistoryItem:
    """Return an event, decoded."""
    item: HistoryItem = _decode.decode(data)
    return item


def starts_of(connection: Connection, runs: Sequence[bytes]) -> dict[bytes, history.RunStarted]:
    return {run: first_event(data) for run, data in _BEGINNINGS(connection, ids=runs)}


_UPDATE = Statement[Row]("""
SELECT /* histories.update_events */ h.run_id, h.number, h.data, h.number <= r.shown AS is_shown
  FROM orchestrator.histories h JOIN orchestrator.runs r ON r.id = h.run_id
 WHERE h.run_id = ANY (%(runs)s::uuid[]) AND h.kind IN ('update_requested', 'update_answered')
   AND position(%(id)s::bytea IN h.data) > 0
 ORDER BY array_position(%(runs)s::uuid[], h.run_id), h.number
""")


class UpdateEvents(NamedTuple):
    """The events about an update in the histories of runs."""

    request: history.UpdateRequested | None = None
    is_shown: bool = False
    """Whether the code has seen the update."""
    answer: history.UpdateAnswered | None = None

    @property
    def was_refused(self) -> bool:
        """Return whether the update was refused before it was applied, so it may be sent again."""
        return self.answer is not None and self.answer.was_refused


def update_events(connection: Connection, runs: Sequence[bytes], update: bytes) -> UpdateEvents:
    """Return the events about an update that was sent to one of these runs, which are a chain in order."""
    result = UpdateEvents()
    for row in _UPDATE(connection, runs=runs, id=update):
        item = event_of(row.data)
        if isinstance(item, history.UpdateRequested) and item.id == update:
            result = result._replace(request=item, is_shown=row.is_shown)
        elif isinstance(item, history.UpdateAnswered) and item.id == update:
            result = result._replace(answer=item)
    return result


_SENT = Batch("sent", "run uuid, id uuid")
_REQUESTED = Prepared[bytes](f"""
SELECT /* histories.requested */ sent.id FROM {_SENT}
 WHERE (SELECT true FROM orchestrator.answers WHERE id = sent.id LIMIT 1)
    OR (SELECT true FROM orchestrator.histories WHERE run_id = sent.run AND kind = 'update_requested'
           AND position(uuid_send(sent.id) IN data) > 0 LIMIT 1)
""")


def requested(connection: Connection, sent: Iterable[tuple[bytes, bytes]]) -> set[bytes]:
    """Return the updates, each sent to a run, that were applied before."""
    return set(_REQUESTED(connection, _SENT(sent)))


_SAID_BY_CODE = Statement[memoryview]("""
SELECT /* histories.said_by_code */ data FROM orchestrator.histories
 WHERE run_id = %(run)s::uuid AND (number = 1 OR kind = ANY(%(kinds)s::text[])) ORDER BY number
""")


def events_by_code(connection: Connection, run: bytes, *, with_timers: bool) -> list[HistoryItem]:
    """Return the start of a run, its reset if any, state that the code set and cleared, and started timers."""
    kinds = ["state_set", "state_cleared", "run_reset", *(["timer_started"] if with_timers else [])]
    return [_decode.decode(data) for data in _SAID_BY_CODE(connection, run=run, kinds=kinds)]


_READ_ALL = Prepared[Row]("""
SELECT /* histories.read_all */ h.run_id, h.number, extract(epoch FROM h.at)::double precision AS at, h.data
  FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (
       SELECT * FROM orchestrator.histories WHERE run_id = wanted.id ORDER BY number OFFSET 0) AS h
""")


def read_all(connection: Connection, runs: Iterable[bytes]) -> dict[bytes, list[Event]]:
    """Return the whole histories of runs."""
    return by_run(_READ_ALL(connection, ids=runs))


_WANTED = Batch("wanted", "id uuid, seen int")
_READ_SINCE = Prepared[Row](f"""
SELECT /* histories.said */ h.run_id, h.number, extract(epoch FROM h.at)::double precision AS at, h.data
  FROM {_WANTED}
 CROSS JOIN LATERAL (
       SELECT * FROM orchestrator.histories
        WHERE run_id = wanted.id AND (number > wanted.seen OR number = 1 OR kind = 'signal_received')
        ORDER BY number OFFSET 0) AS h
""")


def read_since(connection: Connection, runs: Sequence[tuple[bytes, int]]) -> dict[bytes, list[Event]]:
    """Return the start, all signals, and the events after a number of each run, in order."""
    return by_run(_READ_SINCE(connection, _WANTED(runs)))


_MAX_LATE_SIGNALS = 64_000
"""Bytes of late signals of a run that are read for a message."""
# A signal that may start a run contains that run's id: 16 bytes after MessagePack's c4 and the length.
_UNHEARD = Prepared[tuple[bytes, bytes]](f"""
SELECT /* histories.unheard */ h.run_id, h.data
  FROM {_WANTED}
 CROSS JOIN LATERAL (
       SELECT run_id, data, sum(octet_length(data)) OVER (ORDER BY number) - octet_length(data) AS before
         FROM orchestrator.histories
        WHERE run_id = wanted.id AND number > wanted.seen AND kind = 'signal_received' ORDER BY number OFFSET 0) AS h
 WHERE h.before < {_MAX_LATE_SIGNALS} OR position('\\xc410'::bytea IN h.data) > 0
""")


def late_signals(
    connection: Connection, runs: Sequence[tuple[bytes, int]]
) -> dict[bytes, list[history.SignalReceived]]:
    """Return signals of runs after a number, in order: all that may start a run, and the first of the rest."""
    signals: dict[bytes, list[history.SignalReceived]] = defaultdict(list)
    for run, data in _UNHEARD(connection, _WANTED(runs)):
        item = _decode.decode(data)
        assert isinstance(item, history.SignalReceived)
        signals[run].append(item)
    return signals


_SETTLED = Prepared[tuple[bytes, bytes]]("""
SELECT /* histories.settled */ run_id, data FROM orchestrator.histories
 WHERE run_id = ANY(%(ids)s::uuid[]) AND kind IN ('promise_resolved', 'promise_rejected') ORDER BY run_id, number
""")


def settled(connection: Connection, runs: Sequence[bytes]) -> list[tuple[bytes, history.PromiseSettled]]:
    """Return how promises of runs were settled, in order."""
    return [(run, _decode.decode(data)) for run, data in _SETTLED(connection, ids=runs)]


_PROMISES = Prepared[tuple[bytes, bytes]]("""
SELECT /* histories.promises */ run_id, data FROM orchestrator.histories
 WHERE run_id = ANY(%(ids)s::uuid[]) AND kind = 'promise_created' ORDER BY run_id, number
""")


def promise_schema(data: bytes) -> str:
    """Return the JSON Schema in the event that created a promise; empty if there is none."""
    event = _decode.decode(data)
    return event.schema if isinstance(event, history.PromiseCreated) else ""


def promises(connection: Connection, runs: Sequence[bytes]) -> dict[bytes, list[history.PromiseCreated]]:
    """Return all promises that the code of runs has created."""
    result: dict[bytes, list[history.PromiseCreated]] = {}
    for run, data in _PROMISES(connection, ids=runs):
        result.setdefault(run, []).append(_decode.decode(data))
    return result
