"""Schedules, as people and definitions set them. What happens when they fire is in `fires`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.dag.definition import Definition
from orchestrator.domain.plain import stored_json
from orchestrator.domain.schedules.schedule import Schedule, delay_of, from_data, key_of, next_fire
from orchestrator.domain.tasks.starts import CodeTarget


@dataclass(frozen=True, kw_only=True)
class StoredSchedule:
    """A schedule and how it is doing."""

    workflow: str
    name: str
    schedule: Schedule
    declared: bool
    """It stands in the definition of its workflow."""
    paused: bool
    next_fire: datetime | None
    due_at: datetime | None
    """When the next fire is looked at: later than it by the jitter."""
    last_fire: datetime | None
    last_run: UUID | None
    last_state: str | None
    """The state of the last run."""
    fired: int
    skipped: int
    """Fires that came while a run was open."""
    error: str | None
    """Why the last fire could not start a run."""
    code: CodeTarget | None = None
    """How runs of a workflow as code are started, if it is one."""
    origin: str | None = None
    """The application whose code declares it."""
    forgotten_at: datetime | None = None
    """Since when that code declares it no more."""

    @property
    def key(self) -> str:
        return key_of(self.workflow, self.name)


def clock(connection: Connection) -> datetime:
    """Return the database's time, by which schedules fire."""
    now: datetime = connection.exec_driver_sql("SELECT now()").scalar_one()
    return now


_SELECT = """
SELECT s.workflow, s.name, s.definition, s.declared, s.paused, s.next_fire, s.due_at, s.last_fire, s.last_run,
       r.status, s.fired, s.skipped, s.error, s.code, s.origin, s.forgotten_at
  FROM orchestrator.schedules s LEFT JOIN orchestrator.runs r ON r.id = s.last_run
"""


def _stored(row: Sequence[Any]) -> StoredSchedule:
    names = ("declared", "paused", "next_fire", "due_at", "last_fire", "last_run", "last_state", "fired", "skipped")
    try:
        schedule = from_data(row[2])
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(f"schedule {key_of(row[0], row[1])}: {error}") from error
    return StoredSchedule(
        workflow=row[0],
        name=row[1],
        schedule=schedule,
        **dict(zip(names, row[3:12], strict=True)),
        error=row[12],
        code=None if row[13] is None else msgspec.convert(row[13], CodeTarget),
        origin=row[14],
        forgotten_at=row[15],
    )


def list_all(connection: Connection) -> list[StoredSchedule]:
    """Return all schedules, in order of their names."""
    return [_stored(row) for row in connection.exec_driver_sql(f"{_SELECT} ORDER BY s.workflow, s.name")]


_FIND = f"{_SELECT} WHERE s.workflow = %(text)s OR s.workflow || '/' || s.name = %(text)s ORDER BY s.workflow, s.name"


def find(connection: Connection, text: str) -> list[StoredSchedule]:
    """Return the schedules of a workflow, or the one that is called workflow/name."""
    return [_stored(row) for row in connection.exec_driver_sql(_FIND, {"text": text})]


# Whoever sets a schedule again does not shift it: only other times give it another next fire. A person's pause, or
# the end of one, stays until the definition itself says something else than it did.
_PUT = """
INSERT INTO orchestrator.schedules AS s (workflow, name, definition, declared, paused, next_fire, due_at, code)
VALUES (%(workflow)s, %(name)s, %(definition)s::jsonb, %(declared)s, %(paused)s, %(next_fire)s, %(due_at)s,
        %(code)s::jsonb)
    ON CONFLICT (workflow, name) DO UPDATE
   SET definition = excluded.definition,
       code = excluded.code,
       declared = excluded.declared,
       forgotten_at = NULL,
       error = CASE WHEN s.definition = excluded.definition THEN s.error END,
       paused = CASE WHEN s.definition -> 'paused' IS DISTINCT FROM excluded.definition -> 'paused'
                     THEN excluded.paused ELSE s.paused END,
       next_fire = CASE WHEN {same} THEN s.next_fire ELSE excluded.next_fire END,
       due_at = CASE WHEN {same} THEN s.due_at ELSE excluded.due_at END
""".format(same="NOT s.paused AND s.definition - %(beside)s::text[] = excluded.definition - %(beside)s::text[]")
_BESIDE_THE_TIME = ["name", "overlap", "catch_up", "params", "paused"]


def put(
    connection: Connection,
    workflow: str,
    schedule: Schedule,
    now: datetime,
    *,
    declared: bool = False,
    code: CodeTarget | None = None,
) -> None:
    """Set a schedule; it fires from now on."""
    fire = next_fire(schedule, now)
    parameters = {
        "workflow": workflow,
        "name": schedule.name,
        "definition": stored_json(schedule),
        "declared": declared,
        "code": None if code is None else msgspec.json.encode(code).decode(),
        "paused": schedule.paused,
        "next_fire": fire,
        "due_at": fire and fire + delay_of(schedule, key_of(workflow, schedule.name)),
        "beside": _BESIDE_THE_TIME,
    }
    connection.exec_driver_sql(_PUT, parameters)


_UNDECLARE = """
DELETE FROM orchestrator.schedules
 WHERE workflow = %(workflow)s AND declared AND name IS DISTINCT FROM %(name)s::text
"""


def declare(connection: Connection, definition: Definition) -> None:
    """Set the schedule that stands in a definition, and remove the one that an earlier version had instead."""
    schedule = from_data(definition.schedule) if definition.schedule is not None else None
    parameters = {"workflow": definition.name, "name": schedule and schedule.name}
    connection.exec_driver_sql(_UNDECLARE, parameters)
    if schedule is not None:
        put(connection, definition.name, schedule, clock(connection), declared=True)


_CLAIM_ORIGIN = """
UPDATE orchestrator.schedules SET origin = %(origin)s
 WHERE workflow || '/' || name = ANY (%(keys)s::text[]) AND declared AND origin IS DISTINCT FROM %(origin)s
"""
_FORGET = """
UPDATE orchestrator.schedules SET forgotten_at = coalesce(forgotten_at, now())
 WHERE origin = %(origin)s AND declared AND NOT workflow || '/' || name = ANY (%(keys)s::text[])
RETURNING workflow || '/' || name
"""


def claim_origin(connection: Connection, origin: str, keys: Sequence[str]) -> list[str]:
    """Note which schedules an application's code declares; return those that it once did and does no more."""
    parameters = {"origin": origin, "keys": list(keys)}
    connection.exec_driver_sql(_CLAIM_ORIGIN, parameters)
    return sorted(connection.exec_driver_sql(_FORGET, parameters).scalars())


_PAUSE = """
UPDATE orchestrator.schedules SET paused = true WHERE workflow = %(workflow)s AND name = %(name)s AND NOT paused
"""


def pause(connection: Connection, workflow: str, name: str) -> bool:
    """Let a schedule fire no more until it is resumed; False if it does not anyway."""
    return connection.exec_driver_sql(_PAUSE, {"workflow": workflow, "name": name}).rowcount > 0


_RESUME = """
UPDATE orchestrator.schedules SET paused = false, next_fire = %(next_fire)s, due_at = %(due_at)s
 WHERE workflow = %(workflow)s AND name = %(name)s AND paused
"""


def resume(connection: Connection, stored: StoredSchedule, now: datetime) -> bool:
    """Let a schedule fire again, from now on: what came during the pause was not wanted. False if it fires anyway."""
    fire = next_fire(stored.schedule, now)
    parameters = {
        "workflow": stored.workflow,
        "name": stored.name,
        "next_fire": fire,
        "due_at": fire and fire + delay_of(stored.schedule, stored.key),
    }
    return connection.exec_driver_sql(_RESUME, parameters).rowcount > 0


_DELETE = "DELETE FROM orchestrator.schedules WHERE workflow = %(workflow)s AND name = %(name)s"


def delete(connection: Connection, workflow: str, name: str) -> bool:
    """Remove a schedule; its runs stay. False if there is none."""
    return connection.exec_driver_sql(_DELETE, {"workflow": workflow, "name": name}).rowcount > 0
