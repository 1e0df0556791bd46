"""Runs of flows: what the leader reads of them, and the visits to nodes that it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection

from orchestrator.domain import timezones
from orchestrator.domain.code.history import SignalReceived
from orchestrator.domain.flow.state import FlowState
from orchestrator.domain.ids import to_text
from orchestrator.domain.plain import stored_json
from orchestrator.errors import WrongState
from orchestrator.store.dag.plans import read_params
from orchestrator.store.inbox import RequestKind
from orchestrator.store.runs import pending_changes
from orchestrator.store.runs.creation import NewRun
from orchestrator.store.sql import Batch, Blob, Prepared, Row, Statement


class FlowRun(NamedTuple):
    """A run of a flow that goes on."""

    id: bytes
    flow: str
    version: int
    params: Any
    state: bytes | None
    size: int = 0
    """Characters of its parameters, as they are stored."""
    is_over: bool = False
    """It has ended, or is being cancelled."""


_LOAD = Prepared[Row]("""
SELECT /* flow_runs.load */ r.id, r.workflow, r.version, r.params::text AS params, r.state,
       r.cancelling OR r.ended_at IS NOT NULL AS is_over
  FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (SELECT * FROM orchestrator.runs WHERE id = wanted.id LIMIT 1) AS r
 WHERE r.flow AND (r.id = ANY(%(late)s::uuid[]) OR (NOT r.cancelling AND r.ended_at IS NULL))
""")


def load(connection: Connection, ids: Sequence[bytes], late: Sequence[bytes] = ()) -> list[FlowRun]:
    """Return those of these runs that are runs of flows and go on, and the `late` ones also if they do not."""
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
    """Return a run of a flow that is to be created, with the shared state that it begins with."""
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
    """JSON, sealed where there are data keys."""
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


def again(connection: Connection, run: bytes, new: bytes) -> NewRun | None:
    """Return a run that starts another one over, with all that it was started with; None if it is of no flow."""
    found = _STARTED.first(connection, id=run)
    if found is None:
        return None
    params = read_params(found.params or "{}")
    if not isinstance(params, dict):
        raise WrongState(
            f"Run {to_text(run)} cannot be run again: its parameters are sealed with a key that is not here."
        )
    plain = None if found.state is None else timezones.decode(bytes(found.state))
    initial = FlowState.from_plain(plain).initial if isinstance(plain, list) else None
    started = new_run(found.workflow, found.version, new, params, found.tags, initial)
    fire_time = None if found.fire_time is None else found.fire_time.isoformat()
    return started._replace(fire_time=fire_time, headers=found.headers)


@Statement.function("""
SELECT /* flow_runs.which */ workflow, version FROM orchestrator.runs WHERE id = %(run)s::uuid AND flow
""")
def which(connection: Connection, run: bytes) -> tuple[str, int] | None:
    """Return the flow and the version of a run; None if it is of no flow."""


class Standing(NamedTuple):
    """How a run of a flow stands, for those that send it something."""

    status: str
    is_cancelling: bool
    """It is being cancelled, or a cancel is requested."""
    state: FlowState
    under_way: frozenset[str]
    """Keys of signals that the leader has not applied yet, among those that were asked for."""


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


def take_turn(connection: Connection, run: bytes, keys: Sequence[str]) -> Standing:
    """Lock a run against further messages until the end of the transaction; return its state.

    A signal moves from the inbox to the state, or to the pending changes of the run, so one statement reads all of
    them.
    """
    _LOCK(connection, id=run)
    asked = {"kind": str(RequestKind.FLOW_SIGNAL), "cancel": str(RequestKind.CANCEL_RUN), "keys": list(keys)}
    row = _STANDING.one(connection, id=run, **asked)
    plain = None if row.state is None else timezones.decode(bytes(row.state))
    late = {
        fact.name
        for body in row.pending_changes
        for fact in pending_changes.facts_of(bytes(body))
        if isinstance(fact, SignalReceived)
    }
    return Standing(
        row.status,
        row.cancelling,
        FlowState.from_plain(plain) if isinstance(plain, list) else FlowState(),
        frozenset(row.sent) | late,
    )


_KEEPS = Statement[int]("""
SELECT /* flow_runs.keeps */ coalesce(octet_length(r.state), 0)
       + 3 * (SELECT coalesce(sum(octet_length(body::text)), 0) FROM orchestrator.inbox
               WHERE kind = %(kind)s AND target = r.id) / 2
       + 2 * (SELECT coalesce(sum(octet_length(body)), 0) FROM orchestrator.untold WHERE run_id = r.id)
  FROM orchestrator.runs r WHERE r.id = %(id)s::uuid
""")


def keeps(connection: Connection, run: bytes) -> int:
    """Return about how many bytes a run keeps, with the signals that are pending: each twice, by its key and in the
    shared state."""
    return int(_KEEPS.first(connection, id=run, kind=str(RequestKind.FLOW_SIGNAL)) or 0)


class Visit(NamedTuple):
    """A visit to a node, as it is kept."""

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
    """Keep visits to nodes; if it `is_gathered`, with the next statement."""
    keep = _KEEP.later if is_gathered else _KEEP
    keep(connection, _VISITS(visits))


_FORGET = Prepared[None]("DELETE /* flow_runs.forget */ FROM orchestrator.timers WHERE run_id = ANY(%(ids)s::uuid[])")


def forget(connection: Connection, ids: Sequence[bytes], *, is_gathered: bool = False) -> None:
    """Forget what runs waited for that have ended; if it `is_gathered`, with the next statement."""
    drop = _FORGET.later if is_gathered else _FORGET
    drop(connection, ids=ids)
