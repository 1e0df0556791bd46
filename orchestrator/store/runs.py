"""The life of a run, and its counters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection

from orchestrator.domain.run import RunCounters
from orchestrator.domain.states import RunState, run_sources_of
from orchestrator.store import arrays
from orchestrator.store.statement import Statement
from orchestrator.store.transitions import identifier

_COUNTERS = "r.id::text, r.status, r.cancelling, r.total, r.open, r.success, r.failed, r.cancelled, r.skipped"


class RunRow(NamedTuple):
    """A run as the leader sees it."""

    id: bytes
    state: RunState
    cancelling: bool
    counters: RunCounters


def _rows(result: Iterable[Any]) -> list[RunRow]:
    return [
        RunRow(
            identifier(row[0]),
            RunState(row[1]),
            row[2],
            RunCounters(total=row[3], open=row[4], success=row[5], failed=row[6], cancelled=row[7], skipped=row[8]),
        )
        for row in result
    ]


_BEGIN = Statement(
    f"""
UPDATE orchestrator.runs r SET status = 'running', started_at = %(now)s::timestamptz
 WHERE r.id IN (SELECT id FROM orchestrator.runs
                 WHERE status = 'pending' AND NOT cancelling ORDER BY id LIMIT %(limit)s)
RETURNING {_COUNTERS}
"""
)


def begin(connection: Connection, now: datetime, limit: int) -> list[RunRow]:
    """Start pending runs."""
    return _rows(_BEGIN(connection, {"now": now, "limit": limit}))


_COUNT = Statement(
    f"""
UPDATE orchestrator.runs r
   SET open = r.open + d.opened, success = r.success + d.success, failed = r.failed + d.failed,
       cancelled = r.cancelled + d.cancelled, skipped = r.skipped + d.skipped
  FROM unnest(%(ids)s::uuid[], %(opened)s::int[], %(success)s::int[], %(failed)s::int[], %(cancelled)s::int[],
              %(skipped)s::int[]) AS d(id, opened, success, failed, cancelled, skipped)
 WHERE r.id = d.id
RETURNING {_COUNTERS}
"""
)

Delta = Mapping[str, int]
"""How much each counter changes: opened, success, failed, cancelled, skipped."""


def count(connection: Connection, deltas: Mapping[bytes, Delta]) -> list[RunRow]:
    """Change the counters of runs, once per run however many of its tasks moved."""
    parameters = {"ids": arrays.uuids(deltas)} | {
        column: arrays.numbers(delta.get(column, 0) for delta in deltas.values())
        for column in ("opened", "success", "failed", "cancelled", "skipped")
    }
    return _rows(_COUNT(connection, parameters))


def _sources(state: RunState) -> str:
    return "({})".format(", ".join(f"'{source}'" for source in run_sources_of(state)))


_END = {
    state: Statement(f"""
UPDATE orchestrator.runs SET status = '{state}', ended_at = %(now)s::timestamptz
 WHERE id = ANY(%(ids)s::uuid[]) AND status IN {_sources(state)} RETURNING id::text
""")
    for state in (RunState.SUCCESS, RunState.FAILED, RunState.CANCELLED)
}


def end(connection: Connection, state: RunState, ids: Sequence[bytes], now: datetime) -> list[bytes]:
    """End runs; return those that really ended now."""
    rows = _END[state](connection, {"ids": arrays.uuids(ids), "now": now})
    return [identifier(row[0]) for row in rows]


_REOPEN = Statement(
    f"""
UPDATE orchestrator.runs SET status = 'running', ended_at = NULL
 WHERE id = ANY(%(ids)s::uuid[]) AND status IN {_sources(RunState.RUNNING)} AND status <> 'pending'
"""
)


def reopen(connection: Connection, ids: Sequence[bytes]) -> None:
    """Set failed runs running again, because tasks of theirs are open again."""
    _REOPEN(connection, {"ids": arrays.uuids(ids)})


_ASK_CANCEL = Statement(
    """
UPDATE orchestrator.runs SET cancelling = true
 WHERE id = ANY(%(ids)s::uuid[]) AND status IN ('pending', 'running') AND NOT cancelling
"""
)


def mark_cancelling(connection: Connection, ids: Sequence[bytes]) -> None:
    """Note that runs are to be cancelled; their tasks follow in slices."""
    _ASK_CANCEL(connection, {"ids": arrays.uuids(ids)})


_CANCELLING = Statement(f"SELECT {_COUNTERS} FROM orchestrator.runs r WHERE r.cancelling AND r.ended_at IS NULL")


def cancelling(connection: Connection) -> list[RunRow]:
    """Return the runs that are being cancelled."""
    return _rows(_CANCELLING(connection))


_OPEN_TASKS = Statement(
    """
SELECT id::text FROM orchestrator.tasks WHERE run_id = ANY(%(ids)s::uuid[]) LIMIT %(limit)s
"""
)


def open_tasks(connection: Connection, ids: Sequence[bytes], limit: int) -> list[bytes]:
    """Return some of the open tasks of runs."""
    rows = _OPEN_TASKS(connection, {"ids": arrays.uuids(ids), "limit": limit})
    return [identifier(row[0]) for row in rows]


_RETRYABLE = Statement(
    """
SELECT id::text FROM orchestrator.ended_tasks
 WHERE run_id = ANY(%(ids)s::uuid[]) AND status IN ('failed', 'skipped') LIMIT %(limit)s
"""
)


def retryable_tasks(connection: Connection, ids: Sequence[bytes], limit: int) -> list[bytes]:
    """Return some of the failed and skipped tasks of runs."""
    rows = _RETRYABLE(connection, {"ids": arrays.uuids(ids), "limit": limit})
    return [identifier(row[0]) for row in rows]
