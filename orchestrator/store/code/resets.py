"""What the leader must know to reset runs of workflows as code, and the children that change hands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sqlalchemy import Connection

from orchestrator.domain.runs.verdict import GOES_ON, TIMED_OUT
from orchestrator.domain.tasks.task import TaskError
from orchestrator.store.sql import Batch, Prepared


class CodeRunRow(NamedTuple):
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
    terminates: bool
    tags: list[str]
    timeout: float | None
    """Seconds that it was given in all; None as well where they are over."""
    pinned: bool
    schedule: str | None
    fire_time: str | None
    lane: str | None
    lane_limit: int | None
    begun: bool
    name: str
    version: int
    """Of the code that took its last turn."""
    trace: str | None = None
    headers: str | None = None


_HEADS = Prepared[CodeRunRow](f"""
SELECT /* resets.heads */ r.id, r.ended_at IS NULL AS open, r.last_event AS events, r.parent_run AS parent,
       r.parent_position AS position, coalesce(r.child_id, r.id) AS child_id, r.detached, r.terminates,
       r.tags::text[] AS tags,
       CASE WHEN r.reason = '{TIMED_OUT}' THEN NULL
            ELSE extract(epoch FROM r.deadline - r.created_at)::double precision END AS timeout,
       t.name <> r.workflow AS pinned, r.schedule, r.fire_time::text AS fire_time, r.lane, r.lane_limit,
       r.status <> 'pending' AS begun, r.name, r.version, r.trace,
       r.headers::text AS headers
  FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (SELECT * FROM orchestrator.runs WHERE id = wanted.id AND code LIMIT 1) AS r
 CROSS JOIN LATERAL (
       SELECT name FROM orchestrator.tasks WHERE id = wanted.id
        UNION ALL
       SELECT name FROM orchestrator.ended_tasks WHERE id = wanted.id LIMIT 1) AS t
""")


def heads(connection: Connection, runs: Iterable[bytes]) -> dict[bytes, CodeRunRow]:
    """Return those of these runs that are runs of code."""
    return {head.id: head for head in _HEADS(connection, ids=runs)}


class Handover(NamedTuple):
    """A child that another run is to wait for."""

    run: bytes
    child_id: bytes
    """The id under which that run waits for it."""
    successor: bytes
    successor_child: bytes
    """The same, of the run that takes it over."""


class Child(NamedTuple):
    """A child that was found, and how it ended if it has."""

    id: bytes
    successor: bytes
    successor_child: bytes
    state: str
    task_state: str | None
    """How its turn task ended."""
    result: bytes | None
    error: TaskError | None


_HANDOVERS = Batch("w", Handover)
_ADOPT = Prepared[Child](f"""
WITH /* resets.hand_over_children */ wanted AS MATERIALIZED (
    SELECT * FROM {_HANDOVERS}
), found AS MATERIALIZED (
    SELECT w.successor, w.successor_child, c.id AS child, c.place, c.status, c.ended_at
      FROM (SELECT DISTINCT run FROM wanted) AS parent
     CROSS JOIN LATERAL (
           SELECT ctid AS place, id, coalesce(child_id, id) AS awaited, status, ended_at FROM orchestrator.runs
            WHERE parent_run = parent.run AND detached AND code
              AND (reason IS NULL OR reason NOT IN {GOES_ON}) OFFSET 0) AS c
      JOIN wanted w ON w.run = parent.run AND w.child_id = c.awaited
), adopted AS (
    UPDATE orchestrator.runs r SET parent_run = found.successor, child_id = found.successor_child
      FROM found WHERE r.ctid = found.place AND found.ended_at IS NULL
)
SELECT found.child AS id, found.successor, found.successor_child, found.status AS state, t.status AS task_state,
       t.result, t.error
  FROM found
  LEFT JOIN LATERAL (
       SELECT status, result, error FROM orchestrator.ended_tasks WHERE id = found.child LIMIT 1) AS t ON true
""")


def hand_over_children(connection: Connection, handovers: Sequence[Handover]) -> list[Child]:
    """Let runs wait for open children of others; return all children that there are, ended or not."""
    found = _ADOPT(connection, _HANDOVERS(handovers))
    return [child._replace(error=TaskError.stored(child.error)) for child in found]  # type: ignore[arg-type]
