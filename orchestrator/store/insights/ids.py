"""Ids that are not written out, like git's: what one begins, and how much of each is enough.

Both go through the index of the primary key: a range for what begins alike, the two neighbours for what is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal, NamedTuple
from uuid import UUID

from sqlalchemy import Connection

Kind = Literal["task", "run"]
_TABLES = {"task": ("orchestrator.tasks", "orchestrator.ended_tasks"), "run": ("orchestrator.runs",)}
_TIME = 13
"""The characters of an id that are its time: none that is made later begins with them, unless it derives from it."""


class Found(NamedTuple):
    """A task or a run, as one tells it from others."""

    id: UUID
    name: str
    status: str
    created_at: datetime


def begin_with(connection: Connection, kind: Kind, digits: str, most: int) -> list[Found]:
    """Return the newest tasks or runs whose ids begin with these hexadecimal digits."""
    tables = " UNION ALL ".join(
        f"(SELECT id, name, status, created_at FROM {table}"
        f" WHERE id BETWEEN %(first)s::uuid AND %(last)s::uuid ORDER BY id DESC LIMIT %(most)s)"
        for table in _TABLES[kind]
    )
    parameters = {"first": digits.ljust(32, "0"), "last": digits.ljust(32, "f"), "most": most}
    rows = connection.exec_driver_sql(f"SELECT * FROM ({tables}) AS found ORDER BY id DESC LIMIT %(most)s", parameters)
    return [Found(*row) for row in rows]


def enough(connection: Connection, kind: Kind, ids: Sequence[UUID]) -> int:
    """Return how many characters tell each of these ids from every other one that there is."""
    neighbours = " UNION ALL ".join(
        f"(SELECT id FROM {table} WHERE id {beside} shown.id ORDER BY id {order} LIMIT 1)"
        for table in _TABLES[kind]
        for beside, order in (("<", "DESC"), (">", "ASC"))
    )
    statement = f"""
    SELECT shown.id::text, beside.id::text
      FROM unnest(%(ids)s::uuid[]) AS shown(id) CROSS JOIN LATERAL ({neighbours}) AS beside
    """
    rows = connection.exec_driver_sql(statement, {"ids": [identifier.hex for identifier in ids]})
    return max((_difference(shown, beside) for shown, beside in rows), default=0) or _TIME


def _difference(one: str, other: str) -> int:
    return max(_TIME, next(place for place, pair in enumerate(zip(one, other, strict=True), 1) if pair[0] != pair[1]))
