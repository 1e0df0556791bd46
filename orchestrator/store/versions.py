"""Definitions that are immutable under (name, version): workflows and flows. A name belongs to one of the two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from sqlalchemy import Connection

from orchestrator.errors import InvalidWorkflow
from orchestrator.store.sql import Row, Statement

S = TypeVar("S")
_LOCK = Statement[None]("SELECT /* versions.lock */ pg_advisory_xact_lock(hashtext('orchestrator.' || %(name)s))")


class Versions(Generic[S]):
    """Rows of one table of definitions."""

    def __init__(
        self,
        table: str,
        columns: str,
        read: Callable[[Row], S],
        *,
        usable: str,
        stored: str = "true",
        hidden: str | None = None,
    ) -> None:
        """Rows are read with these columns of `d`; `usable` are those that start runs, `stored` those that exist.

        Names that begin with `hidden` are in no list.
        """
        self._read = read
        self._table = table
        listed = "true" if hidden is None else f"NOT starts_with(name, '{hidden}')"
        other = {"workflows": "flows", "flows": "workflows"}[table]
        self._latest = Statement[Row](f"""
SELECT /* {table}.latest */ {columns} FROM orchestrator.{table} d
 WHERE name = %(name)s AND {usable} ORDER BY version DESC LIMIT 1
""")
        self._one = Statement[Row](f"""
SELECT /* {table}.one */ {columns} FROM orchestrator.{table} d
 WHERE name = %(name)s AND version = %(version)s AND {stored}
""")
        self._each_latest = Statement[Row](f"""
SELECT /* {table}.each_latest */ DISTINCT ON (name) {columns} FROM orchestrator.{table} d
 WHERE {usable} AND {listed} AND starts_with(name, %(within)s::text) ORDER BY name, version DESC
""")
        self._newest = Statement[int](f"""
SELECT /* {table}.newest */ coalesce(max(version), 0) FROM orchestrator.{table} WHERE name = %(name)s
""")
        # What has the name of another kind already, because a release before this one has let it, keeps it.
        self._taken = Statement[bool](f"""
SELECT /* {table}.taken */ EXISTS (SELECT FROM orchestrator.{other} WHERE name = %(name)s AND deleted_at IS NULL)
       AND NOT EXISTS (SELECT FROM orchestrator.{table} WHERE name = %(name)s AND deleted_at IS NULL) AS taken
""")

    def latest(self, connection: Connection, name: str) -> S | None:
        """Return the newest version that runs can be started of."""
        row = self._latest.first(connection, name=name)
        return self._read(row) if row else None

    def one(self, connection: Connection, name: str, version: int) -> S | None:
        """Return one version, deleted or not: its runs go on."""
        row = self._one.first(connection, name=name, version=version)
        return self._read(row) if row else None

    def each_latest(self, connection: Connection, within: str = "") -> list[S]:
        """Return the newest version of each definition whose name begins with `within`."""
        return [self._read(row) for row in self._each_latest(connection, within=within)]

    def next_version(self, connection: Connection, name: str) -> int:
        """Return the number of the next version."""
        return 1 + self._newest.one(connection, name=name)

    def take_name(self, connection: Connection, name: str) -> None:
        """Lock a name until the end of the transaction; refuse that of another kind."""
        _LOCK(connection, name=name)
        if self._taken.one(connection, name=name):
            own, other = ("workflow", "flow") if self._table == "workflows" else ("flow", "workflow")
            raise InvalidWorkflow(f"There is a {other} {name!r}. Runs are found by name: give the {own} another one.")
