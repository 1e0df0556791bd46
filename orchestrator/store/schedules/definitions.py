"""Schedules as people and definitions set them. `fires` has the statements for firing them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.dag.definition import Definition
from orchestrator.domain.plain import stored_json
from orchestrator.domain.schedules.schedule import Schedule, delay_of, from_data, key_of, next_fire
from orchestrator.domain.tasks.starts import CodeTarget
from orchestrator.store.sql import Row, Statement


@dataclass(frozen=True, kw_only=True)
class StoredSchedule:
    """A schedule and its status."""

    workflow: str
    name: str
    schedule: Schedule
    declared: bool
    """Whether the definition of the workflow contains the schedule."""
    paused: bool
    next_fire: datetime | None
    due_at: datetime | None
    """The time to process the next fire: the fire plus jitter."""
    last_fire: datetime | None
    last_run: UUID | None
    last_state: str | None
    """The state of the last run."""
    fired: int
    skipped: int
    """Fires that were skipped because a run was open."""
    error: str | None
    """The reason for which the last fire could not start a run."""
    code: CodeTarget | None = None
    """How runs of a workflow as code are started; None for other workflows."""
    origin: str | None = None
    """The application whose code declares the schedule."""
    forgotten_at: datetime | None = None
    """The time since which that code no longer declares the schedule."""
    flow: bool = False
    """Whether the schedule starts runs of a flow."""
    flow_version: int | None = None
    """A fixed version of the flow; None uses the newest published version at each fire."""
    created_at: datetime | None = None
    """None from a server of the previous release."""

    @property
    def key(self) -> str:
        return key_of(self.workflow, self.name)


@Statement.function("SELECT /* schedules.now */ now()")
def clock(connection: Connection) -> datetime:
    """Return the time in Postgres, by which schedules fire."""


def _select(name: str, which: str = "", source: str = "orchestrator.schedules") -> Statement[Row]:
    return Statement[Row](f"""
SELECT /* schedules.{name} */ s.workflow, s.name, s.definition, s.declared, s.paused, s.next_fire, s.due_at,
       s.last_fire, s.last_run, r.status AS last_state, s.fired, s.skipped, s.error, s.code, s.origin, s.forgotten_at,
       s.flow, s.flow_version, s.created_at
  FROM {source} s LEFT JOIN orchestrator.runs r ON r.id = s.last_run {which}
 ORDER BY s.workflow, s.name
""")


def _stored(row: Row) -> StoredSchedule:
    columns = row._asdict()
    try:
        schedule = from_data(columns.pop("definition"))
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(f"schedule {key_of(row.workflow, row.name)}: {error}") from error
    code = None if row.code is None else msgspec.convert(row.code, CodeTarget)
    return StoredSchedule(**columns | {"schedule": schedule, "code": code})


class SchedulePage(NamedTuple):
    """A page of schedules, in order of their keys."""

    schedules: list[StoredSchedule]
    next: str | None
    """The `after` of the next page; None on the last page."""


_PAGE = _select(
    "page",
    source="""(
       SELECT * FROM orchestrator.schedules
        WHERE (workflow, name) > (%(workflow)s::text, %(name)s::text) AND starts_with(workflow, %(within)s::text)
        ORDER BY workflow, name LIMIT %(limit)s)""",
)


def page(connection: Connection, *, limit: int, after: str | None = None, within: str = "") -> SchedulePage:
    """Return schedules after the key `after`, of workflows whose names begin with `within`."""
    workflow, _, name = (after or "").rpartition("/")
    rows = _PAGE(connection, workflow=workflow, name=name, within=within, limit=limit)
    schedules = [_stored(row) for row in rows]
    return SchedulePage(schedules, schedules[-1].key if len(schedules) == limit else None)


_FIND = _select("find", "WHERE s.workflow = %(text)s OR s.workflow || '/' || s.name = %(text)s")


def find(connection: Connection, text: str) -> list[StoredSchedule]:
    """Return the schedules of a workflow, or the schedule with the key workflow/name."""
    return [_stored(row) for row in _FIND(connection, text=text)]


# Setting a schedule again keeps its next fire unless its times change. A pause or resume by a person stays until the
# definition's own `paused` changes.
_SAME_TIMES = "NOT s.paused AND s.definition - %(beside)s::text[] = excluded.definition - %(beside)s::text[]"
_PUT = Statement[None](f"""
INSERT /* schedules.put */ INTO orchestrator.schedules AS s
       (workflow, name, definition, declared, paused, next_fire, due_at, code, flow, flow_version)
VALUES (%(workflow)s, %(name)s, %(definition)s::jsonb, %(declared)s, %(paused)s, %(next_fire)s, %(due_at)s,
        %(code)s::jsonb, %(flow)s, %(flow_version)s)
    ON CONFLICT (workflow, name) DO UPDATE
   SET definition = excluded.definition,
       code = excluded.code,
       flow = excluded.flow,
       flow_version = excluded.flow_version,
       declared = excluded.declared,
       forgotten_at = NULL,
       error = CASE WHEN s.definition = excluded.definition THEN s.error END,
       paused = CASE WHEN s.definition -> 'paused' IS DISTINCT FROM excluded.definition -> 'paused'
                     THEN excluded.paused ELSE s.paused END,
       next_fire = CASE WHEN {_SAME_TIMES} THEN s.next_fire ELSE excluded.next_fire END,
       due_at = CASE WHEN {_SAME_TIMES} THEN s.due_at ELSE excluded.due_at END
""")
_FIELDS_BESIDE_TIMES = ["name", "overlap", "catch_up", "params", "paused"]


def put(
    connection: Connection,
    workflow: str,
    schedule: Schedule,
    now: datetime,
    *,
    declared: bool = False,
    code: CodeTarget | None = None,
    flow: bool = False,
    flow_version: int | None = None,
) -> None:
    """Insert or update a schedule; it fires from now on."""
    fire = next_fire(schedule, now)
    _PUT(
        connection,
        workflow=workflow,
        name=schedule.name,
        definition=stored_json(schedule),
        declared=declared,
        code=None if code is None else msgspec.json.encode(code).decode(),
        flow=flow,
        flow_version=flow_version,
        paused=schedule.paused,
        next_fire=fire,
        due_at=fire and fire + delay_of(schedule, key_of(workflow, schedule.name)),
        beside=_FIELDS_BESIDE_TIMES,
    )


_UNDECLARE = Statement[None]("""
DELETE /* schedules.undeclare */ FROM orchestrator.schedules
 WHERE workflow = %(workflow)s AND declared AND name IS DISTINCT FROM %(name)s::text
""")


def declare(connection: Connection, definition: Definition) -> None:
    """Set the schedule in a definition, and delete another one that an earlier version declared."""
    schedule = from_data(definition.schedule) if definition.schedule is not None else None
    _UNDECLARE(connection, workflow=definition.name, name=schedule and schedule.name)
    if schedule is not None:
        put(connection, definition.name, schedule, clock(connection), declared=True)


def declare_flow(connection: Connection, flow: str, schedule: Schedule | None, now: datetime) -> None:
    """Set the schedule in a flow's file, and delete another one that the file declared before."""
    _UNDECLARE(connection, workflow=flow, name=schedule and schedule.name)
    if schedule is not None:
        put(connection, flow, schedule, now, declared=True, flow=True)


_CLAIM_ORIGIN = Statement[None]("""
UPDATE /* schedules.claim_origin */ orchestrator.schedules SET origin = %(origin)s
 WHERE workflow || '/' || name = ANY (%(keys)s::text[]) AND declared AND origin IS DISTINCT FROM %(origin)s
""")
_FORGET = Statement[str]("""
UPDATE /* schedules.forget */ orchestrator.schedules SET forgotten_at = coalesce(forgotten_at, now())
 WHERE origin = %(origin)s AND declared AND NOT workflow || '/' || name = ANY (%(keys)s::text[])
RETURNING workflow || '/' || name
""")


def claim_origin(connection: Connection, origin: str, keys: Sequence[str]) -> list[str]:
    """Record which schedules an application's code declares; return schedules that the code no longer declares."""
    _CLAIM_ORIGIN(connection, origin=origin, keys=keys)
    return sorted(_FORGET(connection, origin=origin, keys=keys))


_PAUSE = Statement[None]("""
UPDATE /* schedules.pause */ orchestrator.schedules SET paused = true
 WHERE workflow = %(workflow)s AND name = %(name)s AND NOT paused
""")


def pause(connection: Connection, workflow: str, name: str) -> bool:
    """Pause the schedule. Return False if it was paused already."""
    return _PAUSE.count(connection, workflow=workflow, name=name) > 0


_RESUME = Statement[None]("""
UPDATE /* schedules.resume */ orchestrator.schedules SET paused = false, next_fire = %(next_fire)s, due_at = %(due_at)s
 WHERE workflow = %(workflow)s AND name = %(name)s AND paused
""")


def resume(connection: Connection, stored: StoredSchedule, now: datetime) -> bool:
    """Resume the schedule from now on, without fires from the pause. Return False if it was not paused."""
    fire = next_fire(stored.schedule, now)
    due_at = fire and fire + delay_of(stored.schedule, stored.key)
    count = _RESUME.count(connection, workflow=stored.workflow, name=stored.name, next_fire=fire, due_at=due_at)
    return count > 0


_DELETE = Statement[None](
    "DELETE /* schedules.delete */ FROM orchestrator.schedules WHERE workflow = %(workflow)s AND name = %(name)s"
)


def delete(connection: Connection, workflow: str, name: str) -> bool:
    """Delete a schedule; its runs stay. Return False if it does not exist."""
    return _DELETE.count(connection, workflow=workflow, name=name) > 0
