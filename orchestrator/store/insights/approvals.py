"""What waits for a person: open promises of workflows as code, and approvals at which runs of flows stand."""

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

_MOST_OF_A_RUN = 5
"""Promises of one run that are shown."""
_LARGEST_START = 20_000
"""Bytes of the first event of a run; the arguments in a larger one are left to the page of the run."""
_MOST_LOOKED_AT = 1_000
"""Open runs of flows that are looked at for one page: what they wait for stands in their state."""


@dataclass(frozen=True, kw_only=True)
class ApprovalView:
    """A decision that somebody has to make."""

    kind: str
    """`promise` of a workflow as code, or `approval` of a flow."""
    run: UUID
    """The run that waits."""
    workflow: str
    """The workflow or flow that it is a run of."""
    key: str | None
    """The id of their own, or the key, that somebody gave the run."""
    tags: tuple[str, ...]
    """What the run can be found by."""
    name: str
    """What the promise is called, or the node of the flow, behind those above it."""
    about: str
    """What the node says of itself."""
    input: Any
    """What the node took in, or the parameters of its run if it took nothing; of a promise the arguments of its run, as
    they are stored, if not large."""
    since: datetime
    """Since when it waits."""
    due: datetime | None
    """When the time to decide is up."""
    promise: UUID | None = None
    """The id of the promise."""
    type: str = ""
    """The type of its value, of JSON Schema: boolean, integer, number, string…; empty if not known."""
    schema: dict[str, Any] | None = None
    """The JSON Schema of its value, if its type is declared."""
    redact: tuple[str, ...] = ()
    """Patterns of fields of the input that are not shown, of the tasks that the flow runs."""


class ApprovalPage(NamedTuple):
    """Some of what waits, that of the oldest runs first."""

    approvals: list[ApprovalView]
    next: UUID | None
    """The `after` of the page after this one; None if there are no more."""


_PROMISES = Statement[Row](f"""
SELECT /* insights.approvals.promises */ p.run_id, p.name, r.workflow, r.tags, coalesce(h.at, r.created_at) AS since,
       first.data AS start, p.id, h.data AS created,
       coalesce(r.key, (SELECT {run_keys.OWN_ID} FROM orchestrator.run_keys k WHERE k.run_id = r.id LIMIT 1)) AS key
  FROM (SELECT DISTINCT run_id FROM orchestrator.promises
         WHERE name NOT LIKE '{WAIT}%%' AND (%(after)s::uuid IS NULL OR run_id > %(after)s::uuid)
         ORDER BY run_id LIMIT %(limit)s) AS waiting
 CROSS JOIN LATERAL (
       SELECT * FROM orchestrator.promises WHERE run_id = waiting.run_id AND name NOT LIKE '{WAIT}%%'
        ORDER BY ordinal LIMIT {_MOST_OF_A_RUN}) AS p
 CROSS JOIN LATERAL (SELECT * FROM orchestrator.runs WHERE id = p.run_id LIMIT 1) AS r
  LEFT JOIN LATERAL (
       SELECT at, data FROM orchestrator.histories WHERE run_id = p.run_id AND kind = 'promise_created'
        ORDER BY number OFFSET p.ordinal - 1 LIMIT 1) AS h ON true
  LEFT JOIN orchestrator.histories first
    ON first.run_id = p.run_id AND first.number = 1 AND first.kind = 'run_started'
   AND length(first.data) <= {_LARGEST_START}
 ORDER BY p.run_id, p.ordinal
""")
_FLOWS = Statement[Row](f"""
SELECT /* insights.approvals.flows */ id, workflow, version, key, tags, state, created_at,
       CASE WHEN octet_length(params::text) <= {_LARGEST_START} THEN params END AS params FROM orchestrator.runs
 WHERE flow AND ended_at IS NULL AND NOT cancelling AND (%(after)s::uuid IS NULL OR id > %(after)s::uuid)
 ORDER BY id LIMIT %(limit)s
""")


def page_of_approvals(
    connection: Connection, *, limit: int, after: UUID | None = None, within: str = ""
) -> ApprovalPage:
    """Return what waits for a person in workflows and flows whose names begin with `within`.

    A page looks at a bounded number of runs, and so may have few, or none, and yet not be the last.
    """
    promises, promises_until = _promises(connection, limit, after)
    flows, flows_until = _flows(connection, after)
    until = min((place for place in (promises_until, flows_until) if place is not None), default=None)
    found = sorted((*promises, *flows), key=lambda one: one.run)
    found = [one for one in found if until is None or one.run <= until]
    runs = sorted({one.run for one in found})
    if len(runs) > limit:
        until = runs[limit - 1]
        found = [one for one in found if one.run <= until]
    return ApprovalPage([one for one in found if one.workflow.startswith(within)], until)


def _promises(connection: Connection, limit: int, after: UUID | None) -> tuple[list[ApprovalView], UUID | None]:
    rows = _PROMISES(connection, limit=limit, after=after and after.hex)
    found = [
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
    found = [replace(one, type=_type_of(one.schema)) for one in found]
    return found, found[-1].run if len({row.run_id for row in rows}) == limit else None


def schema_of(text: str) -> dict[str, Any] | None:
    """Return the JSON Schema of a promise; None if its type is not declared."""
    found = msgspec.json.decode(text) if text else None
    return found if isinstance(found, dict) else None


def _type_of(schema: dict[str, Any] | None) -> str:
    """Return the type of JSON Schema that a promise has; empty for several, or none."""
    found = (schema or {}).get("type")
    return found if isinstance(found, str) else ""


def _flows(connection: Connection, after: UUID | None) -> tuple[list[ApprovalView], UUID | None]:
    rows = _FLOWS(connection, limit=_MOST_LOOKED_AT, after=after and after.hex)
    known: dict[tuple[str, int], Flow | None] = {}
    found = []
    for row in rows:
        state = _state(row.state)
        if not isinstance(state.work, Wait) or state.work.what != "signal":
            continue
        place = row.workflow, row.version
        if place not in known:
            stored = runs.read(connection, *place)
            known[place] = None if stored is None else stored.flow
        node = find_node(known[place], state.cursor)
        if node is not None and node.kind == "approval":
            found.append(_approval(row, state, state.work, node, known[place]))
    return found, rows[-1].id if len(rows) == _MOST_LOOKED_AT else None


def _state(data: Any) -> FlowState:
    """Return what is remembered of a run; nothing of one that has not begun, or cannot be read."""
    try:
        plain = None if data is None else timezones.decode(bytes(data))
    except msgspec.DecodeError:
        return FlowState()
    return FlowState.from_plain(plain) if isinstance(plain, list) else FlowState()


def find_node(flow: Flow | None, path: str) -> Node | None:
    """Return the node at a path: its key, behind those of the nodes above it."""
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
