"""Backfills: fires of a schedule in a past range, started a few at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.domain.plain import stored_json
from orchestrator.domain.schedules.schedule import Schedule, fire_key, from_data, key_of
from orchestrator.store.inbox import RequestKind
from orchestrator.store.schedules.fires import NEWEST_OF_S, Target
from orchestrator.store.sql import Prepared, Statement


def series_of(workflow: str, name: str, backfill: int) -> str:
    """Return the schedule key that a backfill's runs get: a key of their own, so they do not count as overlaps."""
    return f"{key_of(workflow, name)}#{backfill}"


@dataclass(frozen=True, kw_only=True)
class BackfillView:
    """A backfill and its progress."""

    id: int
    workflow: str
    name: str
    start_at: datetime
    end_at: datetime
    concurrency: int
    total: int
    """Fires in the range."""
    passed: int
    """Fires that were processed."""
    started: int
    """Runs that were started. A fire that already had a run gets none, unless the backfill runs such fires again."""
    open: int
    """Runs that have not ended, including pending ones."""
    running: int
    """Running runs, at most `concurrency`."""
    failed: int
    """Runs that failed or were cancelled."""
    error: str | None
    """The reason for which the backfill was aborted."""
    created_at: datetime
    stuck: int = 0
    """Open runs that are stuck."""

    @property
    def done(self) -> int:
        """Fires that need nothing more."""
        return self.passed - self.open

    @property
    def had_run(self) -> int:
        """Fires that already had a run, and got none."""
        return self.passed - self.started

    @property
    def waiting(self) -> int:
        """Fires whose run has not begun."""
        return (self.open if self.error is not None else self.total - self.done) - self.running

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing to cancel: it is over, and did not stop with an error that `status` reports."""
        return self.is_over and self.error in (None, "cancelled")

    @property
    def is_over(self) -> bool:
        return self.open == 0 and (self.error is not None or self.passed >= self.total)


_ADD = Statement[int]("""
INSERT /* backfills.add */ INTO orchestrator.backfills
       (workflow, name, definition, start_at, end_at, concurrency, again, total, next_fire, flow, flow_version)
VALUES (%(workflow)s, %(name)s, %(definition)s::jsonb, %(start)s, %(end)s, %(concurrency)s, %(again)s, %(total)s,
        %(next_fire)s, %(flow)s, %(flow_version)s)
RETURNING id
""")


class NewBackfill(NamedTuple):
    """A requested backfill."""

    workflow: str
    schedule: Schedule
    start: datetime
    end: datetime
    """The exclusive end of the range."""
    concurrency: int
    again: bool
    total: int
    first: datetime | None
    """The first fire in the range."""


def add(connection: Connection, new: NewBackfill, *, flow: bool = False, flow_version: int | None = None) -> int:
    """Insert a backfill of a workflow or a flow; return its id."""
    return _ADD.one(
        connection,
        workflow=new.workflow,
        name=new.schedule.name,
        definition=stored_json(new.schedule),
        start=new.start,
        end=new.end,
        concurrency=new.concurrency,
        again=new.again,
        total=new.total,
        next_fire=new.first,
        flow=flow,
        flow_version=flow_version,
    )


_HAD_RUNS = Statement[str]("""
SELECT /* backfills.had_runs */ key FROM orchestrator.runs
 WHERE key = ANY(%(keys)s::text[]) AND workflow = %(workflow)s::text
""")


def had_runs(connection: Connection, new: NewBackfill, due: Sequence[datetime]) -> set[datetime]:
    """Return the fires that already have a run."""
    by_key = {fire_key(key_of(new.workflow, new.schedule.name), fire): fire for fire in due}
    return {by_key[key] for key in _HAD_RUNS(connection, keys=by_key, workflow=new.workflow)}


class FireRun(NamedTuple):
    key: str
    id: UUID
    status: str
    started_at: datetime | None
    began_at: datetime | None
    """The time of the last start: the first one, or that of the last retry."""
    ended_at: datetime | None
    schedule: str | None
    """The key of the schedule; a backfill's key ends with its number."""


_RUNS_OF_FIRES = Statement[FireRun]("""
SELECT /* backfills.runs_of_fires */ key, id, status, started_at,
       coalesce(retried_at, started_at) AS began_at, ended_at, schedule
  FROM orchestrator.runs
 WHERE key = ANY(%(keys)s::text[]) AND workflow = %(workflow)s::text
""")


def runs_of_fires(connection: Connection, workflow: str, name: str, due: Sequence[datetime]) -> dict[datetime, FireRun]:
    """Return the runs for these fires of a schedule; fires that were missed or skipped have none."""
    by_key = {fire_key(key_of(workflow, name), fire): fire for fire in due}
    return {by_key[run.key]: run for run in _RUNS_OF_FIRES(connection, keys=list(by_key), workflow=workflow)}


_VIEW = """
SELECT /* backfills.{name} */ b.id, b.workflow, b.name, b.start_at, b.end_at, b.concurrency, b.total, b.passed,
       b.started, unended.open, unended.running, ended.failed, b.error, b.created_at, unended.stuck
  FROM orchestrator.backfills b
 CROSS JOIN LATERAL (
       SELECT count(*) AS open, count(*) FILTER (WHERE status = 'running') AS running,
              count(*) FILTER (WHERE stuck IS NOT NULL) AS stuck
         FROM orchestrator.runs r
        WHERE r.schedule = b.workflow || '/' || b.name || '#' || b.id AND r.ended_at IS NULL) AS unended
 CROSS JOIN LATERAL (
       SELECT count(*) AS failed FROM orchestrator.runs r
        WHERE r.schedule = b.workflow || '/' || b.name || '#' || b.id AND r.status IN ('failed', 'cancelled')) AS ended
 {which}
"""


@Statement.function(_VIEW.format(name="show", which="WHERE b.id = %(number)s"))
def show(connection: Connection, number: int) -> BackfillView | None:
    """Return one backfill."""


@Statement.function(_VIEW.format(name="newest", which="ORDER BY b.id DESC LIMIT %(limit)s"))
def list_newest(connection: Connection, limit: int) -> list[BackfillView]:
    """Return the newest backfills, newest first."""


_STOP = Statement[None]("""
UPDATE /* backfills.give_up */ orchestrator.backfills SET next_fire = NULL, error = 'cancelled'
 WHERE id = %(id)s AND (next_fire IS NOT NULL OR error IS NOT NULL)
""")
_CANCEL_RUNS = Statement[None](f"""
INSERT /* backfills.cancel_runs */ INTO orchestrator.inbox (kind, target)
SELECT '{RequestKind.CANCEL_RUN}', id FROM orchestrator.runs WHERE schedule = %(series)s AND ended_at IS NULL
""")


def cancel(connection: Connection, view: BackfillView) -> None:
    """Stop a backfill, and request the cancellation of its open runs; in the caller's transaction.

    The leader locks the row while it starts runs, so every started run is included.
    """
    _STOP(connection, id=view.id)
    _CANCEL_RUNS(connection, series=series_of(view.workflow, view.name, view.id))


# -- for the leader


class OpenBackfill(NamedTuple):
    """A backfill with more runs to start, locked until the tick ends."""

    id: int
    workflow: str
    name: str
    definition: dict[str, Any]
    end: datetime
    concurrency: int
    again: bool
    next_fire: datetime
    running: int
    version: int | None
    workflow_definition: str | None
    flow: bool
    code: str | None
    """JSON that says how the schedule starts runs of code."""
    params: dict[str, Any] | None
    """The current parameters of the schedule, which fit the newest version; None if the schedule was deleted."""

    @property
    def target(self) -> Target:
        return Target(self.workflow, self.version, self.workflow_definition, self.code, self.flow)

    @property
    def series(self) -> str:
        return series_of(self.workflow, self.name, self.id)

    @property
    def schedule(self) -> Schedule:
        params = {} if self.params is None else {"params": self.params}
        return from_data(self.definition | params)


_OPEN = Prepared[OpenBackfill](f"""
SELECT /* backfills.open */ s.id, s.workflow, s.name, s.definition, s.end_at AS end, s.concurrency, s.again,
       s.next_fire,
       (SELECT count(*) FROM orchestrator.runs r
         WHERE r.schedule = s.workflow || '/' || s.name || '#' || s.id AND r.ended_at IS NULL) AS running,
       coalesce(w.version, f.version) AS version, w.definition::text AS workflow_definition, s.flow,
       present.code, present.params
  FROM (SELECT * FROM orchestrator.backfills
         WHERE next_fire IS NOT NULL ORDER BY id LIMIT %(limit)s FOR UPDATE SKIP LOCKED) AS s
  LEFT JOIN LATERAL (SELECT code::text, coalesce(definition -> 'params', '{{}}') AS params FROM orchestrator.schedules
                      WHERE workflow = s.workflow AND name = s.name LIMIT 1) AS present ON true
{NEWEST_OF_S} ORDER BY s.id
""")


def open_backfills(connection: Connection, limit: int) -> list[OpenBackfill]:
    """Return the oldest backfills with more runs to start."""
    return _OPEN(connection, limit=limit)


@Prepared.function("""
UPDATE /* backfills.save */ orchestrator.backfills
   SET next_fire = %(next_fire)s::timestamptz, passed = passed + %(passed)s::int, started = started + %(started)s::int,
       error = %(error)s::text
 WHERE id = %(backfill)s::bigint
""")
def save(
    connection: Connection, backfill: int, next_fire: datetime | None, passed: int, started: int, error: str | None
) -> None:
    """Save the progress of a backfill."""
