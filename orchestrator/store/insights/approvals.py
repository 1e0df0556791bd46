"""Decisions that wait for a person: open promises of workflows as code, and approval nodes of flows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy import Connection

from orchestrator.domain import timezones
from orchestrator.domain.code.other_runs import WAIT
from orchestrator.domain.dag.definition import hidden_by
from orchestrator.domain.flow.definition import Flow, Node, node_at
from orchestrator.domain.flow.state import FlowState, Wait
from orchestrator.store.code import histories
from orchestrator.store.code import keys as run_keys
from orchestrator.store.flow import runs
from orchestrator.store.insights.runs import readable_params, shown_params
from orchestrator.store.sql import Row, Statement

_MAX_PER_RUN = 5
"""Promises of one run that are listed."""
_MAX_START = 20_000
"""Bytes of the first event of a run; arguments in a larger event appear only on the page of the run."""
_MAX_SCANNED = 1_000
"""Open runs of flows that are scanned for one page: only their state tells what they wait for."""


@dataclass(frozen=True, kw_only=True)
class ApprovalView:
    """A decision that somebody has to make."""

    kind: str
    """`promise` of a workflow as code, or `approval` of a flow."""
    run: UUID
    """The run that waits."""
    workflow: str
    """The workflow or flow of the run."""
    key: str | None
    """The chosen id or idempotency key of the run."""
    tags: tuple[str, ...]
    """Tags by which the run can be found."""
    name: str
    """The name of the promise, or the path of the flow's node."""
    about: str
    """The description of the node."""
    input: Any
    """The input of the node, or the run's parameters if it has none; for a promise, the run's arguments if not
    large."""
    since: datetime
    """The time since which the run waits."""
    due: datetime | None
    """The deadline of the decision."""
    promise: UUID | None = None
    """The id of the promise."""
    type: str = ""
    """The JSON Schema type of the value: boolean, integer, number, string…; empty if unknown."""
    schema: dict[str, Any] | None = None
    """The JSON Schema of the value, if its type is declared."""
    redact: tuple[str, ...] = ()
    """Patterns of input fields to hide, of the tasks in the flow."""


class ApprovalPage(NamedTuple):
    """A page of approvals, those of the oldest runs first."""

    approvals: list[ApprovalView]
    next: UUID | None
    """The `after` of the next page; None on the last page."""


_PROMISES = Statement[Row](f"""
SELECT /* insights.approvals.promises */ p.run_id, p.name, r.workflow, r.tags, coalesce(h.at, r.created_at) AS since,
       first.data AS start, p.id, h.data AS created,
       coalesce(r.key, (SELECT {run_keys.OWN_ID} FROM orchestrator.run_keys k WHERE k.run_id = r.id LIMIT 1)) AS key
  FROM (SELECT DISTINCT run_id FROM orchestrator.promises
         WHERE name NOT LIKE '{WAIT}%%' AND (%(after)s::uuid IS NULL OR run_id > %(after)s::uuid)
         ORDER BY run_id LIMIT %(limit)s) AS waiting
 CROSS JOIN LATERAL (
       SELECT * FROM orchestrator.promises WHERE run_id = waiting.run_id AND name NOT LIKE '{WAIT}%%'
        ORDER BY ordinal LIMIT {_MAX_PER_RUN}) AS p
 CROSS JOIN LATERAL (SELECT * FROM orchestrator.runs WHERE id = p.run_id LIMIT 1) AS r
  LEFT JOIN LATERAL (
       SELECT at, data FROM orchestrator.histories WHERE run_id = p.run_id AND kind = 'promise_created'
        ORDER BY number OFFSET p.ordinal - 1 LIMIT 1) AS h ON true
  LEFT JOIN orchestrator.histories first
    ON first.run_id = p.run_id AND first.number = 1 AND first.kind = 'run_started'
   AND length(first.data) <= {_MAX_START}
 ORDER BY p.run_id, p.ordinal
""")
_FLOWS = Statement[Row](f"""
SELECT /* insights.approvals.flows */ id, workflow, version, key, tags, state, created_at,
       CASE WHEN octet_length(params::text) <= {_MAX_START} THEN params END AS params FROM orchestrator.runs
 WHERE flow AND ended_at IS NULL AND NOT cancelling AND (%(after)s::uuid IS NULL OR id > %(after)s::uuid)
 ORDER BY id LIMIT %(limit)s
""")


def page_of_approvals(
    connection: Connection, *, limit: int, after: UUID | None = None, within: str = ""
) -> ApprovalPage:
    """Return approvals in workflows and flows whose names begin with `within`.

    A page scans a bounded number of runs, so it may have few approvals or none without being the last.
    """
    promises, promises_until = _promises(connection, limit, after)
    flows, flows_until = _flows(connection, after)
    until = min((cursor for cursor in (promises_until, flows_until) if cursor is not None), default=None)
    approvals = sorted((*promises, *flows), key=lambda approval: approval.run)
    approvals = [approval for approval in approvals if until is None or approval.run <= until]
    runs = sorted({approval.run for approval in approvals})
    if len(runs) > limit:
        until = runs[limit - 1]
        approvals = [approval for approval in approvals if approval.run <= until]
    return ApprovalPage([approval for approval in approvals if approval.workflow.startswith(within)], until)


def _promises(connection: Connection, limit: int, after: UUID | None) -> tuple[list[ApprovalView], UUID | None]:
    rows = _PROMISES(connection, limit=limit, after=after and after.hex)
    promises = [
        ApprovalView(
            kind="promise",
            run=row.run_id,
            workflow=row.workflow or "",
            key=row.key,
            tags=tuple(row.tags),
            name=row.name,
            about="",
            input=None if row.start is None else histories.arguments(bytes(row.start)),
            since=row.since,
            due=None,
            promise=row.id,
            schema=schema_of(histories.promise_schema(bytes(row.created))) if row.created else None,
        )
        for row in rows
    ]
    promises = [replace(promise, type=_type_of(promise.schema)) for promise in promises]
    return promises, promises[-1].run if len({row.run_id for row in rows}) == limit else None


def schema_of(text: str) -> dict[str, Any] | None:
    """Return the JSON Schema of a promise; None if its type is not declared."""
    schema = msgspec.json.decode(text) if text else None
    return schema if isinstance(schema, dict) else None


def _type_of(schema: dict[str, Any] | None) -> str:
    """Return the JSON Schema type of a promise; empty for several types or none."""
    type_name = (schema or {}).get("type")
    return type_name if isinstance(type_name, str) else ""


def _flows(connection: Connection, after: UUID | None) -> tuple[list[ApprovalView], UUID | None]:
    rows = _FLOWS(connection, limit=_MAX_SCANNED, after=after and after.hex)
    flows: dict[tuple[str, int], Flow | None] = {}
    approvals = []
    for row in rows:
        state = _state(row.state)
        if not isinstance(state.work, Wait) or state.work.what != "signal":
            continue
        version_key = row.workflow, row.version
        if version_key not in flows:
            stored = runs.read(connection, *version_key)
            flows[version_key] = None if stored is None else stored.flow
        node = find_node(flows[version_key], state.cursor)
        if node is not None and node.kind == "approval":
            approvals.append(_approval(row, state, state.work, node, flows[version_key]))
    return approvals, rows[-1].id if len(rows) == _MAX_SCANNED else None


def _state(data: Any) -> FlowState:
    """Return the state of a run; an empty state if the run has not begun or its state cannot be decoded."""
    try:
        plain = None if data is None else timezones.decode(bytes(data))
    except msgspec.DecodeError:
        return FlowState()
    return FlowState.from_plain(plain) if isinstance(plain, list) else FlowState()


def find_node(flow: Flow | None, path: str) -> Node | None:
    """Return the node at a path: its key, after those of the nodes that contain it."""
    return None if flow is None else node_at(flow, path)


def _approval(row: Row, state: FlowState, wait: Wait, node: Node, flow: Flow | None) -> ApprovalView:
    functions = () if flow is None else flow.functions.values()
    entered = state.frames[-1].entered
    return ApprovalView(
        kind="approval",
        run=row.id,
        workflow=row.workflow,
        key=row.key,
        tags=tuple(row.tags),
        name=state.cursor,
        about=node.description,
        input=readable_params(shown_params(row.params)) if row.params and not wait.input else wait.input,
        since=datetime.fromtimestamp(entered, UTC) if entered else row.created_at,
        due=datetime.fromtimestamp(wait.due, UTC) if wait.due else None,
        redact=hidden_by(functions),
    )
