"""A flow prepared for its runs: the executors of its nodes, and its edges."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from typing import Any

import msgspec

from orchestrator.domain.flow.definition import DEFAULT, ERROR, Edges, Exec, Flow, Node, Rule
from orchestrator.domain.flow.paths import Path, parse
from orchestrator.errors import ExpressionError

_OWN = ("service", "exec_type", "func", "script", "options")


class Graph:
    """A flow and its subflows. Subflows are prepared when a run first reaches them."""

    def __init__(self, flow: Flow, rule: Rule, execs: Mapping[str, Exec] | None = None) -> None:
        self.flow = flow
        self.rule = rule
        self.nodes = flow.nodes
        self._execs = execs or {}
        """Executors that replace those of the nodes, by node."""
        self._executors: dict[str, Exec] = {}
        """Executors by node, computed so far."""
        self._inner: dict[str, Graph] = {}

    @cached_property
    def edges(self) -> Edges:
        """The edges of the flow."""
        return Edges(self.flow)

    def inner(self, key: str) -> Graph:
        """Return the subflow of a node."""
        graph = self._inner.get(key)
        if graph is None:
            node = self.nodes[key]
            assert node.subflow is not None, f"node {key!r} is no subflow"
            graph = Graph(node.subflow, self.rule, {override.node: override for override in node.subflow_execs})
            self._inner[key] = graph
        return graph

    @cached_property
    def approval_keys(self) -> frozenset[str]:
        """The signal keys of all approvals. Those in subflows start with the keys of the nodes above."""
        return frozenset(address for _, address in approvals(self.flow))

    @cached_property
    def inner_approval_keys(self) -> frozenset[str]:
        """The signal keys of the approvals in subflows."""
        return frozenset(address for node, address in approvals(self.flow) if "/" in node)

    @cached_property
    def consumed_keys(self) -> frozenset[str]:
        """The keys of signals that a node consumes, so that later ones have to queue."""
        return frozenset(_consumed(self.flow))

    def handles_failure(self, key: str) -> bool:
        """Return whether the flow continues after a node failed: along an edge, or to its end."""
        on_error = self.nodes[key].on_error
        if on_error == "continue" or self.edges.catches(key, ERROR):
            return True
        return on_error is None and self.rule == DEFAULT and self.edges.catches(key, DEFAULT)

    def executor(self, key: str, own: Exec | None = None) -> Exec:
        """Return the executor of a node, or of a branch or item with an executor of its own."""
        if own is None and (cached := self._executors.get(key)) is not None:
            return cached
        node = self.nodes[key]
        executor = Exec(**{name: getattr(node, name) for name in _OWN})
        for override in (self._execs.get(key), own):
            if override is not None:
                executor = _overridden(executor, override)
        if own is None:
            self._executors[key] = executor
        return executor


def signal_path(key: str, node: Node) -> Path:
    """Return the path of the signal that a node waits for. Only the node sets it, never a parameter of the run."""
    named = (node.params.get("approval_key") if node.kind == "approval" else None) or node.params.get("signal_key")
    return parse(str(named or key))


def approvals(flow: Flow, above: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the signal key of each approval, including subflows."""
    for key, node in flow.nodes.items():
        if node.kind == "approval":
            yield above + key, above + signal_path(key, node).key
        elif node.subflow is not None:
            yield from approvals(node.subflow, f"{above}{key}/")


def _consumed(flow: Flow, above: str = "") -> Iterator[str]:
    for key, node in flow.nodes.items():
        if node.kind in ("approval", "wait_event") and node.params.get("consume"):
            yield (above if node.kind == "approval" else "") + signal_path(key, node).key
        elif node.subflow is not None:
            yield from _consumed(node.subflow, f"{above}{key}/")


def _overridden(base: Exec, override: Exec) -> Exec:
    changes = {name: getattr(override, name) for name in (*_OWN, "prep", "post") if getattr(override, name)}
    return msgspec.structs.replace(base, **changes, params=base.params | override.params)


def branches(graph: Graph, key: str, node: Node, params: Mapping[str, Any]) -> list[Exec]:
    """Return the executors of a parallel node's branches, in order."""
    if node.parallel_execs:
        return [graph.executor(key, entry) for entry in node.parallel_execs]
    named = node.parallel_services or params.get("services") or ()
    services = [service for service in named if isinstance(service, str)] if isinstance(named, (list, tuple)) else []
    return [graph.executor(key, Exec(service=service, func=service)) for service in services]


def of_item(graph: Graph, key: str, node: Node, position: int) -> Exec:
    """Return the executor of a foreach item."""
    for index, entry in enumerate(node.foreach_execs):
        if (index if entry.index is None else entry.index) == position:
            return graph.executor(key, entry)
    return graph.executor(key)


def node_params(node: Node, params: dict[str, Any], names: Collection[str] | None) -> dict[str, Any]:
    """Return the parameters for the tasks of a node. `names` are the parameters of its function, if known.

    A function without a parameter `params` gets only its named parameters. The list of a foreach is left out unless
    named, because each task gets its item.
    """
    if names is not None and "params" not in names:
        return {name: value for name, value in params.items() if name in names}
    path = parse(node.prep.input_key) if node.kind == "foreach" and node.prep.input_key else None
    if path is None or path.root != "params" or not path.parts or (names and path.parts[0] in names):
        return params
    return {name: value for name, value in params.items() if name != path.parts[0] or name in node.params}


# -- the parameters that a run of a flow can use: those that its nodes look up or its functions take

_LOCAL = "local_func"


class _Any(Exception):
    """Some node gets all parameters."""


def parameters(flow: Flow) -> set[str] | None:
    """Return the names of the parameters that a run can use. None if a node gets all, whatever their names."""
    try:
        return {*_of(flow, flow.takes, is_root=True)}
    except _Any:
        return None


def _of(flow: Flow, takes: Mapping[str, tuple[str, ...]], *, is_root: bool) -> Iterator[str]:
    for node in flow.nodes.values():
        yield from _called(node, takes)
        execs = (*node.parallel_execs, *node.foreach_execs, *node.subflow_execs)
        for prep in (node.prep, *(entry.prep for entry in execs)):
            if is_root:  # outside subflows, $input is all parameters
                yield from _looked_up([prep.input_key, *prep.input_map.values()], "input")
        yield from _looked_up(msgspec.to_builtins(msgspec.structs.replace(node, subflow=None)), "params")
        if node.subflow is not None:
            yield from _of(node.subflow, takes, is_root=False)


def _looked_up(value: Any, root: str) -> Iterator[str]:
    """Yield the first part of every path with this root."""
    if isinstance(value, str) and value.startswith(f"${root}"):
        try:
            path = parse(value)
        except ExpressionError:  # an ordinary text
            return
        if path.root != root:
            return
        if not path.parts:
            raise _Any
        yield str(path.parts[0])
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _looked_up(item, root)


def _called(node: Node, takes: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield the parameters of the functions that a node calls."""
    execs = [*node.parallel_execs, *node.foreach_execs, *node.subflow_execs]
    execs += [Exec(func=name) for name in node.parallel_services]
    if node.kind == "executor" or (node.kind == "foreach" and not node.foreach_execs):
        execs.append(Exec(func=node.func, service=node.service))
    if node.kind == "parallel" and not execs:
        raise _Any  # its services are a parameter
    for call in execs:
        names = takes.get(call.func or call.service) if (call.exec_type or node.exec_type) == _LOCAL else None
        if names is None or "params" in names:
            raise _Any
        yield from names
