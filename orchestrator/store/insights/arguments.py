"""What tasks and runs were given, by which people look for them.

No index has it. So lists are walked, as they are for other things that are rare, and of the rows on the way those are
read that have one of some byte strings in their arguments; whether that is the value, the caller sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.sealing import CALL, reveal
from orchestrator.store.sql import Statement


class Needles(NamedTuple):
    """What is in the arguments of candidates, in the encodings in which they are stored."""

    data: Sequence[str] = ()
    """Any of these is in MessagePack, in hexadecimal digits; nothing: arguments do not matter."""
    json: str = ""
    """This is in JSON."""

    @property
    def parameters(self) -> dict[str, object]:
        """The parameters of `in_data` and `in_json`."""
        return {"needles": list(self.data) or None, "json": self.json}


NONE = Needles()


def in_data(column: str) -> str:
    """Return the condition that a column of MessagePack may hold what is looked for: what is sealed may, too."""
    return f"""(%(needles)s::text[] IS NULL OR substring({column} FOR 1) IN ('\\xc7', '\\xc8', '\\xc9') OR EXISTS (
             SELECT FROM unnest(%(needles)s::text[]) AS digits
              WHERE position(decode(digits, 'hex') IN {column}) > 0))"""


IN_RUN = f"""(%(needles)s::text[] IS NULL OR strpos(params::text, %(json)s::text) > 0
        OR jsonb_typeof(params) = 'string' OR (code AND (
           SELECT {in_data("h.data")}
             FROM orchestrator.histories h WHERE h.run_id = runs.id AND h.number = 1 LIMIT 1)))"""
"""The condition that what a run was started with may hold what is looked for. With EXISTS, the planner would hash the
first events of all runs."""


class Given(NamedTuple):
    """What a task was given."""

    id: UUID
    payload: bytes | None
    """Encoded; None if it is large."""
    is_plain: bool
    """Nothing that it was given is declared as secret: it names nothing, and has no relatives."""
    is_plain_in_run: bool
    """The same if nothing is that the tasks of its run were given."""


_PLAIN = "parent_id IS NULL AND NOT coalesce(options ?| '{redact,inherited}', false)"
_PARTS = f"""id, CASE WHEN octet_length(payload) <= %(most)s THEN payload END AS payload,
       run_id IS NULL AND {_PLAIN} AS is_plain, run_id IS NOT NULL AND {_PLAIN} AS is_plain_in_run"""
_CALLS = Statement[Given](f"""
SELECT /* insights.arguments.of_tasks */ {_PARTS} FROM orchestrator.tasks WHERE id = ANY(%(ids)s::uuid[])
 UNION ALL
SELECT {_PARTS} FROM orchestrator.ended_tasks WHERE id = ANY(%(ids)s::uuid[])
""")


def calls_of_tasks(connection: Connection, tasks: Sequence[UUID], most: int = 100_000) -> dict[UUID, Given]:
    """Return what these tasks were given, where it has at most so many bytes."""
    rows = _CALLS(connection, ids=[task.bytes for task in tasks], most=most) if tasks else ()
    return {row.id: row._replace(payload=row.payload and reveal(bytes(row.payload), CALL)) for row in rows}
