"""A flow as data: nodes, and edges that are taken by their actions. Whether they make sense together is for `checks`.

Files, JSON and the Python builder are three ways to write a `Flow`. It is immutable, and its JSON is what the database
keeps and the content hash covers.
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
"""What a failed node without an `error` edge does: fail its flow, or go on."""
Rule = Literal["default", "fail"]
"""The default of that for the nodes of a version: take their `default` edge, or fail. It is stored beside it."""

DEFAULT: Final = "default"
"""The default action, and the edge of actions that have none of their own."""
ERROR = "error"
"""The edge of a node that has failed."""
TIMEOUT = "timeout"
"""The edge of a node whose time to wait is up."""
MOST_STEPS = 100_000
"""Nodes that a run visits at most, unless its flow says otherwise."""

MOST_MS = 100 * 366 * 86_400_000
"""Milliseconds that anything may take or wait: a hundred years, which every timestamp can hold."""


class _Data(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The base of all parts of a flow: compact JSON, and back."""


class Prep(_Data, frozen=True, kw_only=True):
    """The input of a node."""

    input_key: str = ""
    """A path: `$params.order`, `$shared.list[0]`, `$input`; without a root, of the shared state."""
    input_map: dict[str, str] = {}
    """Several paths, each under a name of its own."""


class Post(_Data, frozen=True, kw_only=True):
    """Where a node's result goes."""

    output_key: str = ""
    """Where in the shared state it is written."""
    output_map: dict[str, str] = {}
    """Parts of it, as paths in it, by where in the shared state they are written."""
    action_static: str = ""
    """The action that it ends with, whatever the result is."""
    action_key: str = ""
    """A path in the result, at which the action stands."""


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
    """The executor of one branch, item or node of a subflow; missing fields are those of its node."""

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
    """Which item of a foreach; its place in the list, if it does not say."""
    node: str = ""
    """Which node of a subflow."""


EXECS = ("parallel_execs", "foreach_execs", "subflow_execs")
"""Where a node has such."""


class ChoiceCase(_Data, frozen=True, kw_only=True):
    """An action, and the expression that must hold for it."""

    action: str
    expr: Any = None


class Node(_Data, frozen=True, kw_only=True):
    """One node."""

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
    """Added to the parameters of the run, and passed on."""
    prep: Prep = Prep()
    post: Post = Post()
    default_action: str = ""
    choice_key: str = ""
    choice_cases: tuple[ChoiceCase, ...] = ()
    max_retries: int | None = None
    """Tries after the first: 3 means up to four, 0 one; if it is not said, as its task says."""
    wait_ms: int = 0
    """Between two tries."""
    max_attempts: int = 0
    """Workers of a service that one try asks, one after another."""
    attempt_delay_ms: int = 0
    weighted_by_load: bool = False
    timeout_ms: int = 0
    """How long one try may take; of a wait, see `params.timeout_ms`."""
    queue: str = ""
    priority: int = 0
    parallel_services: tuple[str, ...] = ()
    parallel_execs: tuple[Exec, ...] = ()
    parallel_mode: Mode = "sequential"
    max_parallel: int = 0
    failure_strategy: Strategy = "fail_fast"
    on_error: OnError | None = None
    """What follows a failure without an `error` edge; by default, the rule of the version."""
    foreach_execs: tuple[Exec, ...] = ()
    subflow: Flow | None = None
    subflow_execs: tuple[Exec, ...] = ()

    @property
    def ignores_errors(self) -> bool:
        """Say whether it goes on as if nothing had failed."""
        return self.failure_strategy in ("ignore_errors", "continue")


class Edge(_Data, frozen=True, kw_only=True, rename={"source": "from"}):
    """Where an action leads; to nowhere, the flow ends."""

    source: str
    action: str = DEFAULT
    to: str = ""


class Flow(_Data, frozen=True, kw_only=True):
    """A graph of nodes, or a part of one that stands in a node."""

    start: str
    nodes: dict[str, Node]
    edges: tuple[Edge, ...] = ()
    max_steps: int = 0
    """Nodes that a run visits at most; 0 for the usual number."""
    description: str = ""
    flow: str = ""
    """Of one that stands in a node: the flow that it was taken over from."""
    version: int = 0
    """Of that flow, which version."""
    functions: dict[str, Registered] = {}
    """Options of the application's tasks that it runs, copied when it is published."""
    takes: dict[str, tuple[str, ...]] = {}
    """Parameters of those, so that they get no more; one that is not here may take anything."""
    schedule: dict[str, Any] | None = None
    """When runs start by themselves, as it was written; this is stored beside the flow, and is no part of a version."""

    @property
    def most_steps(self) -> int:
        """Return how many nodes a run visits at most."""
        return self.max_steps or MOST_STEPS


def content_hash(flow: Flow) -> str:
    """Return a SHA-256 of all of it."""
    return hashlib.sha256(msgspec.json.encode(flow, order="sorted")).hexdigest()


def body_of(flow: Flow) -> dict[str, Any]:
    """Return a flow as plain data, in the shape of a file: with lists, where `to_builtins` leaves tuples."""
    own = msgspec.structs.replace(flow, functions={}, takes={})
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(own))
    return plain


def without_nulls(plain: Any) -> Any:
    """Return a part of a flow without what is null: some write every field, with nothing in it."""
    if isinstance(plain, dict):
        return {key: value for key, value in plain.items() if value is not None}
    return plain


def normal(plain: dict[str, Any]) -> dict[str, Any]:
    """Return a flow that has passed the checks as its definition has it."""
    flow = {key: value for key, value in plain.items() if value is not None and key not in ("name",)}
    if "nodes" not in flow:
        return flow
    flow["nodes"] = {key: _normal_node(node) for key, node in flow["nodes"].items()}
    flow["edges"] = [without_nulls(edge) for edge in flow.get("edges") or []]
    if "flow" not in flow:
        flow.pop("version", None)
    return flow


def _normal_node(node: dict[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in node.items() if value not in (None, "")}
    for key in ("prep", "post", "script"):
        if key in found:
            found[key] = without_nulls(found[key])
            if not found[key]:
                del found[key]
    for key in EXECS:
        if key in found:
            found[key] = [
                {name: without_nulls(value) for name, value in one.items() if value not in (None, "")}
                for one in found[key]
            ]
    if "subflow" in found:
        found["subflow"] = normal(found["subflow"])
    return found


def from_plain(plain: dict[str, Any]) -> Flow:
    """Return a flow that has passed the checks."""
    try:
        return msgspec.convert(normal(plain), Flow)
    except msgspec.ValidationError as error:
        raise InvalidWorkflow(f"The flow cannot be read: {error}.") from error


def node_at(flow: Flow, path: str) -> Node | None:
    """Return the node at a path: its key, behind those of the nodes above it."""
    node, inner = None, cast(Flow | None, flow)
    for key in path.split("/"):
        if inner is None or key not in inner.nodes:
            return None
        node = inner.nodes[key]
        inner = node.subflow
    return node


def size_of(flow: Flow) -> int:
    """Return how many nodes a flow has, with those of the flows in it."""
    return len(flow.nodes) + sum(size_of(node.subflow) for node in flow.nodes.values() if node.subflow is not None)


def named_queues(flow: Flow) -> set[str]:
    """Return the queues that the tasks of a flow wait in."""
    found = {node.queue or "default" for node in flow.nodes.values()}
    found |= {function.queue for function in flow.functions.values() if function.queue}
    return found.union(*(named_queues(node.subflow) for node in flow.nodes.values() if node.subflow is not None))


def functions_of(flow: Flow) -> set[str]:
    """Return the names of all that the nodes of a flow run."""
    found: set[str] = set()
    for node in flow.nodes.values():
        execs = (*node.parallel_execs, *node.foreach_execs, *node.subflow_execs)
        found |= {
            node.func,
            node.service,
            *node.parallel_services,
            *(name for one in execs for name in (one.func, one.service)),
        }
        if node.subflow is not None:
            found |= functions_of(node.subflow)
    return found - {""}


def named_flows(flow: Flow) -> set[str]:
    """Return the flows that stand in a flow by their names."""
    inner = [node.subflow for node in flow.nodes.values() if node.subflow is not None]
    return {one.flow for one in inner if one.flow}.union(*map(named_flows, inner))


class Edges:
    """Where the actions of a flow's nodes lead."""

    def __init__(self, flow: Flow) -> None:
        self._to = {(edge.source, edge.action or DEFAULT): edge.to for edge in flow.edges}

    def follow(self, node: str, action: str) -> str:
        """Return the node that an action leads to; an empty text where the flow ends."""
        found = self._to.get((node, action))
        return self._to.get((node, DEFAULT), "") if found is None else found

    def catches(self, node: str, action: str) -> bool:
        """Say whether an action of a node has an edge of its own."""
        return (node, action) in self._to


_STEP = "flow:"


def step_of(path: str) -> str:
    """Return what stands in the row of a task as its step; no step of a workflow can be called so."""
    return _STEP + path


def name_of(step: str | None) -> str | None:
    """Return what people call a step of a workflow or a node of a flow, by what stands in the row of a task."""
    return None if step is None else step.removeprefix(_STEP)


def is_node(step: str | None) -> bool:
    """Say whether a task belongs to a node of a flow."""
    return step is not None and step.startswith(_STEP)
