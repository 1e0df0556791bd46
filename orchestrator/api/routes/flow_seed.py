"""Flows at the root, with the names of the flow scheduler whose clients use these routes: a run is a task, completed or
canceled.

A flow's id is its name, and a version's id is `name@version`. JSON may be sent as text or as data. Field names are
accepted as written here or without underscores, in any case: `flow_id`, `FlowID`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import msgspec
from msgspec import Meta

from orchestrator.api.bodies import MAX_BODY
from orchestrator.api.context import MAX_INT, MAX_PAGE_SIZE, Api
from orchestrator.api.endpoints import Routes
from orchestrator.api.key_scope import WITHIN, check_flow, check_workflow, subject
from orchestrator.api.problems import invalid
from orchestrator.api.routes import flows
from orchestrator.domain.access import KeyScope, Scope
from orchestrator.domain.flow.definition import DEFAULT
from orchestrator.errors import NotFound
from orchestrator.sdk.calls.declaring import Kind
from orchestrator.sdk.checks import check_label, check_name
from orchestrator.sdk.ids import new_id
from orchestrator.store.flow.reads import FlowRunFilter, FlowRunView, NodeRunView
from orchestrator.store.flow.runs import StoredFlow

routes = Routes("flows at the root")

_STATES = {"completed": "success", "canceled": "cancelled"}
"""The other scheduler's states, and ours."""
_ALL = ("pending", "running", "completed", "failed", "canceling", "canceled")
_THEIR_STATES = {ours: theirs for theirs, ours in _STATES.items()}
_NODE_STATES = {"success": "ok", "failed": "error", "cancelled": "canceled", "skipped": "canceled"}


class Created(msgspec.Struct, frozen=True):
    """A created object."""

    id: str


class Ok(msgspec.Struct, frozen=True):
    """The request succeeded."""

    ok: str = "1"


class FlowItem(msgspec.Struct, frozen=True):
    """A flow."""

    id: str
    name: str
    version: int
    created_at: int


class VersionItem(msgspec.Struct, frozen=True):
    """A version of a flow."""

    id: str
    flow_id: str
    version: int
    definition_json: str
    status: str
    created_at: int


class FlowTask(msgspec.Struct, frozen=True):
    """A run of a flow."""

    id: str
    flow_version_id: str
    flow_id: str
    flow_name: str
    flow_version: int
    status: str
    params_json: str
    shared_json: str
    params: Any
    shared: Any
    current_node_key: str
    last_action: str
    step_count: int
    retry_state_json: str
    lease_owner: str
    lease_expiry: int
    request_id: str
    error: str
    created_at: int
    updated_at: int


class NodeRunItem(msgspec.Struct, frozen=True):
    """An attempt at a node."""

    id: str
    task_id: str
    node_key: str
    attempt_no: int
    status: str
    prep_json: str
    exec_input_json: str
    exec_output_json: str
    error_text: str
    action: str
    started_at: int
    finished_at: int
    worker_id: str
    worker_url: str
    visit: int = 0
    """The number of the visit: the last one of a page is `after` of the next page."""


class VersionsQuery(msgspec.Struct, frozen=True):
    """The flow whose versions to list."""

    flow_id: str


class VersionQuery(msgspec.Struct, frozen=True):
    """The version to show: `name@version`."""

    id: str


class TasksQuery(msgspec.Struct, frozen=True):
    """Which tasks to list."""

    status: str = ""
    flow_version_id: str = ""
    page: Annotated[int, Meta(ge=1, le=10_000)] = 1
    page_size: Annotated[int, Meta(ge=1, le=1_000)] = 100


class TaskQuery(msgspec.Struct, frozen=True):
    """The task to show."""

    id: UUID


class RunsQuery(msgspec.Struct, frozen=True):
    """The task, and which visits to nodes to list."""

    task_id: UUID
    after: Annotated[int, Meta(ge=0, le=MAX_INT)] = 0
    """`visit` of the last item on the previous page; the page behind the last is empty."""
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE_SIZE)] = MAX_PAGE_SIZE
    """Visits on a page, at most; a visit may have several attempts."""


class TaskSignal(msgspec.Struct, frozen=True):
    """A value for a key in the shared state of a task."""

    task_id: UUID
    key: Annotated[str, Meta(min_length=1, max_length=500)]
    value: Any = True


_OF_ID = subject("run in ?id", {Kind.RUN: "id"}, "query")
_OF_TASK_ID = subject("run in ?task_id", {Kind.RUN: "task_id"}, "query")
_OF_BODY = subject("run in the body", {Kind.RUN: "task_id"})

# -- flows


@routes.post("/flows", about=WITHIN, examples=[{"name": "order"}])
def create_flow(api: Api, body: dict[str, Any], key_scope: KeyScope) -> Created:
    """Create a flow without versions."""
    name = check_name("flow", str(_field(body, "name")))
    check_workflow(key_scope, name)
    api.backend.flows.declare(name)
    return Created(name)


@routes.get("/flows", about=WITHIN)
def list_flows(api: Api, key_scope: KeyScope) -> list[FlowItem]:
    """List flows."""
    found = [flow for flow in api.backend.flows.names() if key_scope.has_workflow(flow.name)]
    return [FlowItem(flow.name, flow.name, flow.version, _seconds(flow.created_at)) for flow in found]


@routes.post(
    "/flows/version",
    about=WITHIN,
    examples=[{"flow_id": "order", "definition": {"start": "a", "nodes": {}}}],
    is_expensive=True,
    max_body=MAX_BODY,
)
def create_version(api: Api, body: dict[str, Any], key_scope: KeyScope) -> Created:
    """Create a version of a flow, and publish it unless its status is `draft`."""
    name = check_name("flow", str(_field(body, "flow_id", "flow", "name")))
    check_workflow(key_scope, name)
    source = _field(body, "definition_json", "definition")
    called = "definition_json" if isinstance(source, str) else "definition"
    flow = flows.read_source(api, source, called, key_scope)
    check_flow(key_scope, name, flow)
    version = _integer(_field(body, "version", default=0), "version")
    status = str(_field(body, "status", default="") or "published")
    if status not in ("published", "draft"):
        raise invalid(f"{status!r:.60} is not a valid status of a version. Expected published or draft.")
    done = api.backend.flows.publish(name, flow, version or None, published=status == "published", rule=DEFAULT)
    return Created(f"{name}@{done.version}")


@routes.get("/flows/version", about=WITHIN)
def list_versions(api: Api, query: VersionsQuery, key_scope: KeyScope) -> list[VersionItem]:
    """List the versions of a flow."""
    check_workflow(key_scope, query.flow_id)
    found = api.backend.flows.versions(query.flow_id)
    if not found and all(flow.name != query.flow_id for flow in api.backend.flows.names()):
        raise NotFound(f"There is no flow {query.flow_id!r:.200}.")
    return [_version(stored) for stored in found]


@routes.get("/flows/version/get", about=WITHIN)
def show_version(api: Api, query: VersionQuery, key_scope: KeyScope) -> VersionItem:
    """Get a version of a flow."""
    name, version = _parse_version(query.id)
    check_workflow(key_scope, name)
    return _version(api.backend.flows.read(name, version))


# -- tasks


@routes.post("/tasks", about=WITHIN, scope=Scope.ENQUEUE, examples=[{"flow_id": "order", "params": {"val": 2}}])
def create_task(api: Api, body: dict[str, Any], key: str | None, key_scope: KeyScope) -> Created:
    """Start a run of the newest published version of a flow, once for each request_id or Idempotency-Key."""
    name = check_name("flow", str(_field(body, "flow_id", "flow")))
    check_workflow(key_scope, name)
    params, shared = _mapping(body, "params_json", "params"), _mapping(body, "shared_json", "shared")
    version = _integer(_field(body, "version", default=0), "version")
    request = _field(body, "request_id", default="") or key or ""
    if key is not None and request != key:
        raise invalid("request_id and the header Idempotency-Key differ: give one of them.")
    key = check_label("request_id", str(request)) if request else None
    run = api.backend.flows.start(name, params, new_id(), version=version or None, key=key, shared=shared)
    return Created(str(UUID(bytes=run)))


@routes.get("/tasks", about=WITHIN)
def list_flow_tasks(api: Api, query: TasksQuery, key_scope: KeyScope) -> list[FlowTask]:
    """List runs of flows, newest first."""
    status = query.status
    if status and status not in _ALL:
        raise invalid(f"{status!r:.60} is not a valid status. Expected one of {', '.join(_ALL)}.")
    states: tuple[str, ...] | None = (_STATES.get(status, status),) if status else None
    cancelling = True if status == "canceling" else False if status in ("pending", "running") else None
    if status == "canceling":
        states = ("pending", "running")
    flow, version = _parse_version(query.flow_version_id) if query.flow_version_id else (None, None)
    run_filter = FlowRunFilter(flow, version, states, cancelling, key_scope.workflows)
    offset = (query.page - 1) * query.page_size
    found = api.backend.flows.list_page(run_filter, limit=query.page_size, offset=offset)
    return [_task(flows.redacted_run(api, view)) for view in found]


@routes.get("/tasks/get", about=_OF_ID)
def show_task(api: Api, query: TaskQuery) -> FlowTask:
    """Get a run of a flow, with its shared state."""
    return _task(flows.redacted_run(api, api.backend.flows.show(query.id.bytes)))


@routes.post("/tasks/cancel", about=_OF_ID)
def cancel_task(api: Api, query: TaskQuery) -> Ok:
    """Cancel a run of a flow."""
    api.backend.flows.show(query.id.bytes)  # raises NotFound if there is no such run
    api.backend.runs.cancel(query.id.bytes)
    return Ok()


@routes.get("/tasks/runs", about=_OF_TASK_ID)
def list_node_runs(api: Api, query: RunsQuery) -> list[NodeRunItem]:
    """List the attempts of a run of a flow at its nodes, in order."""
    found = flows.node_runs(api, query.task_id, query.after, query.limit)
    attempts: Counter[int] = Counter()
    items = []
    for view in found:
        attempts[view.number] += 1
        items.append(_node_run(query.task_id, f"{view.number}-{attempts[view.number]}", view))
    return items


@routes.post("/tasks/signal", about=_OF_BODY, examples=[{"task_id": str(UUID(int=7)), "key": "flag", "value": True}])
def signal_task(api: Api, body: TaskSignal) -> Ok:
    """Write a value into the shared state of a run of a flow, where nodes wait for it."""
    api.backend.flows.signal(body.task_id.bytes, body.key, body.value)
    return Ok()


# -- conversions


_REQUIRED = object()


def _field(body: Mapping[str, Any], *names: str, default: Any = _REQUIRED) -> Any:
    fields = {str(key).replace("_", "").lower(): value for key, value in body.items()}
    for name in names:
        value = fields.get(name.replace("_", ""))
        if value is not None:
            return value
    if default is _REQUIRED:
        raise invalid(f"{names[0]} is missing.")
    return default


def _mapping(body: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return a mapping under any of its names, as data or JSON text."""
    found = _field(body, *names, default={})
    if isinstance(found, str):
        try:
            found = msgspec.json.decode(found) if found else {}
        except msgspec.DecodeError as error:
            raise invalid(f"{names[0]} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise invalid(f"{names[0]}: expected a mapping.")
    return found


def _integer(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**31 or value != int(value):
        raise invalid(f"{name}: expected a whole number, found {value!r:.60}.")
    return int(value)


def _parse_version(text: str) -> tuple[str, int]:
    name, _, version = text.rpartition("@")
    if not name or not version.isascii() or not version.isdecimal() or not 0 < int(version[:10]) < 2**31:
        raise NotFound(f"{text!r:.100} is not a version of a flow: expected something like order@1.")
    return name, int(version[:10])


def _seconds(at: datetime | None) -> int:
    return 0 if at is None else int(at.timestamp())


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _version(flow: StoredFlow) -> VersionItem:
    status = "published" if flow.published else "draft"
    text = _text(flow.flow)
    identifier = f"{flow.name}@{flow.version}"
    return VersionItem(identifier, flow.name, flow.version, text, status, _seconds(flow.created_at))


def _task(view: FlowRunView) -> FlowTask:
    is_open = view.status in ("pending", "running")
    return FlowTask(
        id=str(view.id),
        flow_version_id=f"{view.flow}@{view.version}",
        flow_id=view.flow,
        flow_name=view.flow,
        flow_version=view.version,
        status="canceling" if view.cancelling and is_open else _THEIR_STATES.get(view.status, view.status),
        params_json=_text(view.params),
        shared_json=_text(view.shared),
        params=view.params,
        shared=view.shared,
        current_node_key=view.cursor,
        last_action=view.last_action,
        step_count=view.steps,
        retry_state_json="{}",
        lease_owner="",
        lease_expiry=0,
        request_id=view.request_id or "",
        error=view.reason or "",
        created_at=_seconds(view.created_at),
        updated_at=_seconds(view.ended_at or view.started_at or view.created_at),
    )


def _node_run(task: UUID, attempt: str, view: NodeRunView) -> NodeRunItem:
    prep = {"kind": view.kind} if view.branch is None else {"kind": view.kind, "branch": view.branch}
    return NodeRunItem(
        id=f"{task}-{attempt}",
        task_id=str(task),
        node_key=view.node,
        attempt_no=view.attempt,
        status=_NODE_STATES.get(view.status, view.status),
        prep_json=_text(prep),
        exec_input_json=_text(view.input),
        exec_output_json=_text(view.output),
        error_text=view.error or "",
        action=view.action,
        started_at=_seconds(view.started_at or view.ended_at),
        finished_at=_seconds(view.ended_at),
        worker_id=view.worker or "",
        worker_url="",
        visit=view.number,
    )
