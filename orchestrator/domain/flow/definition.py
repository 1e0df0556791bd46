"""A flow as data: nodes, and edges followed by action. `checks` validates it.

Files, JSON and the Python builder all produce a `Flow`. It is immutable. Its JSON is stored in the database and covered
by the content hash.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, Literal, cast

import msgspec

from orchestrator.domain.dag.definition import Registered
from orchestrator.errors import InvalidWorkflow

Kind = Literal["executor", "choice", "parallel", "subflow", "timer", "foreach", "wait_event", "approval"]
Mode = Literal["sequential", "concurrent"]
Strategy = Literal["fail_fast", "collect_errors", "ignore_errors", "continue"]
OnError = Literal["fail", "continue"]
"""The behavior of a failed node without an `error` edge: fail its flow, or continue."""
Rule = Literal["default", "fail"]
"""The default of `on_error` for a version: failed nodes take their `default` edge, or fail. Stored with the version."""

DEFAULT: Final = "default"
"""The default action, and the edge for actions without an edge of their own."""
ERROR = "error"
"""The edge that a failed node takes."""
TIMEOUT = "timeout"
"""The edge that a node takes when its wait times out."""
MAX_STEPS = 100_000
"""Node visits of a run, at most, unless its flow sets another limit."""

MAX_MS = 100 * 366 * 86_400_000
"""The longest timeout or delay in milliseconds: a hundred years, which every timestamp can hold."""


class _Data(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The base class of all parts of a flow, which are encoded as compact JSON."""


class Prep(_Data, frozen=True, kw_only=True):
    """The input of a node."""

    input_key: str = ""
    """A path: `$params.order`, `$shared.list[0]`, `$input`. Without a root, a path in the shared state."""
    input_map: dict[str, str] = {}
    """Several paths by name."""


class Post(_Data, frozen=True, kw_only=True):
    """Where a node's result is written, and which action follows."""

    output_key: str = ""
    """The path in the shared state where the result is written."""
    output_map: dict[str, str] = {}
    """By path in the shared state, the path in the result to write there."""
    action_static: str = ""
    """The action, whatever the result."""
    action_key: str = ""
    """The path of the action in the result."""


class Script(_Data, frozen=True, kw_only=True):
    """A command that a worker runs."""

    cmd: str = ""
    args: tuple[str, ...] = ()
    code: str = ""
    language: str = ""
    stdin_mode: str = ""
    output_mode: str = ""
    timeout_ms: int = 0
    env: dict[str, str] = {}
    work_dir: str = ""


class Exec(_Data, frozen=True, kw_only=True):
    """The executor of one branch, item or subflow node. Missing fields default to those of its node."""

    service: str = ""
    exec_type: str = ""
    func: str = ""
    script: Script | None = None
    params: dict[str, Any] = {}
    prep: Prep = Prep()
    post: Post = Post()
    options: dict[str, Any] = {}
    """Options of the executor."""
    index: int | None = None
    """The index of the foreach item. Default: the position in the list."""
    node: str = ""
    """The key of the subflow node."""


EXECS = ("parallel_execs", "foreach_execs", "subflow_execs")
"""The fields of a node that hold lists of `Exec`."""


class ChoiceCase(_Data, frozen=True, kw_only=True):
    """An action and its condition."""

    action: str
    expr: Any = None


class Node(_Data, frozen=True, kw_only=True):
    """A node of a flow."""

    kind: Kind = "executor"
    description: str = ""
    service: str = ""
    exec_type: str = ""
    """`http`, `local_func`, `local_script`, `queue`, or any other executor."""
    func: str = ""
    script: Script | None = None
    options: dict[str, Any] = {}
    """Options of the executor."""
    params: dict[str, Any] = {}
    """Merged into the parameters of the run for this node and its subflow."""
    prep: Prep = Prep()
    post: Post = Post()
    default_action: str = ""
    choice_key: str = ""
    choice_cases: tuple[ChoiceCase, ...] = ()
    max_retries: int | None = None
    """Retries after the first attempt. Default: as the task declares."""
    wait_ms: int = 0
    """Milliseconds between two attempts."""
    max_attempts: int = 0
    """Workers of a service that one attempt asks, one after another, at most."""
    attempt_delay_ms: int = 0
    weighted_by_load: bool = False
    timeout_ms: int = 0
    """Milliseconds that one attempt may run. For the timeout of a wait, see `params.timeout_ms`."""
    queue: str = ""
    priority: int = 0
    parallel_services: tuple[str, ...] = ()
    parallel_execs: tuple[Exec, ...] = ()
    parallel_mode: Mode = "sequential"
    max_parallel: int = 0
    failure_strategy: Strategy = "fail_fast"
    on_error: OnError | None = None
    """The behavior after a failure without an `error` edge. Default: the rule of the version."""
    foreach_execs: tuple[Exec, ...] = ()
    subflow: Flow | None = None
    subflow_execs: tuple[Exec, ...] = ()

    @property
    def ignores_errors(self) -> bool:
        """Whether the node succeeds even if its branches fail."""
        return self.failure_strategy in ("ignore_errors", "continue")


class Edge(_Data, frozen=True, kw_only=True, rename={"source": "from"}):
    """The node that follows an action. Without `to`, the flow ends."""

    source: str
    action: str = DEFAULT
    to: str = ""


class Flow(_Data, frozen=True, kw_only=True):
    """A graph of nodes: a flow, or a subflow of a node."""

    start: str
    nodes: dict[str, Node]
    edges: tuple[Edge, ...] = ()
    max_steps: int = 0
    """Node visits of a run, at most. 0 for the default."""
    description: str = ""
    flow: str = ""
    """For a subflow, the name of the flow that it was copied from."""
    version: int = 0
    """For a subflow, the version of that flow."""
    functions: dict[str, Registered] = {}
    """Options of the application's tasks that the flow calls, copied when it is published."""
    takes: dict[str, tuple[str, ...]] = {}
    """Parameters of the tasks in `functions`: only these are passed. A task that is missing here gets all."""
    schedule: dict[str, Any] | None = None
    """When runs start automatically, as written. It is stored separately and is not part of a version."""

    @property
    def most_steps(self) -> int:
        """Node visits of a run, at most."""
        return self.max_steps or MAX_STEPS


def content_hash(flow: Flow) -> str:
    """Return the SHA-256 of the whole flow."""
    return hashlib.sha256(msgspec.json.encode(flow, order="sorted")).hexdigest()


def body_of(flow: Flow) -> dict[str, Any]:
    """Return a flow as plain data in the shape of a file. `to_builtins` would leave tuples instead of lists."""
    own = msgspec.structs.replace(flow, functions={}, takes={})
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(own))
    return plain


def without_nulls(plain: Any) -> Any:
    """Return a part of a flow without null fields: some tools write every field."""
    if isinstance(plain, dict):
        return {key: value for key, value in plain.items() if value is not None}
    return plain


def normal(plain: dict[str, Any]) -> dict[str, Any]:
    """Return a validated flow, normalized for its definition."""
    flow = {key: value for key, value in plain.items() if value is not None and key not in ("name",)}
    if "nodes" not in flow:
        return flow
    flow["nodes"] = {key: _normal_node(node) for key, node in flow["nodes"].items()}
    flow["edges"] = [without_nulls(edge) for edge in flow.get("edges") or []]
    if "flow" not in flow:
        flow.pop("version", None)
    return flow


def _normal_node(node: dict[str, Any]) -> dict[str, Any]:
    normalized = {key: value for key, value in node.items() if value not in (None, "")}
    for key in ("prep", "post", "script"):
        if key in normalized:
            normalized[key] = without_nulls(normalized[key])
            if not normalized[key]:
                del normalized[key]
    for key in EXECS:
        if key in normalized:
            normalized[key] = [
                {name: without_nulls(value) for name, value in entry.items() if value not in (None, "")}
                for entry in normalized[key]
            ]
    if "subflow" in normalized:
        normalized["subflow"] = normal(normalized["subflow"])
    return normalized


def from_plain(plain: dict[str, Any]) -> Flow:
    """Return the definition of a validated flow."""
    try:
        return msgspec.convert(normal(plain), Flow)
    except msgspec.ValidationError as error:
        raise InvalidWorkflow(f"The flow cannot be read: {error}.") from error


def node_at(flow: Flow, path: str) -> Node | None:
    """Return the node at a path: its key after those of the nodes above it."""
    node, inner = None, cast(Flow | None, flow)
    for key in path.split("/"):
        if inner is None or key not in inner.nodes:
            return None
        node = inner.nodes[key]
        inner = node.subflow
    return node


def size_of(flow: Flow) -> int:
    """Return the number of nodes, including subflows."""
    return len(flow.nodes) + sum(size_of(node.subflow) for node in flow.nodes.values() if node.subflow is not None)


def named_queues(flow: Flow) -> set[str]:
    """Return the queues of the flow's tasks."""
    queues = {node.queue or "default" for node in flow.nodes.values()}
    queues |= {function.queue for function in flow.functions.values() if function.queue}
    return queues.union(*(named_queues(node.subflow) for node in flow.nodes.values() if node.subflow is not None))


def functions_of(flow: Flow) -> set[str]:
    """Return the names of all functions and services that a flow calls."""
    names: set[str] = set()
    for node in flow.nodes.values():
        execs = (*node.parallel_execs, *node.foreach_execs, *node.subflow_execs)
        names |= {
            node.func,
            node.service,
            *node.parallel_services,
            *(name for entry in execs for name in (entry.func, entry.service)),
        }
        if node.subflow is not None:
            names |= functions_of(node.subflow)
    return names - {""}


def named_flows(flow: Flow) -> set[str]:
    """Return the flows that are used as subflows by name."""
    inner = [node.subflow for node in flow.nodes.values() if node.subflow is not None]
    return {subflow.flow for subflow in inner if subflow.flow}.union(*map(named_flows, inner))


class Edges:
    """The edges of a flow, by node and action."""

    def __init__(self, flow: Flow) -> None:
        self._to = {(edge.source, edge.action or DEFAULT): edge.to for edge in flow.edges}

    def follow(self, node: str, action: str) -> str:
        """Return the node that follows an action. Empty if the flow ends."""
        target = self._to.get((node, action))
        return self._to.get((node, DEFAULT), "") if target is None else target

    def catches(self, node: str, action: str) -> bool:
        """Return whether a node has an edge for this very action."""
        return (node, action) in self._to


_STEP = "flow:"


def step_of(path: str) -> str:
    """Return the step name of a node in rows of tasks. No step of a DAG can have this name."""
    return _STEP + path


def name_of(step: str | None) -> str | None:
    """Return the displayed name of a step or a node, from the step name in the row of a task."""
    return None if step is None else step.removeprefix(_STEP)


def is_node(step: str | None) -> bool:
    """Return whether a task belongs to a node of a flow."""
    return step is not None and step.startswith(_STEP)
