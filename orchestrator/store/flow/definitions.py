"""Flow graphs: immutable under (name, version)."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.flow.definition import DEFAULT, Flow, Rule, content_hash
from orchestrator.domain.flow.rules import named_versions, with_rules
from orchestrator.domain.plain import stored_json
from orchestrator.errors import InvalidWorkflow
from orchestrator.store.sql import Batch, Row, Statement
from orchestrator.store.versions import Versions


class StoredFlow(NamedTuple):
    """One version of a flow."""

    name: str
    version: int
    hash: str
    flow: Flow
    published: bool
    created_at: datetime


def rule_of(connection: Connection, stored: StoredFlow) -> Rule:
    """Return what nodes do that fail in a version, unless they say."""
    return rules(connection, [stored[:2]])[stored[:2]]


class Published(NamedTuple):
    """The result of publishing a flow."""

    version: int
    created: bool


def _stored(row: Row) -> StoredFlow:
    try:
        flow = msgspec.json.decode(row.definition, type=Flow)
    except msgspec.DecodeError as error:
        raise msgspec.ValidationError(f"flow {row.name!r}, version {row.version}: {error}") from error
    return StoredFlow(row.name, row.version, row.hash, flow, row.published, row.created_at)


_COLUMNS = "d.name, d.version, d.hash, d.definition::text AS definition, d.published, d.created_at"
_USABLE = "version > 0 AND published AND deleted_at IS NULL"
_VERSIONED = Versions("flows", _COLUMNS, _stored, usable=_USABLE, stored="version > 0")
latest, read, list_latest = _VERSIONED.latest, _VERSIONED.one, _VERSIONED.each_latest

_VERSIONS = Statement[Row](f"""
SELECT /* flows.versions */ {_COLUMNS} FROM orchestrator.flows d
 WHERE name = %(name)s AND version > 0 ORDER BY version DESC LIMIT %(limit)s
""")


def versions(connection: Connection, name: str, limit: int = 100) -> list[StoredFlow]:
    """Return the versions of a flow, newest first."""
    return [_stored(row) for row in _VERSIONS(connection, name=name, limit=limit)]


class FlowName(NamedTuple):
    """That there is a flow."""

    name: str
    version: int
    """The newest that is published; 0 if none is."""
    created_at: datetime


@Statement.function("""
SELECT /* flows.list */ name, coalesce(max(version) FILTER (WHERE published), 0) AS version,
       min(created_at) AS created_at
  FROM orchestrator.flows WHERE deleted_at IS NULL AND starts_with(name, %(within)s::text)
 GROUP BY name ORDER BY name
""")
def list_names(connection: Connection, within: str = "") -> list[FlowName]:
    """Return all flows whose names begin with `within`."""


_ASKED = Batch("v", "name text, version int")
_RULES = Statement[tuple[str, int, Rule]](f"""
SELECT /* flows.rules */ v.name, v.version, f.on_error FROM {_ASKED}
  JOIN orchestrator.flows f ON f.name = v.name AND f.version = v.version
""")


def rules(connection: Connection, wanted: Collection[tuple[str, int]]) -> dict[tuple[str, int], Rule]:
    """Return what nodes do that fail in these versions of flows, as far as there are such."""
    return {(name, version): rule for name, version, rule in _RULES(connection, _ASKED(wanted))} if wanted else {}


_ADD = Statement[None]("""
INSERT /* flows.add */ INTO orchestrator.flows (name, version, hash, definition, published, on_error)
VALUES (%(name)s, %(version)s, %(hash)s, %(definition)s::jsonb, %(published)s, %(rule)s)
    ON CONFLICT DO NOTHING
""")


def declare(connection: Connection, name: str) -> None:
    """Note that there is a flow, of which no version may be published yet."""
    _VERSIONED.take_name(connection, name)
    _ADD(connection, name=name, version=0, hash="", definition="{}", published=False, rule=DEFAULT)


def publish(
    connection: Connection, name: str, flow: Flow, rule: Rule, version: int | None = None, *, published: bool = True
) -> Published:
    """Store a version of a flow, in the caller's transaction. The same body under the same rule again is a no-op.

    A version that is named and has the same body keeps its rule. The schedule of a flow is no part of it: the
    caller stores that.
    """
    taken = rules(connection, named_versions(flow))
    flow = msgspec.structs.replace(with_rules(flow, taken, rule), schedule=None)
    _VERSIONED.take_name(connection, name)
    digest = content_hash(flow)
    newest = latest(connection, name)
    if version is None:
        if newest is not None and newest.hash == digest and rule_of(connection, newest) == rule:
            return Published(newest.version, created=False)
        version = _VERSIONED.next_version(connection, name)
    existing = read(connection, name, version)
    if existing is not None:
        if existing.hash != digest:
            raise InvalidWorkflow(
                f"Flow {name!r} version {version} exists with another body. Versions never change: publish it as "
                f"another version, or leave the version out to get one."
            )
        return Published(version, created=False)
    _ADD(
        connection,
        name=name,
        version=version,
        hash=digest,
        definition=stored_json(flow),
        published=published,
        rule=rule,
    )
    return Published(version, created=True)
