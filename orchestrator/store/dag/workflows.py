"""Workflow definitions: immutable under (name, version)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, NamedTuple, TypeVar

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.dag.composed import PREFIX, check_composed, is_composed
from orchestrator.domain.dag.definition import ALWAYS, Condition, Definition, content_hash
from orchestrator.domain.dag.graph import find_cycle
from orchestrator.domain.plain import stored_json
from orchestrator.errors import InvalidWorkflow, WrongState
from orchestrator.store.schedules import definitions as schedules
from orchestrator.store.sql import Row, Statement

# -- definitions that are immutable under (name, version): workflows and flows. A name belongs to one of the two

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


# -- workflows


class Stored(NamedTuple):
    """One version of a definition."""

    name: str
    version: int
    hash: str
    definition: Definition
    created_at: datetime


@dataclass(frozen=True, kw_only=True)
class Version:
    """That there is a version of a definition, without its body."""

    version: int
    hash: str
    created_at: datetime
    deleted_at: datetime | None


def _stored(row: Row) -> Stored:
    try:
        definition = msgspec.json.decode(row.definition, type=Definition)
    except msgspec.DecodeError as error:
        raise msgspec.ValidationError(f"workflow {row.name!r}, version {row.version}: {error}") from error
    return Stored(row.name, row.version, row.hash, definition, row.created_at)


_COLUMNS = "d.name, d.version, d.hash, d.definition::text AS definition, d.created_at"
_VERSIONED = Versions("workflows", _COLUMNS, _stored, usable="deleted_at IS NULL", hidden=PREFIX)
latest, read, list_latest = _VERSIONED.latest, _VERSIONED.one, _VERSIONED.each_latest

_OF_RUN = Statement[Row](f"""
SELECT /* workflows.of_run */ {_COLUMNS}
  FROM orchestrator.runs r JOIN orchestrator.workflows d ON d.name = r.workflow AND d.version = r.version
 WHERE r.id = %(run)s::uuid AND NOT r.code AND NOT r.flow
""")


def of_run(connection: Connection, run: bytes) -> Definition | None:
    """Return the definition that a run is pinned to."""
    row = _OF_RUN.first(connection, run=run)
    return _stored(row).definition if row else None


@Statement.function("""
SELECT /* workflows.versions */ version, hash, created_at, deleted_at FROM orchestrator.workflows
 WHERE name = %(name)s AND (%(before)s::int IS NULL OR version < %(before)s::int)
 ORDER BY version DESC LIMIT %(limit)s
""")
def list_versions(connection: Connection, name: str, limit: int, before: int | None = None) -> list[Version]:
    """Return the versions that a workflow has had, newest first."""


class Triggered(NamedTuple):
    """The newest version of a workflow that something starts, without its definition, which may be large."""

    name: str
    version: int
    triggers: str
    """As JSON."""


# What the release before this one stores has no triggers beside it.
@Statement.function("""
SELECT /* workflows.triggered */ name, version, triggers::text AS triggers FROM (
       SELECT DISTINCT ON (name) name, version, coalesce(triggers, definition->'on') AS triggers
         FROM orchestrator.workflows WHERE deleted_at IS NULL ORDER BY name, version DESC) AS newest
 WHERE jsonb_array_length(triggers) > 0
""")
def list_triggered(connection: Connection) -> list[Triggered]:
    """Return the workflows that events and ends of other runs start."""


@Statement.function(f"""
SELECT /* workflows.stamp */ count(*), max(created_at), count(deleted_at) FROM orchestrator.workflows
 WHERE NOT starts_with(name, '{PREFIX}')
""")
def stamp(connection: Connection) -> tuple[object, ...]:
    """Return something that changes whenever a definition is added or deleted that is no shape of a composition."""


_RESTORE = Statement[None]("""
UPDATE /* workflows.restore */ orchestrator.workflows SET deleted_at = NULL
 WHERE name = %(name)s AND version = %(version)s
""")
_ADD = Statement[None]("""
INSERT /* workflows.add */ INTO orchestrator.workflows (name, version, hash, definition, triggers)
VALUES (%(name)s, %(version)s, %(hash)s, %(definition)s::jsonb, %(triggers)s::jsonb)
""")


class Application(NamedTuple):
    """The result of applying a definition."""

    version: int
    created: bool


def apply(connection: Connection, definition: Definition, condition: Condition = ALWAYS) -> Application:
    """Store a definition and set its schedule, in the caller's transaction.

    The same body again is a no-op. Another body gets a new version, or is refused where it names an old one, or
    where the condition does not hold of the newest.
    """
    if is_composed(definition.name):
        raise InvalidWorkflow(f"Workflow {definition.name!r:.200}: names that begin with {PREFIX} are of compositions.")
    _refuse_cycle(connection, definition)
    application = _store(connection, definition, condition)
    newest = latest(connection, definition.name)
    if newest is not None and newest.version == application.version:
        schedules.declare(connection, definition)
    return application


def _refuse_cycle(connection: Connection, definition: Definition) -> None:
    def read_latest(name: str) -> Definition | None:
        stored = latest(connection, name)
        return stored.definition if stored is not None else None

    way = find_cycle(definition, read_latest)
    if way is not None:
        raise InvalidWorkflow(
            f"Every run of workflow {definition.name!r} would start another, without end: {' → '.join(way)}. Add a "
            f"when to one of the steps between them, or a filter to an `on`."
        )


def _store(connection: Connection, definition: Definition, condition: Condition) -> Application:
    _VERSIONED.take_name(connection, definition.name)
    digest = content_hash(definition)
    newest = latest(connection, definition.name)
    now = (None, None) if newest is None else (newest.version, newest.hash)
    if refusal := condition.refusal(definition.name, *now):
        raise WrongState(refusal)
    if definition.version is None and newest is not None and newest.hash == digest:
        return Application(newest.version, created=False)
    version = definition.version
    if version is None:
        version = _VERSIONED.next_version(connection, definition.name)
    existing = read(connection, definition.name, version)
    if existing is not None:
        if existing.hash != digest:
            raise InvalidWorkflow(
                f"Workflow {definition.name!r} version {version} exists with another body. Versions never change: "
                f"give it a new version, or leave `version` out to get one."
            )
        _RESTORE(connection, name=definition.name, version=version)
        return Application(version, created=False)
    body = stored_json(msgspec.structs.replace(definition, version=version))
    triggers = stored_json(definition.on)
    _ADD(connection, name=definition.name, version=version, hash=digest, definition=body, triggers=triggers)
    return Application(version, created=True)


_COMPOSE = Statement[None]("""
INSERT /* workflows.compose */ INTO orchestrator.workflows (name, version, hash, definition, triggers)
VALUES (%(name)s, 1, %(hash)s, %(definition)s::jsonb, '[]')
    ON CONFLICT (name, version) DO UPDATE SET deleted_at = NULL WHERE workflows.deleted_at IS NOT NULL
""")


def compose(connection: Connection, definitions: Iterable[Definition]) -> None:
    """Store definitions of compositions that are not there yet; each has a name of its own for each content."""
    for definition in sorted(definitions, key=lambda one: one.name):  # in one order, so that there is no deadlock
        check_composed(definition)
        body = stored_json(definition)
        _COMPOSE(connection, name=definition.name, hash=content_hash(definition), definition=body)


_DELETE = Statement[None]("""
WITH /* workflows.delete */ unscheduled AS (DELETE FROM orchestrator.schedules WHERE workflow = %(name)s)
UPDATE orchestrator.workflows SET deleted_at = now() WHERE name = %(name)s AND deleted_at IS NULL
""")


def delete(connection: Connection, name: str) -> bool:
    """Delete a workflow and its schedules: it can no longer be started; its runs and their history stay.

    False if there is none.
    """
    return _DELETE.count(connection, name=name) > 0
