"""Columns, tables and indexes of recurring shapes."""

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
"""Marks a column of `tasks` that an ended task keeps as it is: `ended_tasks` has it, too."""


def table(name: str, *parts: Any, comment: str | None = None, storage: dict[str, float] | None = None) -> Table:
    """Return a table of the schema, with storage parameters, which SQLAlchemy 2.0 does not know."""
    made = Table(name, metadata, *parts, comment=comment)
    if storage:
        settings = ", ".join(f"{key} = {value}" for key, value in storage.items())
        event.listen(made, "after_create", DDL(f"ALTER TABLE {SCHEMA}.{name} SET ({settings})"))  # type: ignore[no-untyped-call]
    return made


def count(
    name: str, comment: str | None = None, kind: type[Integer] = Integer, info: dict[str, bool] | None = None
) -> Column[int]:
    """Return a number that begins with 0."""
    return Column(name, kind, nullable=False, server_default=text("0"), comment=comment, info=info)


def flag(name: str, comment: str | None = None) -> Column[bool]:
    """Return what is false at first."""
    return Column(name, Boolean, nullable=False, server_default=text("false"), comment=comment)


def index(name: str, *columns: Any, where: str | None = None, **options: Any) -> Index:
    """Return an index of the rows for which a condition holds."""
    return Index(name, *columns, postgresql_where=None if where is None else text(where), **options)


def one_of(states: Iterable[object]) -> str:
    """Return a condition: the status is one of these."""
    return "status IN ({})".format(", ".join(f"'{state}'" for state in states))
