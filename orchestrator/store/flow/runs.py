"""Runs of flows: what the leader reads of them, and stored visits to nodes. And versions of flow graphs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection

from orchestrator.domain import timezones
from orchestrator.domain.code.history import SignalReceived
from orchestrator.domain.flow.definition import DEFAULT, Flow, Rule, content_hash
from orchestrator.domain.flow.rules import named_versions, with_rules
from orchestrator.domain.flow.state import FlowState
from orchestrator.domain.ids import to_text
from orchestrator.domain.plain import stored_json
from orchestrator.errors import InvalidWorkflow, WrongState
from orchestrator.store.batches import Batch, Blob
from orchestrator.store.dag.plans import read_params
from orchestrator.store.dag.workflows import Versions
from orchestrator.store.inbox import RequestKind
from orchestrator.store.runs import pending_changes
from orchestrator.store.runs.creation import NewRun
from orchestrator.store.sql import Prepared, Row, Statement


class FlowRun(NamedTuple):
    """A run of a flow, for the planner."""

    id: bytes
    flow: str
    version: int
    params: Any
    state: bytes | None
    size: int = 0
    """Characters of the stored parameters."""
    is_over: bool = False
    """Whether the run has ended or is being cancelled."""


_LOAD = Prepared[Row]("""
SELECT /* flow_runs.load */ r.id, r.workflow, r.version, r.params::text AS params, r.state,
       r.cancelling OR r.ended_at IS NOT NULL AS is_over
  FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (SELECT * FROM orchestrator.runs WHERE id = wanted.id LIMIT 1) AS r
 WHERE r.flow AND (r.id = ANY(%(late)s::uuid[]) OR (NOT r.cancelling AND r.ended_at IS NULL))
""")


def load(connection: Connection, ids: Sequence[bytes], late: Sequence[bytes] = ()) -> list[FlowRun]:
    """Return the open runs of flows among these that are not being cancelled; those in `late` in any state."""
    return [
        FlowRun(
            *(row.id, row.workflow, row.version, read_params(row.params or "{}"), row.state, len(row.params or "")),
            is_over=row.is_over,
        )
        for row in _LOAD(connection, ids=ids, late=late)
    ]


def new_run(
    name: str,
    version: int,
    run_id: bytes,
    params: dict[str, Any],
    tags: Sequence[str] = (),
    shared: dict[str, Any] | None = None,
) -> NewRun:
    """Return a new run of a flow, with the initial shared state."""
    return NewRun(
        id=run_id,
        name=name,
        workflow=name,
        version=version,
        params=stored_json(params),
        tags=stored_json(list(tags)),
        flow=True,
        state=timezones.encode(FlowState(initial=shared).to_plain()) if shared else None,
    )


class Started(NamedTuple):
    """The arguments of a run of a flow."""

    workflow: str
    version: int
    params: str | None
    """JSON, sealed if there are data keys."""
    tags: list[str]
    fire_time: datetime | None
    state: bytes | None
    headers: str | None
    """JSON."""


_STARTED = Statement[Started]("""
SELECT /* flow_runs.started */ workflow, version, params::text AS params, tags, fire_time, state,
       headers::text AS headers
  FROM orchestrator.runs
 WHERE id = %(id)s::uuid AND flow
""")


def rerun_of(connection: Connection, run: bytes, new: bytes) -> NewRun | None:
    """Return a new run with the arguments of another run; None if that is not of a flow."""
    source = _STARTED.first(connection, id=run)
    if source is None:
        return None
    params = read_params(source.params or "{}")
    if not isinstance(params, dict):
        raise WrongState(
            f"Run {to_text(run)} cannot be rerun: its parameters are sealed with a data key that this process lacks."
        )
    plain = None if source.state is None else timezones.decode(bytes(source.state))
    initial = FlowState.from_plain(plain).initial if isinstance(plain, list) else None
    started = new_run(source.workflow, source.version, new, params, source.tags, initial)
    fire_time = None if source.fire_time is None else source.fire_time.isoformat()
    return started._replace(fire_time=fire_time, headers=source.headers)


@Statement.function("""
SELECT /* flow_runs.which */ workflow, version FROM orchestrator.runs WHERE id = %(run)s::uuid AND flow
""")
def flow_of(connection: Connection, run: bytes) -> tuple[str, int] | None:
    """Return the flow and the version of a run; None if the run is not of a flow."""


class Standing(NamedTuple):
    """The status of a run of a flow, for a sender of a message."""

    status: str
    is_cancelling: bool
    """Whether the run is being cancelled, or has a cancel request."""
    state: FlowState
    pending_keys: frozenset[str]
    """The requested keys whose signals the leader has not applied yet."""


_LOCK = Statement[None]("""
SELECT /* flow_runs.lock */ pg_advisory_xact_lock(hashtextextended('orchestrator.flow.' || %(id)s::uuid::text, 0))
""")
_STANDING = Statement[Row]("""
SELECT /* flow_runs.standing */ r.status, r.state,
       r.cancelling OR EXISTS (SELECT FROM orchestrator.inbox
                                WHERE kind = %(cancel)s AND target = %(id)s::uuid) AS cancelling,
       ARRAY (SELECT DISTINCT body->>'key' FROM orchestrator.inbox
               WHERE kind = %(kind)s AND target = %(id)s::uuid AND body->>'key' = ANY (%(keys)s::text[])) AS sent,
       ARRAY (SELECT u.body FROM orchestrator.untold u
               WHERE u.run_id = %(id)s::uuid AND EXISTS (
                     SELECT FROM unnest(%(keys)s::text[]) AS key
                      WHERE position(convert_to(key, 'UTF8') IN u.body) > 0)) AS pending_changes
  FROM orchestrator.runs r WHERE r.id = %(id)s::uuid
""")


def lock_and_read(connection: Connection, run: bytes, keys: Sequence[str]) -> Standing:
    """Lock a run against other messages until the transaction ends; return its status.

    A signal moves from the inbox to the state, or to the run's pending changes, so one statement reads all three.
    """
    _LOCK(connection, id=run)
    values = {"kind": str(RequestKind.FLOW_SIGNAL), "cancel": str(RequestKind.CANCEL_RUN), "keys": list(keys)}
    row = _STANDING.one(connection, id=run, **values)
    plain = None if row.state is None else timezones.decode(bytes(row.state))
    late = {
        fact.name
        for body in row.pending_changes
        for fact in pending_changes.decode_changes(bytes(body)).facts
        if isinstance(fact, SignalReceived)
    }
    return Standing(
        row.status,
        row.cancelling,
        FlowState.from_plain(plain) if isinstance(plain, list) else FlowState(),
        frozenset(row.sent) | late,
    )


_STORED_SIZE = Statement[int]("""
SELECT /* flow_runs.keeps */ coalesce(octet_length(r.state), 0)
       + 3 * (SELECT coalesce(sum(octet_length(body::text)), 0) FROM orchestrator.inbox
               WHERE kind = %(kind)s AND target = r.id) / 2
       + 2 * (SELECT coalesce(sum(octet_length(body)), 0) FROM orchestrator.untold WHERE run_id = r.id)
  FROM orchestrator.runs r WHERE r.id = %(id)s::uuid
""")


def stored_size(connection: Connection, run: bytes) -> int:
    """Return an estimate of a run's stored bytes, pending signals included: each counts twice, as the state will have
    it under its key and in the shared state."""
    return int(_STORED_SIZE.first(connection, id=run, kind=str(RequestKind.FLOW_SIGNAL)) or 0)


class Visit(NamedTuple):
    """A visit to a node, as stored."""

    run_id: bytes
    number: int
    node: str
    kind: str
    status: str
    attempt: int
    action: str
    error: str | None
    input: Blob | None
    output: Blob | None
    first_call: int
    calls: int
    started: float
    ended: float


_VISITS = Batch("n", Visit)
_TIMES = {"started_at": "to_timestamp(n.started)", "ended_at": "to_timestamp(n.ended)"}
_KEEP = Prepared[None](f"""
INSERT /* flow_runs.keep */ {_VISITS.into("node_runs", but=("started", "ended"), **_TIMES)}
    ON CONFLICT DO NOTHING
""")


def keep_visits(connection: Connection, visits: Sequence[Visit], *, is_gathered: bool = False) -> None:
    """Store visits to nodes; with `is_gathered`, together with the next statement."""
    keep = _KEEP.defer if is_gathered else _KEEP
    keep(connection, _VISITS(visits))


_FORGET = Prepared[None]("DELETE /* flow_runs.forget */ FROM orchestrator.timers WHERE run_id = ANY(%(ids)s::uuid[])")


def forget(connection: Connection, ids: Sequence[bytes], *, is_gathered: bool = False) -> None:
    """Delete the timers of ended runs; with `is_gathered`, together with the next statement."""
    drop = _FORGET.defer if is_gathered else _FORGET
    drop(connection, ids=ids)


# -- flow graphs: immutable under (name, version)


class StoredFlow(NamedTuple):
    """One version of a flow."""

    name: str
    version: int
    hash: str
    flow: Flow
    published: bool
    created_at: datetime


def rule_of(connection: Connection, stored: StoredFlow) -> Rule:
    """Return the error policy of a version, for nodes that do not set one."""
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
    """A flow, without its definition."""

    name: str
    version: int
    """The newest published version; 0 without one."""
    created_at: datetime


@Statement.function("""
SELECT /* flows.list */ name, coalesce(max(version) FILTER (WHERE published), 0) AS version,
       min(created_at) AS created_at
  FROM orchestrator.flows WHERE deleted_at IS NULL AND starts_with(name, %(within)s::text)
 GROUP BY name ORDER BY name
""")
def list_names(connection: Connection, within: str = "") -> list[FlowName]:
    """Return all flows whose names begin with `within`."""


_REQUESTED = Batch("v", "name text, version int")
_RULES = Statement[tuple[str, int, Rule]](f"""
SELECT /* flows.rules */ v.name, v.version, f.on_error FROM {_REQUESTED}
  JOIN orchestrator.flows f ON f.name = v.name AND f.version = v.version
""")


def rules(connection: Connection, keys: Collection[tuple[str, int]]) -> dict[tuple[str, int], Rule]:
    """Return the error policies of these versions of flows, if they exist."""
    return {(name, version): rule for name, version, rule in _RULES(connection, _REQUESTED(keys))} if keys else {}


_ADD = Statement[None]("""
INSERT /* flows.add */ INTO orchestrator.flows (name, version, hash, definition, published, on_error)
VALUES (%(name)s, %(version)s, %(hash)s, %(definition)s::jsonb, %(published)s, %(rule)s)
    ON CONFLICT DO NOTHING
""")


def declare(connection: Connection, name: str) -> None:
    """Register a flow, possibly before its first version."""
    _VERSIONED.take_name(connection, name)
    _ADD(connection, name=name, version=0, hash="", definition="{}", published=False, rule=DEFAULT)


def publish(
    connection: Connection, name: str, flow: Flow, rule: Rule, version: int | None = None, *, published: bool = True
) -> Published:
    """Store a version of a flow, in the caller's transaction. Storing the same body and policy again does nothing.

    An existing `version` with the same body keeps its policy. The caller stores the schedule, which has no versions.
    """
    policies = rules(connection, named_versions(flow))
    flow = msgspec.structs.replace(with_rules(flow, policies, rule), schedule=None)
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
                f"Flow {name!r} version {version} exists with a different body. Versions never change: publish it as a "
                f"new version, or omit the version to get one."
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
