"""Runs of flows: what the leader reads of them, and the visits to nodes that it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection

from orchestrator.domain.ids import to_text
from orchestrator.domain.plain import stored_json
from orchestrator.errors import WrongState
from orchestrator.store.dag.plans import read_params
from orchestrator.store.inbox import RequestKind
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


_LOAD = Prepared[Row]("""
SELECT /* flow_runs.load */ r.id, r.workflow, r.version, r.params::text AS params, r.state
  FROM unnest(%(ids)s::uuid[]) AS wanted(id)
 CROSS JOIN LATERAL (SELECT * FROM orchestrator.runs WHERE id = wanted.id LIMIT 1) AS r
 WHERE r.flow AND NOT r.cancelling AND r.ended_at IS NULL
""")


def load(connection: Connection, ids: Sequence[bytes]) -> list[FlowRun]:
    """Return those of these runs that are runs of flows and go on; one that is being cancelled does not."""
    return [
        FlowRun(row.id, row.workflow, row.version, read_params(row.params or "{}"), row.state, len(row.params or ""))
        for row in _LOAD(connection, ids=ids)
    ]


def new_run(name: str, version: int, run_id: bytes, params: dict[str, Any], tags: Sequence[str] = ()) -> NewRun:
    """Return a run of a flow that is to be created."""
    return NewRun(
        id=run_id,
        name=name,
        workflow=name,
        version=version,
        params=stored_json(params),
        tags=stored_json(list(tags)),
        flow=True,
    )


class Started(NamedTuple):
    """What a run of a flow was started with."""

    workflow: str
    version: int
    params: str | None
    """JSON, sealed where there are data keys."""
    tags: list[str]
    fire_time: datetime | None


_STARTED = Statement[Started]("""
SELECT /* flow_runs.started */ workflow, version, params::text AS params, tags, fire_time FROM orchestrator.runs
 WHERE id = %(id)s::uuid AND flow
""")


def again(connection: Connection, run: bytes, new: bytes) -> NewRun | None:
    """Return a run that starts another one over: the same version, parameters and tags; None if it is of no flow."""
    found = _STARTED.first(connection, id=run)
    if found is None:
        return None
    params = read_params(found.params or "{}")
    if not isinstance(params, dict):
        raise WrongState(
            f"Run {to_text(run)} cannot be run again: its parameters are sealed with a key that is not here."
        )
    started = new_run(found.workflow, found.version, new, params, found.tags)
    return started._replace(fire_time=None if found.fire_time is None else found.fire_time.isoformat())


_LOCK = Statement[None]("""
SELECT /* flow_runs.lock */ pg_advisory_xact_lock(hashtextextended('orchestrator.flow.' || %(id)s::uuid::text, 0))
""")
_SENT = Statement[str]("""
SELECT /* flow_runs.sent */ body->>'key' FROM orchestrator.inbox
 WHERE kind = %(kind)s AND target = %(id)s::uuid ORDER BY id LIMIT 1000
""")


def take_turn(connection: Connection, run: bytes) -> list[str]:
    """Let nobody else decide for a run until the end of the transaction; return the keys of signals under way to it."""
    _LOCK(connection, id=run)
    return list(_SENT(connection, kind=str(RequestKind.FLOW_SIGNAL), id=run))


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
_KEEP = Prepared[None](f"""
INSERT /* flow_runs.keep */ INTO orchestrator.node_runs
       (run_id, number, node, kind, status, attempt, action, error, input, output, first_call, calls, started_at,
        ended_at)
SELECT n.run_id, n.number, n.node, n.kind, n.status, n.attempt, n.action, n.error, n.input, n.output, n.first_call,
       n.calls, to_timestamp(n.started), to_timestamp(n.ended)
  FROM {_VISITS}
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
