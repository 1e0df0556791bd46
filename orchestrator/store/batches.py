"""Batches of rows as statement parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from typing import Annotated, Any, get_args, get_type_hints

Blob = Annotated[bytes, "bytea"]
Json = Annotated[str, "jsonb"]
Seconds = Annotated[float, "float"]
"""A duration, sent with microseconds; a `float` is sent with all its digits."""
_TYPES = {bytes: "uuid", str: "text", bool: "boolean", int: "int", float: "double precision", datetime: "timestamptz"}


class Rows(dict[str, Any]):
    """The columns of a batch. All columns have as many rows as the first one."""

    @property
    def first(self) -> str:
        """The name of the first column."""
        return next(iter(self))

    @property
    def is_one(self) -> bool:
        return len(self[self.first]) == 1


class Batch:
    """Rows as a table in a statement: `(SELECT unnest(…), …) AS alias(column, …)`.

    Several arrays in one `unnest` after FROM would be slower: Postgres writes each column to a tuplestore and reads it.
    """

    def __init__(self, alias: str, columns: str | type[tuple[Any, ...]], *, but: str = "") -> None:
        """`columns` is a named tuple without the field `but`, or SQL such as `id uuid, attempt int`."""
        types = _types_of(columns, but) if isinstance(columns, type) else _types_in_sql(columns)
        self._stored = {column: f"{alias}.{column}" for column in types}
        self._names = [f"{alias}_{column}" for column in types]
        arrays = [f"unnest(%({alias}_{column})s::{kind}[])" for column, kind in types.items()]
        self._table = f"(SELECT {', '.join(arrays)}) AS {alias}({', '.join(types)})"

    def __str__(self) -> str:
        return self._table

    def into(self, table: str, source: str = "", *, but: Collection[str] = (), **expressions: str) -> str:
        """Return an INSERT of the rows; `expressions` replace or add columns, and columns in `but` are left out.

        `source` is what the rows are selected from, if not the batch alone; it contains the batch.
        """
        stored = {column: value for column, value in (self._stored | expressions).items() if column not in but}
        values = ", ".join(stored.values())
        return f"INTO orchestrator.{table} ({', '.join(stored)}) SELECT {values} FROM {source or self._table}"

    def __call__(self, rows: Iterable[Sequence[Any]]) -> Rows:
        """Return the columns of rows. An all-null column is sent empty, and `unnest` pads it."""
        columns = list(zip(*rows, strict=True)) or [()] * len(self._names)
        sent = [() if not any(column) and column.count(None) == len(column) else column for column in columns[1:]]
        return Rows(zip(self._names, [columns[0], *sent], strict=True))


def _types_in_sql(columns: str) -> dict[str, str]:
    parts = (column.partition(" ") for column in columns.split(", "))
    return {name: kind for name, _, kind in parts}


def _types_of(row: type, but: str) -> dict[str, str]:
    return {name: _type_of(hint) for name, hint in get_type_hints(row, include_extras=True).items() if name != but}


def _type_of(hint: Any) -> str:
    hint = next((part for part in get_args(hint) if type(None) in get_args(hint)), hint)
    metadata = getattr(hint, "__metadata__", None)
    return str(metadata[0]) if metadata else _TYPES[hint]
