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

# -- tables of versioned definitions: workflows and flows, which share one set of names

S = TypeVar("S")
_LOCK = Statement[None]("SELECT /* versions.lock */ pg_advisory_xact_lock(hashtext('orchestrator.' || %(name)s))")


class Versions(Generic[S]):
    """The versions in one table of definitions."""

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
        """Select `columns` of `d`; `usable` versions can start runs, `stored` versions exist.

        Names that begin with `hidden` are left out of lists.
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
        # A name that both kinds use already, because an older release allowed it, stays usable.
        self._taken = Statement[bool](f"""
SELECT /* {table}.taken */ EXISTS (SELECT FROM orchestrator.{other} WHERE name = %(name)s AND deleted_at IS NULL)
       AND NOT EXISTS (SELECT FROM orchestrator.{table} WHERE name = %(name)s AND deleted_at IS NULL) AS taken
""")

    def latest(self, connection: Connection, name: str) -> S | None:
        """Return the newest version that can start runs."""
        row = self._latest.first(connection, name=name)
        return self._read(row) if row else None

    def one(self, connection: Connection, name: str, version: int) -> S | None:
        """Return one version, deleted or not: runs of deleted versions continue."""
        row = self._one.first(connection, name=name, version=version)
        return self._read(row) if row else None

    def each_latest(self, connection: Connection, within: str = "") -> list[S]:
        """Return the newest version of each definition whose name begins with `within`."""
        return [self._read(row) for row in self._each_latest(connection, within=within)]

    def next_version(self, connection: Connection, name: str) -> int:
        """Return the next version number."""
        return 1 + self._newest.one(connection, name=name)

    def take_name(self, connection: Connection, name: str) -> None:
        """Lock a name until the transaction ends; raise an error if the other kind of definition uses it."""
        _LOCK(connection, name=name)
        if self._taken.one(connection, name=name):
            own, other = ("workflow", "flow") if self._table == "workflows" else ("flow", "workflow")
            raise InvalidWorkflow(
                f"There is a {other} {name!r}. Runs are found by name: give the {own} a different one."
            )


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
    """A version of a definition, without its body."""

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
    """Return the definition version of a run."""
    row = _OF_RUN.first(connection, run=run)
    return _stored(row).definition if row else None


@Statement.function("""
SELECT /* workflows.versions */ version, hash, created_at, deleted_at FROM orchestrator.workflows
 WHERE name = %(name)s AND (%(before)s::int IS NULL OR version < %(before)s::int)
 ORDER BY version DESC LIMIT %(limit)s
""")
def list_versions(connection: Connection, name: str, limit: int, before: int | None = None) -> list[Version]:
    """Return the versions of a workflow, newest first."""


class Triggered(NamedTuple):
    """The newest version of a workflow with triggers, without its definition, which may be large."""

    name: str
    version: int
    triggers: str
    """JSON."""


# Versions stored by the previous release have their triggers only in the definition.
@Statement.function("""
SELECT /* workflows.triggered */ name, version, triggers::text AS triggers FROM (
       SELECT DISTINCT ON (name) name, version, coalesce(triggers, definition->'on') AS triggers
         FROM orchestrator.workflows WHERE deleted_at IS NULL ORDER BY name, version DESC) AS newest
 WHERE jsonb_array_length(triggers) > 0
""")
def list_triggered(connection: Connection) -> list[Triggered]:
    """Return the workflows that are started by events or by the ends of other runs."""


@Statement.function(f"""
SELECT /* workflows.stamp */ count(*), max(created_at), count(deleted_at) FROM orchestrator.workflows
 WHERE NOT starts_with(name, '{PREFIX}')
""")
def stamp(connection: Connection) -> tuple[object, ...]:
    """Return a value that changes whenever a definition is added or deleted, except definitions of compositions."""


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

    The same body again changes nothing. Another body gets a new version; it is refused if it names an existing version,
    or if the condition on the newest version is not met.
    """
    if is_composed(definition.name):
        raise InvalidWorkflow(
            f"Workflow {definition.name!r:.200}: names that begin with {PREFIX} are reserved for compositions."
        )
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

    cycle = find_cycle(definition, read_latest)
    if cycle is not None:
        raise InvalidWorkflow(
            f"Every run of workflow {definition.name!r} would start another, forever: {' → '.join(cycle)}. Add a "
            f"when to one of the steps between them, or a filter to an `on`."
        )


def _store(connection: Connection, definition: Definition, condition: Condition) -> Application:
    _VERSIONED.take_name(connection, definition.name)
    digest = content_hash(definition)
    newest = latest(connection, definition.name)
    newest_version = (None, None) if newest is None else (newest.version, newest.hash)
    if refusal := condition.refusal(definition.name, *newest_version):
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
                f"Workflow {definition.name!r} version {version} exists with a different body. Versions never change: "
                f"give it a new version, or omit `version` to get one."
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
    """Store missing definitions of compositions; the name of each derives from its content."""
    for definition in sorted(definitions, key=lambda one: one.name):  # one order for all callers avoids deadlocks
        check_composed(definition)
        body = stored_json(definition)
        _COMPOSE(connection, name=definition.name, hash=content_hash(definition), definition=body)


_DELETE = Statement[None]("""
WITH /* workflows.delete */ unscheduled AS (DELETE FROM orchestrator.schedules WHERE workflow = %(name)s)
UPDATE orchestrator.workflows SET deleted_at = now() WHERE name = %(name)s AND deleted_at IS NULL
""")


def delete(connection: Connection, name: str) -> bool:
    """Delete a workflow and its schedules; its runs stay. Return False if the workflow does not exist."""
    return _DELETE.count(connection, name=name) > 0
