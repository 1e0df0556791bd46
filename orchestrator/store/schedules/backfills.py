"""Backfills: the fires of a schedule over a range of the past, started a few at a time."""

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
    """Return what the runs of a backfill know as their schedule, so that they do not stand in its way."""
    return f"{key_of(workflow, name)}#{backfill}"


@dataclass(frozen=True, kw_only=True)
class BackfillView:
    """A backfill and how far it is."""

    id: int
    workflow: str
    name: str
    start_at: datetime
    end_at: datetime
    concurrency: int
    total: int
    """Fires in the range."""
    passed: int
    """Fires that have been looked at."""
    started: int
    """Runs that were started; a fire that had its run already gets no other, unless that was asked for."""
    open: int
    """Runs that have not ended, those that wait for their turn included."""
    running: int
    """Runs that are under way: as many at once as was asked for."""
    failed: int
    """Runs that failed or were cancelled."""
    error: str | None
    """Why it was given up."""
    created_at: datetime
    stuck: int = 0
    """Open runs that cannot go on."""

    @property
    def done(self) -> int:
        """Fires that need nothing more."""
        return self.passed - self.open

    @property
    def had_run(self) -> int:
        """Fires that had had their run, and got no other."""
        return self.passed - self.started

    @property
    def waiting(self) -> int:
        """Fires whose turn is still to come."""
        return (self.open if self.error is not None else self.total - self.done) - self.running

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
    """Not in the range itself."""
    concurrency: int
    again: bool
    total: int
    first: datetime | None
    """The first fire in the range."""


def add(connection: Connection, new: NewBackfill, *, flow: bool = False, flow_version: int | None = None) -> int:
    """Ask for a backfill of a workflow or a flow; return its number."""
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
    """Return those fires that have had their run."""
    by_key = {fire_key(key_of(new.workflow, new.schedule.name), fire): fire for fire in due}
    return {by_key[key] for key in _HAD_RUNS(connection, keys=by_key, workflow=new.workflow)}


class FireRun(NamedTuple):
    key: str
    id: UUID
    status: str
    started_at: datetime | None
    began_at: datetime | None
    """When it began, or began again because it was retried."""
    ended_at: datetime | None
    schedule: str | None
    """The key of its schedule; that of a backfill has a number behind it."""


_RUNS_OF_FIRES = Statement[FireRun]("""
SELECT /* backfills.runs_of_fires */ key, id, status, started_at,
       coalesce(retried_at, started_at) AS began_at, ended_at, schedule
  FROM orchestrator.runs
 WHERE key = ANY(%(keys)s::text[]) AND workflow = %(workflow)s::text
""")


def runs_of_fires(connection: Connection, workflow: str, name: str, due: Sequence[datetime]) -> dict[datetime, FireRun]:
    """Return the runs of these fires of a schedule; a fire that was missed or skipped has none."""
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


_GIVE_UP = Statement[None]("""
UPDATE /* backfills.give_up */ orchestrator.backfills SET next_fire = NULL, error = 'cancelled'
 WHERE id = %(id)s AND next_fire IS NOT NULL
""")
_CANCEL_RUNS = Statement[None](f"""
INSERT /* backfills.cancel_runs */ INTO orchestrator.inbox (kind, target)
SELECT '{RequestKind.CANCEL_RUN}', id FROM orchestrator.runs WHERE schedule = %(series)s AND ended_at IS NULL
""")


def cancel(connection: Connection, view: BackfillView) -> None:
    """Start no more of a backfill, and ask for the end of its open runs; in one transaction of the caller's.

    The leader holds the row while it starts runs, so none that it has started is overlooked.
    """
    _GIVE_UP(connection, id=view.id)
    _CANCEL_RUNS(connection, series=series_of(view.workflow, view.name, view.id))


# -- what the leader does


class OpenBackfill(NamedTuple):
    """A backfill of which more is to be started, locked until the tick ends."""

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
    """How runs of code are started, as JSON, by its schedule."""

    @property
    def target(self) -> Target:
        return Target(self.workflow, self.version, self.workflow_definition, self.code, self.flow)

    @property
    def series(self) -> str:
        return series_of(self.workflow, self.name, self.id)

    @property
    def schedule(self) -> Schedule:
        return from_data(self.definition)


_OPEN = Prepared[OpenBackfill](f"""
SELECT /* backfills.open */ s.id, s.workflow, s.name, s.definition, s.end_at AS end, s.concurrency, s.again,
       s.next_fire,
       (SELECT count(*) FROM orchestrator.runs r
         WHERE r.schedule = s.workflow || '/' || s.name || '#' || s.id AND r.ended_at IS NULL) AS running,
       coalesce(w.version, f.version) AS version, w.definition::text AS workflow_definition, s.flow,
       (SELECT code::text FROM orchestrator.schedules WHERE workflow = s.workflow AND name = s.name) AS code
  FROM (SELECT * FROM orchestrator.backfills
         WHERE next_fire IS NOT NULL ORDER BY id LIMIT %(limit)s FOR UPDATE SKIP LOCKED) AS s
{NEWEST_OF_S} ORDER BY s.id
""")


def open_backfills(connection: Connection, limit: int) -> list[OpenBackfill]:
    """Return the oldest backfills that have more to start."""
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
    """Note how far a backfill has come."""
