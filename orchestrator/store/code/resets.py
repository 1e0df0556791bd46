"""What the leader must know to reset runs of workflows as code, and the children that change hands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sqlalchemy import Connection

from orchestrator.domain.runs.verdict import TIMED_OUT
from orchestrator.domain.tasks.task import TaskError
from orchestrator.store import arrays
from orchestrator.store.code.runs import GOES_ON
from orchestrator.store.statement import Statement
from orchestrator.store.tasks.transitions import identifier

_HEADS = Statement(
    f"""
SELECT r.id::text, r.ended_at IS NULL, r.last_event, r.parent_run::text, r.parent_position,
       coalesce(r.child_id, r.id)::text, r.detached, r.tags::text[],
       CASE WHEN r.reason = '{TIMED_OUT}' THEN NULL
            ELSE extract(epoch FROM r.deadline - r.created_at)::double precision END, t.name <> r.workflow,
       r.schedule, r.fire_time::text, r.name, r.version
  FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (SELECT * FROM orchestrator.runs WHERE id = wanted.id AND code LIMIT 1) AS r
 CROSS JOIN LATERAL (
       SELECT name FROM orchestrator.tasks WHERE id = wanted.id
        UNION ALL
       SELECT name FROM orchestrator.ended_tasks WHERE id = wanted.id LIMIT 1) AS t
"""
)


class Head(NamedTuple):
    """A run of code, without its history."""

    id: bytes
    open: bool
    events: int
    """How many it has."""
    parent: bytes | None
    """The run that waits for it."""
    position: int | None
    child_id: bytes
    detached: bool
    tags: list[str]
    timeout: float | None
    """Seconds that it was given in all; None as well where they are over."""
    pinned: bool
    schedule: str | None
    fire_time: str | None
    name: str
    version: int
    """Of the code that took its last turn."""


def heads(connection: Connection, runs: Iterable[bytes]) -> dict[bytes, Head]:
    """Return those of these runs that are runs of code."""
    rows = _HEADS(connection, {"ids": arrays.uuids(runs)})
    found = (
        Head(identifier(row[0]), row[1], row[2], identifier(row[3]) or None, row[4], identifier(row[5]), *row[6:])
        for row in rows
    )
    return {head.id: head for head in found}


_ADOPT = Statement(
    f"""
WITH wanted AS MATERIALIZED (
    SELECT * FROM unnest(%(runs)s::uuid[], %(ids)s::uuid[], %(heirs)s::uuid[], %(heir_ids)s::uuid[])
             AS w(run, id, heir, heir_id)
), found AS MATERIALIZED (
    SELECT w.heir, w.heir_id, c.id AS child, c.place, c.status, c.ended_at
      FROM (SELECT DISTINCT run FROM wanted) AS parent
     CROSS JOIN LATERAL (
           SELECT ctid AS place, id, coalesce(child_id, id) AS awaited, status, ended_at FROM orchestrator.runs
            WHERE parent_run = parent.run AND detached AND code
              AND (reason IS NULL OR reason NOT IN {GOES_ON}) OFFSET 0) AS c
      JOIN wanted w ON w.run = parent.run AND w.id = c.awaited
), adopted AS (
    UPDATE orchestrator.runs r SET parent_run = found.heir, child_id = found.heir_id
      FROM found WHERE r.ctid = found.place AND found.ended_at IS NULL
)
SELECT found.child::text, found.heir::text, found.heir_id::text, found.status, t.status, t.result, t.error
  FROM found
  LEFT JOIN LATERAL (
       SELECT status, result, error FROM orchestrator.ended_tasks WHERE id = found.child LIMIT 1) AS t ON true
"""
)


class Handover(NamedTuple):
    """A child that another run is to wait for."""

    run: bytes
    child_id: bytes
    """The id under which that run waits for it."""
    heir: bytes
    heir_id: bytes
    """The same, of the run that takes it over."""


class Child(NamedTuple):
    """A child that was found, and how it ended if it has."""

    id: bytes
    heir: bytes
    heir_id: bytes
    state: str
    task_state: str | None
    """How its own task ended."""
    result: bytes | None
    error: TaskError | None


def adopt(connection: Connection, handovers: Sequence[Handover]) -> list[Child]:
    """Let runs wait for open children of others; return all children that there are, ended or not."""
    parameters = {
        "runs": arrays.uuids(one.run for one in handovers),
        "ids": arrays.uuids(one.child_id for one in handovers),
        "heirs": arrays.uuids(one.heir for one in handovers),
        "heir_ids": arrays.uuids(one.heir_id for one in handovers),
    }
    return [
        Child(
            identifier(row[0]),
            identifier(row[1]),
            identifier(row[2]),
            row[3],
            row[4],
            None if row[5] is None else bytes(row[5]),
            TaskError.stored(row[6]),
        )
        for row in _ADOPT(connection, parameters)
    ]
