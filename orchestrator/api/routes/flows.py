"""Flow graphs: validate, publish, start, signal, approve and show them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import msgspec
from msgspec import Meta

from orchestrator.api.bodies import MAX_BODY
from orchestrator.api.context import MAX_INT, MAX_PAGE_SIZE, PAGE_SIZE, Api, Asked, build_from, view_fields
from orchestrator.api.endpoints import Routes
from orchestrator.api.key_scope import RUN, WITHIN, WORKFLOW, check_flow, check_workflow
from orchestrator.api.problems import invalid
from orchestrator.api.redacting import redacted
from orchestrator.api.routes.workflows import Started
from orchestrator.domain.access import KeyScope, Scope
from orchestrator.domain.flow.decisions import APPROVED, REJECTED
from orchestrator.domain.flow.definition import DEFAULT, Flow, body_of, content_hash, functions_of, named_flows
from orchestrator.domain.flow.rules import differences
from orchestrator.domain.states import RunState
from orchestrator.sdk.checks import check_label, check_name, check_tags
from orchestrator.sdk.dag.registered import redacting_functions
from orchestrator.sdk.flow import reading
from orchestrator.sdk.ids import new_id
from orchestrator.store.flow.reads import FlowRunFilter, FlowRunView, NodeRunView
from orchestrator.store.flow.runs import FlowName

routes = Routes("flows", "/api/v1")

_EXAMPLE = {"start": "a", "nodes": {"a": {"kind": "executor", "service": "transform"}}, "edges": []}
Name = Annotated[str, Meta(min_length=1, max_length=200)]


class FlowSummary(view_fields(FlowName)):  # type: ignore[misc]
    ...


class FlowList(msgspec.Struct, frozen=True):
    flows: list[FlowSummary]


class FlowAnswer(msgspec.Struct, frozen=True):
    """One version of a flow."""

    name: str
    version: int
    hash: str
    created_at: datetime
    definition: dict[str, Any]
    """The definition, as in a file."""
    on_error: str = DEFAULT
    """What a failed node without an `error` edge and `on_error` does: take its `default` edge, or `fail`."""


class FlowDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flow: as data, or as YAML or JSON text."""

    definition: dict[str, Any] | None = None
    text: str | None = None
    version: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None
    """The version to publish; the next one by default."""


class FlowPublished(msgspec.Struct, frozen=True):
    """A published flow."""

    name: str
    version: int
    created: bool
    """False if this version existed already."""


class FlowChecked(msgspec.Struct, frozen=True):
    """The result of validating a valid flow."""

    nodes: int
    hash: str
    warnings: list[str] = []
    """Differences from a run of the same flow in another flow scheduler."""


class NewFlowRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run of a flow to start."""

    params: dict[str, Any] = {}
    version: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None
    """The newest version by default."""
    tags: list[str] = []
    shared: dict[str, Any] = {}


class FlowRunsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    state: RunState | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE_SIZE)] = PAGE_SIZE
    offset: Annotated[int, Meta(ge=0, le=100_000)] = 0


class FlowRun(view_fields(FlowRunView, "redact")):  # type: ignore[misc]
    """A run of a flow."""


class FlowRuns(msgspec.Struct, frozen=True):
    """Runs of flows, newest first."""

    items: list[FlowRun]


class NodesQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which visits to nodes to list."""

    after: Annotated[int, Meta(ge=0, le=MAX_INT)] = 0
    """The number of the last visit on the previous page."""
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE_SIZE)] = MAX_PAGE_SIZE


class NodeRun(view_fields(NodeRunView, "redact", "run")):  # type: ignore[misc]
    """An attempt at a node, or at one of its branches."""


class NodeRuns(msgspec.Struct, frozen=True):
    """Visits to nodes, in order, with each attempt."""

    items: list[NodeRun]
    next: int | None = None
    """Pass it as `after` to get the next page; null on the empty page behind the last."""


class FlowSignal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value, and the reason for the audit log."""

    value: Any = True
    why: Annotated[str, Meta(max_length=2_000)] = ""


class Decision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The reason, and the node of the approval if it is not the one that the run waits for."""

    why: Annotated[str, Meta(max_length=2_000)] = ""
    node: str | None = None


def find_flow(api: Api, key_scope: KeyScope) -> reading.Find:
    """Return a function that finds published flows, after a check that they are in the key scope."""

    def find(name: str, version: int | None) -> tuple[int, dict[str, Any]] | None:
        check_workflow(key_scope, name)
        found = api.backend.flows.find(name, version)
        return None if found is None else (found.version, body_of(found.flow))

    return find


def read_flow(api: Api, document: FlowDocument, key_scope: KeyScope) -> Flow:
    """Parse a flow; raise an error for all its mistakes."""
    if (document.definition is None) == (document.text is None):
        raise invalid("Expected either `definition` or `text`.")
    if document.text is None:
        return read_source(api, document.definition, "flow", key_scope)
    return read_source(api, document.text, "text", key_scope)


def read_source(api: Api, source: Any, name: str, key_scope: KeyScope) -> Flow:
    """Parse a flow from text or data. `name` is used in messages. Patterns of its functions are added for redaction."""
    read = reading.loads if isinstance(source, str) else reading.from_data
    flow = read(source, name, find=find_flow(api, key_scope))
    names = functions_of(flow)
    return msgspec.structs.replace(flow, functions=redacting_functions(names, api.names.redacted(names)))


@routes.get("/flows", about=WITHIN)
def list_flows(api: Api, key_scope: KeyScope) -> FlowList:
    """List flows."""
    found = [flow for flow in api.backend.flows.names() if key_scope.has_workflow(flow.name)]
    return FlowList([build_from(FlowSummary, flow) for flow in found])


@routes.post("/flows/validate", about=WITHIN, scope=Scope.READ, examples=[{"definition": _EXAMPLE}], is_expensive=True)
def validate_flow(api: Api, body: FlowDocument, key_scope: KeyScope) -> FlowChecked:
    """Validate a flow: list all its errors, without storing it."""
    flow = read_flow(api, body, key_scope)
    for name in sorted(named_flows(flow)):
        check_workflow(key_scope, name)
    return FlowChecked(len(flow.nodes), content_hash(flow), differences(flow))


@routes.get("/flows/{name}", about=WORKFLOW)
def show_flow(api: Api, name: str) -> FlowAnswer:
    """Show the newest version of a flow."""
    found = api.backend.flows.latest(name)
    rule = api.backend.flows.rule(found)
    return FlowAnswer(found.name, found.version, found.hash, found.created_at, body_of(found.flow), rule)


@routes.post("/flows/{name}", about=WORKFLOW, examples=[{"definition": _EXAMPLE}], is_expensive=True, max_body=MAX_BODY)
def publish_flow(api: Api, name: str, body: FlowDocument, key_scope: KeyScope) -> FlowPublished:
    """Publish a flow. An unchanged flow keeps its version; a changed one gets a new version."""
    flow = read_flow(api, body, key_scope)
    check_flow(key_scope, name, flow)
    done = api.backend.flows.publish(check_name("flow", name), flow, body.version)
    return FlowPublished(name, done.version, done.created)


@routes.post("/flows/{name}/runs", about=WORKFLOW, scope=Scope.ENQUEUE, status=201, examples=[{"params": {"val": 2}}])
def start_flow(api: Api, name: str, body: NewFlowRun, key: str | None) -> Started:
    """Start a run of a flow."""
    key = None if key is None else check_label("key", key)
    run = api.backend.flows.start(
        name,
        body.params,
        new_id(),
        version=body.version,
        key=key,
        tags=check_tags(tuple(body.tags)),
        shared=body.shared,
    )
    return Started(UUID(bytes=run))


@routes.get("/flows/{name}/runs", about=WORKFLOW)
def list_flow_runs(api: Api, name: str, query: FlowRunsQuery) -> FlowRuns:
    """List runs of a flow, newest first."""
    run_filter = FlowRunFilter(name, None, None if query.state is None else (str(query.state),))
    found = api.backend.flows.list_page(run_filter, limit=query.limit, offset=query.offset)
    return FlowRuns([build_from(FlowRun, redacted_run(api, view)) for view in found])


@routes.get("/runs/{id}/flow", about=RUN)
def show_flow_run(api: Api, id: UUID) -> FlowRun:
    """Show the state of a run of a flow: its cursor, its shared state, and what it waits for."""
    return build_from(FlowRun, redacted_run(api, api.backend.flows.show(id.bytes)))


@routes.get("/runs/{id}/nodes", about=RUN)
def list_node_runs(api: Api, id: UUID, query: NodesQuery) -> NodeRuns:
    """List the visits of a run of a flow to nodes, with each attempt."""
    found = [build_from(NodeRun, view) for view in node_runs(api, id, query.after, query.limit)]
    return NodeRuns(found, found[-1].number if found else None)


@routes.post("/runs/{id}/flow/signals/{name}", about=RUN, status=202, examples=[{"value": True}])
def signal_flow(api: Api, id: UUID, name: str, body: FlowSignal) -> Asked:
    """Send a value to a run of a flow. It is kept until a node waits for it."""
    api.backend.flows.signal(id.bytes, name, body.value, body.why)
    return Asked(id, "signal")


@routes.post("/runs/{id}/approve", about=RUN, status=202, examples=[{"why": "within the budget"}])
def approve_flow(api: Api, id: UUID, body: Decision) -> Asked:
    """Approve the approval that a run of a flow waits for."""
    api.backend.flows.decide(id.bytes, APPROVED, body.why, body.node)
    return Asked(id, "approve")


@routes.post("/runs/{id}/reject", about=RUN, status=202, examples=[{"why": "too expensive"}])
def reject_flow(api: Api, id: UUID, body: Decision) -> Asked:
    """Reject the approval that a run of a flow waits for."""
    api.backend.flows.decide(id.bytes, REJECTED, body.why, body.node)
    return Asked(id, "reject")


def node_runs(api: Api, run: UUID, after: int = 0, limit: int = MAX_PAGE_SIZE) -> list[NodeRunView]:
    """Return visits to nodes, redacted."""
    found: list[NodeRunView] = redacted(api, api.backend.flows.node_runs(run.bytes, after, limit))
    return found


def redacted_run(api: Api, view: FlowRunView) -> FlowRunView:
    found: FlowRunView = redacted(api, view)
    return found
