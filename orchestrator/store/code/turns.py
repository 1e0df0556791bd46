"""What the code of runs is to be shown in its next turn: how much that is, and the events themselves.

Histories are only ever appended to. So what stands up to a number is the same whenever it is read, and what is too
large for one message may be read long after the turn was decided on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection

from orchestrator.domain.code.history import Event
from orchestrator.store import arrays
from orchestrator.store.code.histories import FACTS, event
from orchestrator.store.statement import Statement
from orchestrator.store.tasks.transitions import current_attempt, identifier


class Unshown(NamedTuple):
    """A run that is to be activated, and how much its code is to be shown."""

    id: bytes
    workflow: str
    version: int
    after: int
    """The code has been shown everything up to this number, in an activation that `cached` names; 0: nothing."""
    through: int
    """The number of the last event there is."""
    cached: int
    size: int
    """Bytes of the events, roughly."""
    events: list[Event] | None = None
    """The events themselves, where they are few and small; else `events` or `page` reads them."""


_FEW = 64_000
"""Bytes of events that are read with their size."""

# Nothing is read of large values but their length.
_UNSHOWN = Statement(
    f"""
SELECT r.id::text, r.workflow, r.version, r.after, r.last_event, CASE WHEN r.after > 0 THEN r.cached ELSE 0 END, h.size,
       e.number, e.at, e.data
  FROM unnest(%(ids)s::uuid[], %(whole)s::boolean[]) AS wanted(id, whole)
 CROSS JOIN LATERAL (
       SELECT id, workflow, version, last_event, cached,
              CASE WHEN wanted.whole OR cached = 0 THEN 0 ELSE shown END AS after
         FROM orchestrator.runs WHERE id = wanted.id LIMIT 1) AS r
 CROSS JOIN LATERAL (
       SELECT coalesce(sum(octet_length(data) + 32), 0) AS size FROM orchestrator.histories
        WHERE run_id = r.id AND number > r.after AND (r.after = 0 OR kind = ANY(%(facts)s::text[])) OFFSET 0) AS h
  LEFT JOIN LATERAL (
       SELECT number, extract(epoch FROM at)::double precision AS at, data FROM orchestrator.histories
        WHERE h.size <= {_FEW} AND run_id = r.id AND number > r.after
          AND (r.after = 0 OR kind = ANY(%(facts)s::text[]))
        ORDER BY number OFFSET 0) AS e ON true
"""
)


def unshown(connection: Connection, wanted: Mapping[bytes, bool]) -> list[Unshown]:
    """Return what is new to the code of runs, or how much it is; for those that are marked so, the whole history."""
    parameters = {"ids": arrays.uuids(wanted), "whole": arrays.numbers(wanted.values()), "facts": FACTS}
    found: dict[bytes, Unshown] = {}
    for row in _UNSHOWN(connection, parameters):
        run = identifier(row[0])
        if run not in found:
            found[run] = Unshown(run, *row[1:7])._replace(events=[] if row[6] <= _FEW else None)
        few = found[run].events
        if few is not None and row[7] is not None:
            few.append(event(*row[7:]))
    return [found[run] for run in wanted if run in found]


_EVENTS = Statement(
    """
SELECT h.run_id::text, h.number, extract(epoch FROM h.at)::double precision, h.data
  FROM unnest(%(ids)s::uuid[], %(after)s::int[]) AS wanted(id, after)
 CROSS JOIN LATERAL (
       SELECT run_id, number, at, data FROM orchestrator.histories
        WHERE run_id = wanted.id AND number > wanted.after AND (wanted.after = 0 OR kind = ANY(%(facts)s::text[]))
        ORDER BY number OFFSET 0) AS h
"""
)


def events(connection: Connection, runs: Sequence[Unshown]) -> dict[bytes, list[Event]]:
    """Return the events themselves: facts that are new, or all there is."""
    found: dict[bytes, list[Event]] = {run.id: [] for run in runs}
    parameters = {
        "ids": arrays.uuids(run.id for run in runs),
        "after": arrays.numbers(run.after for run in runs),
        "facts": FACTS,
    }
    for row in _EVENTS(connection, parameters):
        found[identifier(row[0])].append(event(*row[1:]))
    return found


_MOST_EVENTS = 5_000
"""Of one page, however small they are."""

_PAGE = Statement(
    f"""
SELECT number, at, data FROM (
       SELECT number, extract(epoch FROM at)::double precision AS at, data, octet_length(data) AS size,
              sum(octet_length(data)) OVER (ORDER BY number) AS total
         FROM (SELECT number, at, data FROM orchestrator.histories
                WHERE run_id = %(run)s::uuid AND number > %(after)s::int AND number <= %(through)s::int
                  AND (%(whole)s::boolean OR kind = ANY(%(facts)s::text[]))
                ORDER BY number LIMIT {_MOST_EVENTS}) AS next) AS page
 WHERE total <= %(most)s::bigint OR total = size
 ORDER BY number
"""
)


def page(connection: Connection, run: Unshown, after: int, most: int) -> list[Event]:
    """Return the events behind a number that fit into so many bytes, at least one; none if there is none."""
    parameters = {
        "run": run.id.hex(),
        "after": after,
        "through": run.through,
        "whole": run.after == 0,
        "facts": FACTS,
        "most": most,
    }
    return [event(*row) for row in _PAGE(connection, parameters)]


_PUT_OFF = Statement(
    f"""
UPDATE orchestrator.tasks t
   SET status = 'pending', dispatched_at = NULL, wake_at = %(now)s::timestamptz + r.delay * interval '1 second'
  FROM unnest(%(ids)s::uuid[], %(attempts)s::int[], %(delays)s::double precision[]) AS r(id, attempt, delay)
 {current_attempt()}
 WHERE t.ctid = found.place
"""
)


def put_off(connection: Connection, turns: Sequence[tuple[bytes, int, float]], now: datetime) -> None:
    """Put claimed turns back for so many seconds: there is no room for them. Where their code is stays known."""
    parameters = {
        "now": now,
        "ids": arrays.uuids(run for run, _, _ in turns),
        "attempts": arrays.numbers(attempt for _, attempt, _ in turns),
        "delays": arrays.numbers(delay for _, _, delay in turns),
    }
    _PUT_OFF(connection, parameters)
