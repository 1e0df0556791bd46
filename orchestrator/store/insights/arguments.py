"""Search in the arguments of tasks and runs.

Arguments have no index. So lists are scanned as for other rare conditions, and rows whose arguments contain one of some
byte strings are candidates; the caller checks whether a candidate really has the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.sealing import CALL, reveal
from orchestrator.store.sql import Statement


class Needles(NamedTuple):
    """Byte strings to look for, in the stored encodings of arguments."""

    data: Sequence[str] = ()
    """Strings of hexadecimal digits, one of which must be in the MessagePack data; empty matches all arguments."""
    json: str = ""
    """The text to find in JSON."""

    @property
    def parameters(self) -> dict[str, object]:
        """The parameters of `in_data` and `IN_RUN`."""
        return {"needles": list(self.data) or None, "json": self.json}


NONE = Needles()


def in_data(column: str) -> str:
    """Return an SQL condition: a column of MessagePack may contain the value; sealed data may, too."""
    return f"""(%(needles)s::text[] IS NULL OR substring({column} FOR 1) IN ('\\xc7', '\\xc8', '\\xc9') OR EXISTS (
             SELECT FROM unnest(%(needles)s::text[]) AS digits
              WHERE position(decode(digits, 'hex') IN {column}) > 0))"""


IN_RUN = f"""(%(needles)s::text[] IS NULL OR strpos(params::text, %(json)s::text) > 0
        OR jsonb_typeof(params) = 'string' OR (code AND (
           SELECT {in_data("h.data")}
             FROM orchestrator.histories h WHERE h.run_id = runs.id AND h.number = 1 LIMIT 1)))"""
"""SQL condition: the arguments of a run may contain the value. A scalar subquery, because with EXISTS the planner would
hash the first events of all runs."""


class TaskArguments(NamedTuple):
    """The arguments of a task."""

    id: UUID
    payload: bytes | None
    """The encoded arguments; None if they are large."""
    is_plain: bool
    """Whether no argument is declared as secret: the task has no `redact` patterns and no relatives."""
    is_plain_in_run: bool
    """Whether no argument is declared as secret, provided that this holds for the run's other tasks."""


_PLAIN = "parent_id IS NULL AND NOT coalesce(options ?| '{redact,inherited}', false)"
_PARTS = f"""id, CASE WHEN octet_length(payload) <= %(most)s THEN payload END AS payload,
       run_id IS NULL AND {_PLAIN} AS is_plain, run_id IS NOT NULL AND {_PLAIN} AS is_plain_in_run"""
_CALLS = Statement[TaskArguments](f"""
SELECT /* insights.arguments.of_tasks */ {_PARTS} FROM orchestrator.tasks WHERE id = ANY(%(ids)s::uuid[])
 UNION ALL
SELECT {_PARTS} FROM orchestrator.ended_tasks WHERE id = ANY(%(ids)s::uuid[])
""")


def calls_of_tasks(connection: Connection, tasks: Sequence[UUID], most: int = 100_000) -> dict[UUID, TaskArguments]:
    """Return the arguments of these tasks, where they have at most `most` bytes."""
    rows = _CALLS(connection, ids=[task.bytes for task in tasks], most=most) if tasks else ()
    return {row.id: row._replace(payload=row.payload and reveal(bytes(row.payload), CALL)) for row in rows}
