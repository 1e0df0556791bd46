"""A flow prepared once for all its runs: the executors of nodes, and where actions lead."""

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
    """A flow, with those that stand in its nodes. Each of them is worked out when a run first comes to it."""

    def __init__(self, flow: Flow, rule: Rule, execs: Mapping[str, Exec] | None = None) -> None:
        self.flow = flow
        self.rule = rule
        self.nodes = flow.nodes
        self._execs = execs or {}
        """By node, the executor that replaces its own."""
        self._known: dict[str, Exec] = {}
        """By node, its executor."""
        self._inner: dict[str, Graph] = {}

    @cached_property
    def edges(self) -> Edges:
        """Return where the actions of its nodes lead."""
        return Edges(self.flow)

    def inner(self, key: str) -> Graph:
        """Return the flow that stands in a node."""
        found = self._inner.get(key)
        if found is None:
            node = self.nodes[key]
            assert node.subflow is not None, f"node {key!r} is no subflow"
            found = Graph(node.subflow, self.rule, {one.node: one for one in node.subflow_execs})
            self._inner[key] = found
        return found

    @cached_property
    def asked(self) -> frozenset[str]:
        """Return what its approvals are called, and behind the keys of their nodes, those of the flows in it."""
        return frozenset(address for _, address in approvals(self.flow))

    @cached_property
    def asked_below(self) -> frozenset[str]:
        """Return those of the flows in it."""
        return frozenset(address for node, address in approvals(self.flow) if "/" in node)

    @cached_property
    def consumed(self) -> frozenset[str]:
        """Return the signals that a node consumes, so that one waits for the other."""
        return frozenset(_consumed(self.flow))

    def goes_on(self, key: str) -> bool:
        """Say whether the flow goes on after a node has failed, along an edge or to its end."""
        said = self.nodes[key].on_error
        if said == "continue" or self.edges.catches(key, ERROR):
            return True
        return said is None and self.rule == DEFAULT and self.edges.catches(key, DEFAULT)

    def executor(self, key: str, own: Exec | None = None) -> Exec:
        """Return the executor of a node, or of a branch or item that has its own."""
        if own is None and (known := self._known.get(key)) is not None:
            return known
        node = self.nodes[key]
        found = Exec(**{name: getattr(node, name) for name in _OWN})
        for more in (self._execs.get(key), own):
            if more is not None:
                found = _overridden(found, more)
        if own is None:
            self._known[key] = found
        return found


def signal_path(key: str, node: Node) -> Path:
    """Return where a node looks for the signal that it waits for: it says so itself, and no parameter of a run does."""
    named = (node.params.get("approval_key") if node.kind == "approval" else None) or node.params.get("signal_key")
    return parse(str(named or key))


def approvals(flow: Flow, above: str = "") -> Iterator[tuple[str, str]]:
    """Yield the approvals of a flow and of those in it: where each stands, and what the signal for it is called."""
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


def _overridden(found: Exec, more: Exec) -> Exec:
    given = {name: getattr(more, name) for name in (*_OWN, "prep", "post") if getattr(more, name)}
    return msgspec.structs.replace(found, **given, params=found.params | more.params)


def branches(graph: Graph, key: str, node: Node, params: Mapping[str, Any]) -> list[Exec]:
    """Return the executors of the branches of a parallel node, in order."""
    if node.parallel_execs:
        return [graph.executor(key, one) for one in node.parallel_execs]
    named = node.parallel_services or params.get("services") or ()
    services = [one for one in named if isinstance(one, str)] if isinstance(named, (list, tuple)) else []
    return [graph.executor(key, Exec(service=one, func=one)) for one in services]


def of_item(graph: Graph, key: str, node: Node, position: int) -> Exec:
    """Return the executor of an item of a foreach."""
    for place, one in enumerate(node.foreach_execs):
        if (place if one.index is None else one.index) == position:
            return graph.executor(key, one)
    return graph.executor(key)


def passed_on(node: Node, params: dict[str, Any], names: Collection[str] | None) -> dict[str, Any]:
    """Return the parameters that the tasks of a node are given; `names` are those that a function takes, if known.

    A function that does not take `params` is given what it names. Each item of a list is given, and the list of all is
    not, unless it is named.
    """
    if names is not None and "params" not in names:
        return {name: value for name, value in params.items() if name in names}
    path = parse(node.prep.input_key) if node.kind == "foreach" and node.prep.input_key else None
    if path is None or path.root != "params" or not path.parts or (names and path.parts[0] in names):
        return params
    return {name: value for name, value in params.items() if name != path.parts[0] or name in node.params}


# -- which parameters a run of a flow can make use of: those that its nodes look up, and those that its functions take

_LOCAL = "local_func"


class _Any(Exception):
    """Something is given all parameters."""


def parameters(flow: Flow) -> set[str] | None:
    """Return the names of the parameters that a run can use; None if a node is given all, whatever they are called."""
    try:
        return {*_of(flow, flow.takes, is_root=True)}
    except _Any:
        return None


def _of(flow: Flow, takes: Mapping[str, tuple[str, ...]], *, is_root: bool) -> Iterator[str]:
    for node in flow.nodes.values():
        yield from _called(node, takes)
        execs = (*node.parallel_execs, *node.foreach_execs, *node.subflow_execs)
        for prep in (node.prep, *(one.prep for one in execs)):
            if is_root:  # where $input is all parameters
                yield from _looked_up([prep.input_key, *prep.input_map.values()], "input")
        yield from _looked_up(msgspec.to_builtins(msgspec.structs.replace(node, subflow=None)), "params")
        if node.subflow is not None:
            yield from _of(node.subflow, takes, is_root=False)


def _looked_up(value: Any, root: str) -> Iterator[str]:
    """Yield the first part of every path from a root."""
    if isinstance(value, str) and value.startswith(f"${root}"):
        try:
            path = parse(value)
        except ExpressionError:  # a text, and no path
            return
        if path.root != root:
            return
        if not path.parts:
            raise _Any
        yield str(path.parts[0])
    elif isinstance(value, (dict, list, tuple)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _looked_up(one, root)


def _called(node: Node, takes: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield what the functions have parameters for that a node runs."""
    execs = [*node.parallel_execs, *node.foreach_execs, *node.subflow_execs]
    execs += [Exec(func=name) for name in node.parallel_services]
    if node.kind == "executor" or (node.kind == "foreach" and not node.foreach_execs):
        execs.append(Exec(func=node.func, service=node.service))
    if node.kind == "parallel" and not execs:
        raise _Any  # its services are a parameter
    for one in execs:
        names = takes.get(one.func or one.service) if (one.exec_type or node.exec_type) == _LOCAL else None
        if names is None or "params" in names:
            raise _Any
        yield from names
