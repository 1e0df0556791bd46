"""Resets of runs of workflows as code, for the leader; and the children that move to another parent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import Connection

from orchestrator.domain.runs import CONTINUATION_REASONS, TIMED_OUT
from orchestrator.domain.tasks.task import TaskError
from orchestrator.store.batches import Batch
from orchestrator.store.code.runs import INHERITED, CodeRun
from orchestrator.store.sql import Prepared


@dataclass(frozen=True, kw_only=True)
class ResetRun(CodeRun):
    """A run to reset. `timeout` has the seconds that the run was given in total; None if it timed out."""

    open: bool
    events: int
    """The number of events."""
    begun: bool


_HEADS = Prepared[ResetRun](f"""
SELECT /* resets.heads */ {INHERITED}, r.ended_at IS NULL AS open, r.last_event AS events,
       CASE WHEN r.reason = '{TIMED_OUT}' THEN NULL
            ELSE extract(epoch FROM r.deadline - r.created_at)::double precision END AS timeout,
       r.status <> 'pending' AS begun
  FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (SELECT * FROM orchestrator.runs WHERE id = wanted.id AND code LIMIT 1) AS r
 CROSS JOIN LATERAL (
       SELECT name FROM orchestrator.tasks WHERE id = wanted.id
        UNION ALL
       SELECT name FROM orchestrator.ended_tasks WHERE id = wanted.id LIMIT 1) AS t
""")


def heads(connection: Connection, runs: Iterable[bytes]) -> dict[bytes, ResetRun]:
    """Return the runs of code among these."""
    return {head.id: head for head in _HEADS(connection, ids=runs)}


class Handover(NamedTuple):
    """A child for which another run will wait."""

    run: bytes
    child_id: bytes
    """The id under which the current parent waits for the child."""
    successor: bytes
    successor_child: bytes
    """The id under which the new parent waits for the child."""


class Child(NamedTuple):
    """A child that was found, with its end if it has ended."""

    id: bytes
    successor: bytes
    successor_child: bytes
    state: str
    task_state: str | None
    """How the child's turn task ended."""
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
              AND (reason IS NULL OR reason NOT IN {CONTINUATION_REASONS}) OFFSET 0) AS c
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
    """Move open children to new parents; return all children that were found, ended or not."""
    children = _ADOPT(connection, _HANDOVERS(handovers))
    return [child._replace(error=TaskError.stored(child.error)) for child in children]  # type: ignore[arg-type]
