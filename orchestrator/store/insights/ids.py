"""Ids that are not written out, like git's: what one begins, and how much of each is enough.

Both go through the index of the primary key: a range for what begins alike, the two neighbours for what is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, get_args
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.store.sql import Statement

Kind = Literal["task", "run"]
_TABLES = {"task": ("orchestrator.tasks", "orchestrator.ended_tasks"), "run": ("orchestrator.runs",)}
_OWNERS = {"task": "queue", "run": "workflow"}
_TIME = 13
"""The characters of an id that are its time: none that is made later begins with them, unless it derives from it."""


@dataclass(frozen=True, kw_only=True)
class IdMatch:
    """A task or a run, as one tells it from others."""

    id: UUID
    name: str
    status: str
    created_at: datetime


def _begin_with(kind: Kind) -> Statement[IdMatch]:
    tables = " UNION ALL ".join(
        f"(SELECT id, name, status, created_at FROM {table}"
        f" WHERE id BETWEEN %(first)s::uuid AND %(last)s::uuid"
        f" AND (%(within)s::text = '' OR starts_with({_OWNERS[kind]}, %(within)s::text))"
        f" ORDER BY id DESC LIMIT %(most)s)"
        for table in _TABLES[kind]
    )
    return Statement[IdMatch](
        f"SELECT /* insights.ids.{kind} */ * FROM ({tables}) AS found ORDER BY id DESC LIMIT %(most)s"
    )


def _enough(kind: Kind) -> Statement[tuple[str, str]]:
    neighbours = " UNION ALL ".join(
        f"(SELECT id FROM {table} WHERE id {beside} shown.id ORDER BY id {order} LIMIT 1)"
        for table in _TABLES[kind]
        for beside, order in (("<", "DESC"), (">", "ASC"))
    )
    return Statement[tuple[str, str]](f"""
SELECT /* insights.ids.beside_{kind} */ shown.id::text, beside.id::text
  FROM unnest(%(ids)s::uuid[]) AS shown(id) CROSS JOIN LATERAL ({neighbours}) AS beside
""")


_BEGIN_WITH = {kind: _begin_with(kind) for kind in get_args(Kind)}
_ENOUGH = {kind: _enough(kind) for kind in get_args(Kind)}


def begin_with(connection: Connection, kind: Kind, digits: str, most: int, within: str = "") -> list[IdMatch]:
    """Return the newest tasks or runs whose ids begin with these hexadecimal digits.

    The name of the queue or workflow that they belong to begins with `within`.
    """
    first, last = digits.ljust(32, "0"), digits.ljust(32, "f")
    return _BEGIN_WITH[kind](connection, first=first, last=last, most=most, within=within)


def enough(connection: Connection, kind: Kind, shown: Sequence[UUID]) -> int:
    """Return how many characters tell each of these ids from every other one that there is."""
    rows = _ENOUGH[kind](connection, ids=[identifier.bytes for identifier in shown])
    return max((_difference(one, beside) for one, beside in rows), default=0) or _TIME


def _difference(one: str, other: str) -> int:
    return max(_TIME, next(place for place, pair in enumerate(zip(one, other, strict=True), 1) if pair[0] != pair[1]))
