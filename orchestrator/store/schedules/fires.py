"""Fires of schedules, for the leader: a slice of the due schedules, and their new state."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, NamedTuple

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.code.history import RunStarted
from orchestrator.domain.dag.definition import Definition, queueing_problem, resolve_params
from orchestrator.domain.dag.expression import parse_template
from orchestrator.domain.ids import to_text
from orchestrator.domain.schedules.schedule import Schedule, fire_text, key_of
from orchestrator.domain.tasks.starts import CodeTarget
from orchestrator.errors import InvalidWorkflow
from orchestrator.sealing import CALL, Vault
from orchestrator.store.batches import Batch
from orchestrator.store.code import runs as code_runs
from orchestrator.store.dag import plans as dags
from orchestrator.store.flow import runs as flow_runs
from orchestrator.store.runs.creation import NewRun
from orchestrator.store.sql import Prepared, Row


class Target(NamedTuple):
    """The target of a schedule: the newest version of a workflow, a version of a flow, or code."""

    name: str
    version: int | None
    """None if the workflow or flow does not exist, or is code."""
    definition: str | None
    """The definition as JSON; None if the workflow does not exist, or is a flow or code."""
    code: str | None = None
    """For a workflow as code: JSON that says how its runs are started."""
    flow: bool = False
    """Whether the target is a flow."""


class DueSchedule(NamedTuple):
    """A due schedule, locked until the tick ends."""

    workflow: str
    name: str
    definition: str
    next_fire: datetime
    overlap: str
    place: str
    """The ctid of the row, which is stable while the row is locked."""
    target: Target

    @property
    def key(self) -> str:
        return key_of(self.workflow, self.name)


NEWEST_OF_S = """
  LEFT JOIN LATERAL (SELECT version, definition FROM orchestrator.workflows
                      WHERE name = s.workflow AND NOT s.flow AND deleted_at IS NULL
                      ORDER BY version DESC LIMIT 1) AS w ON true
  LEFT JOIN LATERAL (SELECT version FROM orchestrator.flows
                      WHERE name = s.workflow AND s.flow AND version > 0
                        AND CASE WHEN s.flow_version IS NULL THEN published AND deleted_at IS NULL
                                 ELSE version = s.flow_version END
                      ORDER BY version DESC LIMIT 1) AS f ON true
"""

# A schedule that is being changed is skipped until the next tick.
_DUE = Prepared[Row](f"""
SELECT /* fires.due */ s.workflow, s.name, s.definition::text AS definition, s.next_fire,
       coalesce(s.definition ->> 'overlap', 'skip') AS overlap, s.place, coalesce(w.version, f.version) AS version,
       w.definition::text AS target, s.code::text AS code, s.flow
  FROM (SELECT workflow, name, definition, next_fire, due_at, code, flow, flow_version, ctid AS place
          FROM orchestrator.schedules
         WHERE due_at <= %(now)s::timestamptz AND NOT paused
         ORDER BY due_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED) AS s
{NEWEST_OF_S} ORDER BY s.due_at
""")


def due(connection: Connection, now: datetime, limit: int) -> list[DueSchedule]:
    """Return due schedules, longest due first."""
    return [
        DueSchedule(
            row.workflow,
            row.name,
            row.definition,
            row.next_fire,
            row.overlap,
            row.place,
            Target(row.workflow, row.version, row.target, row.code, row.flow),
        )
        for row in _DUE(connection, now=now, limit=limit)
    ]


_OPEN = Prepared[tuple[str, bytes]]("""
SELECT /* fires.open */ asked.key, r.id FROM unnest(%(keys)s::text[]) AS asked(key)
 CROSS JOIN LATERAL (SELECT id FROM orchestrator.runs
                      WHERE schedule = asked.key AND ended_at IS NULL OFFSET 0) AS r
""")


def open_runs(connection: Connection, keys: Sequence[str]) -> dict[str, list[bytes]]:
    """Return the open runs of each schedule."""
    runs: dict[str, list[bytes]] = {key: [] for key in keys}
    for key, run in _OPEN(connection, keys=keys):
        runs[key].append(run)
    return runs


class Advance(NamedTuple):
    """The new state of a locked schedule."""

    place: Annotated[str, "tid"]
    workflow: str
    name: str
    next_fire: datetime | None
    due_at: datetime | None
    last_fire: datetime | None
    """None keeps the old value."""
    last_run: bytes | None
    fired: int
    skipped: int
    error: str | None


_ADVANCES = Batch("d", Advance)
_ADVANCE = Prepared[None](f"""
UPDATE /* fires.advance */ orchestrator.schedules s
   SET next_fire = d.next_fire, due_at = d.due_at, last_fire = coalesce(d.last_fire, s.last_fire),
       last_run = coalesce(d.last_run, s.last_run), fired = s.fired + d.fired, skipped = s.skipped + d.skipped,
       error = d.error
  FROM {_ADVANCES}
 CROSS JOIN LATERAL (
       SELECT ctid AS place, workflow, name FROM orchestrator.schedules WHERE ctid = d.place LIMIT 1) AS found
 WHERE s.ctid = found.place AND found.workflow = d.workflow AND found.name = d.name
""")


def advance(connection: Connection, advances: Sequence[Advance]) -> None:
    """Save the new state of schedules."""
    _ADVANCE(connection, _ADVANCES(advances))


@functools.lru_cache(maxsize=64)  # thousands of schedules start the same workflow
def _definitions(text: str, timezone: str) -> tuple[Definition, Definition]:
    """Return a definition, and the same definition with the schedule's time zone."""
    definition = msgspec.json.decode(text, type=Definition)
    return definition, msgspec.structs.replace(definition, schedule={"timezone": timezone})


def run_of(
    target: Target,
    schedule: Schedule,
    fire: datetime,
    run_id: bytes,
    series: str,
    vault: Vault | None = None,
    *,
    key: str | None = None,
) -> NewRun:
    """Return the run of one fire; raise `InvalidWorkflow` if there can be none. `series` is the run's schedule key.

    In templates, `today` is the day of the fire in the schedule's time zone. Arguments of code are sealed here, because
    histories are stored as they are.
    """
    code = None if target.code is None else msgspec.json.decode(target.code, type=CodeTarget)
    version = target.version if code is None else code.version
    if version is None or not (code or target.definition or target.flow):
        raise InvalidWorkflow(f"There is no {'flow' if target.flow else 'workflow'} {target.name!r}.")
    fire_time = fire_text(fire)
    arguments = schedule.params
    if b"${" in msgspec.json.encode(arguments):  # finding no template is faster than parsing one
        info = {"id": to_text(run_id), "workflow": target.name, "version": version, "fire_time": fire_time}
        arguments = parse_template(arguments).render({"run": info})
    definition: Definition | None = None
    if code is not None:
        payload = msgspec.msgpack.encode(((), arguments))
        payload = payload if vault is None else vault.seal(CALL, payload)
        started = RunStarted(target.name, version, payload, code.queue)
        run = code_runs.new_run(run_id, [started], pinned=code.pinned)
        run = run._replace(timeout=code.timeout, schedule=series, fire_time=fire_time, key=key)
    elif target.definition is None:
        run = flow_runs.new_run(target.name, version, run_id, arguments)
        run = run._replace(schedule=series, fire_time=fire_time, key=key)
    else:
        definition, in_zone = _definitions(target.definition, schedule.timezone)
        params = resolve_params(in_zone, arguments, fire)
        run = dags.new_run(definition, version, run_id, params, key=key, schedule=series, fire_time=fire_time)
    if schedule.overlap == "queue":
        if definition is not None and (problem := queueing_problem(definition)):
            raise InvalidWorkflow(f"Workflow {target.name!r}: {problem}")
        run = run._replace(lane=run.lane or f"schedule {series}", lane_limit=1)
    return run
