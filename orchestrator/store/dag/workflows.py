"""Workflow definitions: immutable under (name, version)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.dag.circles import circle
from orchestrator.domain.dag.definition import Definition, content_hash
from orchestrator.domain.plain import stored_json
from orchestrator.errors import InvalidWorkflow
from orchestrator.store.schedules import definitions as schedules


class Stored(NamedTuple):
    """One version of a definition."""

    name: str
    version: int
    hash: str
    definition: Definition
    created_at: datetime


def _stored(row: Sequence[object]) -> Stored:
    name, version, digest, text, created_at = row
    try:
        definition = msgspec.json.decode(str(text), type=Definition)
    except msgspec.DecodeError as error:
        raise msgspec.ValidationError(f"workflow {name!r}, version {version}: {error}") from error
    return Stored(str(name), int(str(version)), str(digest), definition, created_at)  # type: ignore[arg-type]


_COLUMNS = "name, version, hash, definition::text, created_at"
_LATEST = f"""
SELECT {_COLUMNS} FROM orchestrator.workflows
 WHERE name = %(name)s AND deleted_at IS NULL ORDER BY version DESC LIMIT 1
"""


def latest(connection: Connection, name: str) -> Stored | None:
    """Return the newest version of a workflow, unless it was deleted."""
    row = connection.exec_driver_sql(_LATEST, {"name": name}).one_or_none()
    return _stored(row) if row else None


_ONE = f"SELECT {_COLUMNS} FROM orchestrator.workflows WHERE name = %(name)s AND version = %(version)s"


def read(connection: Connection, name: str, version: int) -> Stored | None:
    """Return one version of a workflow, deleted or not: its runs go on."""
    row = connection.exec_driver_sql(_ONE, {"name": name, "version": version}).one_or_none()
    return _stored(row) if row else None


_OF_RUN = f"""
SELECT {", ".join(f"w.{column.strip()}" for column in _COLUMNS.split(","))}
  FROM orchestrator.runs r JOIN orchestrator.workflows w ON w.name = r.workflow AND w.version = r.version
 WHERE r.id = %(run)s::uuid AND NOT r.code
"""


def of_run(connection: Connection, run: bytes) -> Definition | None:
    """Return the definition that a run is pinned to."""
    row = connection.exec_driver_sql(_OF_RUN, {"run": run.hex()}).one_or_none()
    return _stored(row).definition if row else None


_LIST = f"""
SELECT DISTINCT ON (name) {_COLUMNS} FROM orchestrator.workflows
 WHERE deleted_at IS NULL ORDER BY name, version DESC
"""


def list_latest(connection: Connection) -> list[Stored]:
    """Return the newest version of each workflow."""
    return [_stored(row) for row in connection.exec_driver_sql(_LIST)]


class Triggered(NamedTuple):
    """The newest version of a workflow that something starts, without its definition, which may be large."""

    name: str
    version: int
    triggers: str
    """As JSON."""


# What the release before this one stores has no triggers beside it.
_TRIGGERED = """
SELECT name, version, triggers::text FROM (
       SELECT DISTINCT ON (name) name, version, coalesce(triggers, definition->'on') AS triggers
         FROM orchestrator.workflows WHERE deleted_at IS NULL ORDER BY name, version DESC) AS newest
 WHERE jsonb_array_length(triggers) > 0
"""


def list_triggered(connection: Connection) -> list[Triggered]:
    """Return the workflows that events and ends of other runs start."""
    return [Triggered(*row) for row in connection.exec_driver_sql(_TRIGGERED)]


_STAMP = "SELECT count(*), max(created_at), count(deleted_at) FROM orchestrator.workflows"


def stamp(connection: Connection) -> tuple[object, ...]:
    """Return something that changes whenever a definition is added or deleted."""
    return tuple(connection.exec_driver_sql(_STAMP).one())


_LOCK = "SELECT pg_advisory_xact_lock(hashtext('orchestrator.' || %(name)s))"
_NEWEST_VERSION = "SELECT coalesce(max(version), 0) FROM orchestrator.workflows WHERE name = %(name)s"
_ADD = """
INSERT INTO orchestrator.workflows (name, version, hash, definition, triggers)
VALUES (%(name)s, %(version)s, %(hash)s, %(definition)s::jsonb, %(triggers)s::jsonb)
"""


class Application(NamedTuple):
    """What applying a definition came to."""

    version: int
    created: bool


def apply(connection: Connection, definition: Definition) -> Application:
    """Store a definition and set its schedule, in the caller's transaction.

    The same body again is a no-op. Another body gets a new version, or is refused where it names an old one.
    """
    _refuse_circle(connection, definition)
    application = _store(connection, definition)
    newest = latest(connection, definition.name)
    if newest is not None and newest.version == application.version:
        schedules.declare(connection, definition)
    return application


def _refuse_circle(connection: Connection, definition: Definition) -> None:
    def read_latest(name: str) -> Definition | None:
        stored = latest(connection, name)
        return stored.definition if stored is not None else None

    way = circle(definition, read_latest)
    if way is not None:
        raise InvalidWorkflow(
            f"Every run of workflow {definition.name!r} would start another, without end: {' → '.join(way)}. Add a "
            f"when to one of the steps between them, or a filter to an `on`."
        )


def _store(connection: Connection, definition: Definition) -> Application:
    connection.exec_driver_sql(_LOCK, {"name": definition.name})
    digest = content_hash(definition)
    newest = latest(connection, definition.name)
    if definition.version is None and newest is not None and newest.hash == digest:
        return Application(newest.version, created=False)
    version = definition.version
    if version is None:
        version = 1 + connection.exec_driver_sql(_NEWEST_VERSION, {"name": definition.name}).scalar_one()
    existing = read(connection, definition.name, version)
    if existing is not None:
        if existing.hash != digest:
            raise InvalidWorkflow(
                f"Workflow {definition.name!r} version {version} exists with another body. Versions never change: "
                f"give it a new version, or leave `version` out to get one."
            )
        connection.exec_driver_sql(
            "UPDATE orchestrator.workflows SET deleted_at = NULL WHERE name = %(name)s AND version = %(version)s",
            {"name": definition.name, "version": version},
        )
        return Application(version, created=False)
    body = stored_json(msgspec.structs.replace(definition, version=version))
    parameters = {"name": definition.name, "version": version, "hash": digest, "definition": body}
    parameters["triggers"] = stored_json(definition.on)
    connection.exec_driver_sql(_ADD, parameters)
    return Application(version, created=True)


_DELETE = """
WITH unscheduled AS (DELETE FROM orchestrator.schedules WHERE workflow = %(name)s)
UPDATE orchestrator.workflows SET deleted_at = now() WHERE name = %(name)s AND deleted_at IS NULL
"""


def delete(connection: Connection, name: str) -> bool:
    """Delete a workflow and its schedules: it can no longer be started; its runs and their history stay.

    False if there is none.
    """
    return connection.exec_driver_sql(_DELETE, {"name": name}).rowcount > 0
