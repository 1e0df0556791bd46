"""Helpers for columns, tables and indexes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import DDL, Boolean, Column, DateTime, Index, Integer, MetaData, Table, event, text

from orchestrator.settings import DEFAULT_NAMESPACE

SCHEMA = DEFAULT_NAMESPACE
metadata = MetaData(schema=SCHEMA)

NOW = text("now()")
Time = DateTime(timezone=True)

KEPT = {"kept": True}
"""Marks a column of `tasks` that `ended_tasks` also has, with the same value."""


def table(name: str, *parts: Any, comment: str | None = None, storage: dict[str, float] | None = None) -> Table:
    """Return a table of the schema. SQLAlchemy 2.0 lacks storage parameters, so DDL sets them."""
    new_table = Table(name, metadata, *parts, comment=comment)
    if storage:
        settings = ", ".join(f"{key} = {value}" for key, value in storage.items())
        event.listen(new_table, "after_create", DDL(f"ALTER TABLE {SCHEMA}.{name} SET ({settings})"))  # type: ignore[no-untyped-call]
    return new_table


def count(
    name: str, comment: str | None = None, kind: type[Integer] = Integer, info: dict[str, bool] | None = None
) -> Column[int]:
    """Return a number column that begins with 0."""
    return Column(name, kind, nullable=False, server_default=text("0"), comment=comment, info=info)


def flag(name: str, comment: str | None = None) -> Column[bool]:
    """Return a boolean column that begins with false."""
    return Column(name, Boolean, nullable=False, server_default=text("false"), comment=comment)


def index(name: str, *columns: Any, where: str | None = None, **options: Any) -> Index:
    """Return an index of the rows that fulfil a condition."""
    return Index(name, *columns, postgresql_where=None if where is None else text(where), **options)


def one_of(states: Iterable[object]) -> str:
    """Return an SQL condition: the status is one of these."""
    return "status IN ({})".format(", ".join(f"'{state}'" for state in states))
