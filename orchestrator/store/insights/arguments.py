"""Find tasks and runs by the value of an argument: no index has them, so the newest are walked for a bounded time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy import Connection

from orchestrator.store.sql import Row, Statement

SECONDS = 1.5
"""For which tasks are walked, and runs likewise."""
_CHUNK = 2_000
"""Rows that one statement looks at."""
_LAST = UUID(int=2**128 - 1)


class Walked(NamedTuple):
    """Candidates: their arguments have these bytes in them, and whether that is the value is for the caller to see."""

    ids: list[UUID]
    looked_at: int
    is_part: bool
    """There are older ones that were not looked at."""


def _walk(name: str, tables: str, matches: str) -> Statement[Row]:
    return Statement[Row](f"""
WITH /* insights.arguments.{name} */ walked AS MATERIALIZED ({tables} ORDER BY id DESC LIMIT %(most)s)
SELECT count(*) AS rows, (SELECT id FROM walked ORDER BY id LIMIT 1) AS last,
       ARRAY(SELECT id FROM walked WHERE starts_with(owner, %(within)s::text) AND ({matches}) ORDER BY id DESC) AS ids
  FROM walked
""")


_ONE = """(SELECT id, queue AS owner, payload FROM orchestrator.{} WHERE id < %(before)s::uuid
            ORDER BY id DESC LIMIT %(most)s)"""
_TASKS = _walk(
    "tasks",
    f"SELECT * FROM ({_ONE.format('tasks')} UNION ALL {_ONE.format('ended_tasks')}) AS either",
    "position(decode(%(text)s::text, 'hex') IN payload) > 0"
    " OR position(decode(%(number)s::text, 'hex') IN payload) > 0",
)
_RUNS = _walk(
    "runs",
    "SELECT id, coalesce(workflow, '') AS owner, params FROM orchestrator.runs WHERE id < %(before)s::uuid",
    "strpos(params::text, %(text)s::text) > 0",
)


def tasks_by_argument(connection: Connection, text: str, most: int, within: str = "") -> Walked:
    """Return the newest tasks whose encoded arguments have a text in them, or a whole number."""
    encoded = text.encode().hex()
    try:
        number = msgspec.msgpack.encode(int(text)).hex()
    except (ValueError, OverflowError):
        number = encoded
    # A small number is one byte, which stands in most payloads.
    return _walked(connection, _TASKS, most, within, text=encoded, number=number if len(number) > 2 else encoded)


def runs_by_argument(connection: Connection, text: str, most: int, within: str = "") -> Walked:
    """Return the newest runs of definitions whose parameters have a text in them."""
    escaped = msgspec.json.encode(text).decode()[1:-1]
    return _walked(connection, _RUNS, most, within, text=escaped)


def _walked(connection: Connection, statement: Statement[Row], most: int, within: str, **sought: str) -> Walked:
    until, before = time.monotonic() + SECONDS, _LAST
    ids: list[UUID] = []
    looked_at = 0
    while True:
        row = statement.one(connection, before=before.hex, most=_CHUNK, within=within, **sought)
        ids, looked_at = ids + row.ids, looked_at + row.rows
        if row.rows < _CHUNK:
            return Walked(ids[:most], looked_at, len(ids) > most)
        if len(ids) >= most or time.monotonic() > until:
            return Walked(ids[:most], looked_at, is_part=True)
        before = row.last


def leaves(value: object) -> Iterator[object]:
    """Yield the values in plain data, not the names of fields."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from leaves(one)
    else:
        yield value
