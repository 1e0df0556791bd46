"""A flow worked out once for all its runs: who runs what, and where actions lead."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec

from orchestrator.domain.flow.definition import Edges, Exec, Flow, Node
from orchestrator.domain.flow.paths import Path, parse

_OWN = ("service", "exec_type", "func", "script", "options")


class Graph:
    """A flow, with those that stand in its nodes."""

    def __init__(self, flow: Flow, execs: Mapping[str, Exec] | None = None) -> None:
        self.flow = flow
        self.nodes = flow.nodes
        self.edges = Edges(flow)
        self._execs = execs or {}
        """By node, who runs it instead of whom it names."""
        self._known: dict[str, Exec] = {}
        """By node, who runs it."""
        self.inner = {
            key: Graph(node.subflow, {one.node: one for one in node.subflow_execs})
            for key, node in flow.nodes.items()
            if node.subflow is not None
        }
        waits = {key: node for key, node in flow.nodes.items() if node.kind in ("approval", "wait_event")}
        self.asked = {signal_path(key, node).key for key, node in waits.items() if node.kind == "approval"}
        """What its approvals are called, and behind the keys of their nodes, those of the flows in it."""
        self.asked_below = {f"{key}/{name}" for key, graph in self.inner.items() for name in graph.asked}
        self.asked |= self.asked_below
        self.consumed = {signal_path(key, node).key for key, node in waits.items() if node.params.get("consume")}
        """Signals that somebody takes away, so that one waits for the other."""
        for key, graph in self.inner.items():
            self.consumed |= {f"{key}/{name}" if name in graph.asked else name for name in graph.consumed}

    @property
    def size(self) -> int:
        """Return how many nodes it has, with those of the flows in it."""
        return len(self.nodes) + sum(graph.size for graph in self.inner.values())

    def executor(self, key: str, own: Exec | None = None) -> Exec:
        """Return who runs a node, or a branch or item of it that says so itself."""
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


def _overridden(found: Exec, more: Exec) -> Exec:
    given = {name: getattr(more, name) for name in (*_OWN, "prep", "post") if getattr(more, name)}
    return msgspec.structs.replace(found, **given, params=found.params | more.params)


def branches(graph: Graph, key: str, node: Node, params: Mapping[str, Any]) -> list[Exec]:
    """Return who runs the branches of a parallel node, in order."""
    if node.parallel_execs:
        return [graph.executor(key, one) for one in node.parallel_execs]
    named = node.parallel_services or params.get("services") or ()
    services = [one for one in named if isinstance(one, str)] if isinstance(named, (list, tuple)) else []
    return [graph.executor(key, Exec(service=one, func=one)) for one in services]


def of_item(graph: Graph, key: str, node: Node, position: int) -> Exec:
    """Return who runs an item of a foreach."""
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
