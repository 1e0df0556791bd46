"""Reseals stored values with the current data key, in small batches, while the system runs.

A row is changed only if it is unchanged since it was read and not locked, so nothing is overwritten and no lock is
awaited; the next pass finds skipped rows. Values sealed with the current key stay, so an interrupted rotation continues
when started again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.sealed import (
    renewed_error,
    renewed_event,
    renewed_inside,
    renewed_json,
    renewed_lines,
    renewed_value,
)
from orchestrator.domain.tasks.task import TaskError
from orchestrator.sealing import CALL, VALUE, Sealed, Vault, is_sealed_text
from orchestrator.store.sql import Statement

BATCH = 200
"""Rows of one transaction."""

Renew = Callable[[Vault, Any], Any]


class _Column:
    def __init__(self, name: str, renew: Renew, is_json: bool = False) -> None:
        self.name = name
        self.renew = renew
        self.is_json = is_json


class _Table:
    """A table with sealed columns, read in the order of its primary key."""

    def __init__(self, name: str, key: Mapping[str, str], *columns: _Column) -> None:
        self.name = name
        self.key = tuple(key)
        self.columns = columns
        names, after = ", ".join(key), ", ".join(f"%({part})s::{kind}" for part, kind in key.items())
        selected = ", ".join(f"{column.name}::text" if column.is_json else column.name for column in columns)
        read = f"{names}, {selected} FROM orchestrator.{name}"
        self.first = Statement[tuple[Any, ...]](
            f"SELECT /* rotation.first.{name} */ {read} ORDER BY {names} LIMIT {BATCH}"
        )
        self.next = Statement[tuple[Any, ...]](
            f"SELECT /* rotation.next.{name} */ {read} WHERE ({names}) > ({after}) ORDER BY {names} LIMIT {BATCH}"
        )
        self.save = {column.name: self._save(column, key) for column in columns}

    def where(self, key: Iterable[Any]) -> dict[str, Any]:
        return {
            part: value.hex if isinstance(value, UUID) else value for part, value in zip(self.key, key, strict=True)
        }

    def _save(self, column: _Column, key: Mapping[str, str]) -> Statement[None]:
        kind = "jsonb" if column.is_json else "bytea"
        is_row = " AND ".join(f"{part} = %({part})s::{cast}" for part, cast in key.items())
        return Statement[None](f"""
WITH /* rotation.save.{self.name}.{column.name} */ locked AS (
    SELECT {", ".join(key)} FROM orchestrator.{self.name}
     WHERE {is_row} AND {column.name} = %(old)s::{kind} FOR UPDATE SKIP LOCKED
)
UPDATE orchestrator.{self.name} t SET {column.name} = %(new)s::{kind} FROM locked
 WHERE {" AND ".join(f"t.{part} = locked.{part}" for part in key)}
""")


def _value(kind: bytes) -> Renew:
    return lambda vault, data: renewed_value(vault, kind, data)


def _error(vault: Vault, stored: Any) -> Any:
    error = TaskError.stored(stored)
    return stored if error is None else msgspec.json.decode(renewed_error(vault, error).to_json())


def _params(vault: Vault, stored: Any) -> Any:
    if isinstance(stored, str) and is_sealed_text(stored):
        return renewed_json(vault, stored)
    return msgspec.json.decode(vault.seal_json(msgspec.json.encode(stored).decode()))


_CALL, _VALUE = _value(CALL), _value(VALUE)
_ID = {"id": "uuid"}
TABLES = (
    _Table("tasks", _ID, _Column("payload", _CALL), _Column("details", _VALUE), _Column("completion", _VALUE)),
    _Table("ended_tasks", _ID, _Column("payload", _CALL), _Column("result", _VALUE), _Column("error", _error, True)),
    _Table("attempts", {"task_id": "uuid", "attempt": "int"}, _Column("error", _error, True)),
    _Table(
        "runs",
        _ID,
        _Column("params", _params, True),
        _Column("output", _VALUE),
        _Column("state", renewed_inside),
        _Column("stuck", renewed_json, True),
    ),
    _Table("histories", {"run_id": "uuid", "number": "int"}, _Column("data", renewed_event)),
    _Table(
        "resolutions",
        {"run_id": "uuid", "name": "text", "number": "int"},
        _Column("value", _VALUE),
        _Column("error", _error, True),
    ),
    _Table("untold", {"id": "bigint"}, _Column("body", renewed_inside)),
    _Table("task_logs", {"id": "bigint"}, _Column("lines", renewed_lines)),
)
_SIZES = " UNION ALL ".join(
    f"SELECT greatest(reltuples, 0)::bigint AS rows FROM pg_class WHERE oid = 'orchestrator.{table.name}'::regclass"
    for table in TABLES
)
_COMMIT_ASYNCHRONOUSLY = Statement[str](
    "SELECT /* rotation.unhurried */ set_config('synchronous_commit', 'off', false)"
)


class Step(NamedTuple):
    """The progress of a pass over a table."""

    table: str
    seen: int
    """Rows that this step read."""
    changed: int
    skipped: int
    """Rows that were changed or locked meanwhile, or that could not be opened."""
    problem: str = ""


@Statement.function(f"SELECT /* rotation.estimate */ sum(rows)::bigint AS rows FROM ({_SIZES}) AS t")
def estimate(connection: Connection) -> int:
    """Return an estimate of the number of rows to read."""


def rotate(connection: Connection, vault: Vault) -> Iterator[Step]:
    """Reseal everything that is sealed, or should be, in one pass; the connection must be in autocommit mode.

    Commits are asynchronous: after a crash of Postgres the last rows are resealed again.
    """
    _COMMIT_ASYNCHRONOUSLY(connection)
    for table in TABLES:
        last: tuple[Any, ...] | None = None
        while True:
            step, last = _batch(connection, vault, table, last)
            if step.seen:
                yield step
            if last is None:
                break


def _batch(
    connection: Connection, vault: Vault, table: _Table, after: tuple[Any, ...] | None
) -> tuple[Step, tuple[Any, ...] | None]:
    """Reseal the next rows; return the step, and the last primary key, or None at the end of the table."""
    width = len(table.key)
    if after is None:
        rows = table.first(connection)
    else:
        rows = table.next(connection, **table.where(after))
    changed = skipped = 0
    problem = ""
    for row in rows:
        values = row[width:]
        for column, old in zip(table.columns, values, strict=True):
            if old is None:
                continue
            try:
                new = _renewed(vault, column, old)
            except (Sealed, ValueError, msgspec.MsgspecError) as error:
                skipped, problem = skipped + 1, f"{table.name} {row[0]}: {error}"
                continue
            if new is not None:
                done = table.save[column.name].count(connection, **table.where(row[:width]), old=old, new=new)
                changed, skipped = changed + done, skipped + (1 - done)
    last = rows[-1][:width] if len(rows) == BATCH else None
    return Step(table.name, len(rows), changed, skipped, problem), last


def _renewed(vault: Vault, column: _Column, old: Any) -> Any:
    """Return the resealed value; None if it does not change."""
    if column.is_json:
        before = msgspec.json.decode(old)
        after = column.renew(vault, before)
        return None if after == before else msgspec.json.encode(after).decode()
    before = bytes(old)
    after = column.renew(vault, before)
    return None if after == before else after
