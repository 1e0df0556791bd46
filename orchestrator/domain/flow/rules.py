"""What follows a failed node: each version of a flow has one rule, and a flow that stands in another keeps its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from orchestrator.domain.flow.definition import DEFAULT, ERROR, Edge, Flow, Node, Rule


def left_to_rule(flow: Flow) -> dict[str, str]:
    """Return the nodes of which only the rule says what follows a failure, and where their `default` edges lead."""
    targets = {edge.source: edge.to for edge in flow.edges if (edge.action or DEFAULT) == DEFAULT}
    caught = {edge.source for edge in flow.edges if edge.action == ERROR}
    nodes = flow.nodes
    return {key: to for key, to in targets.items() if key not in caught and key in nodes and not nodes[key].on_error}


def named_versions(flow: Flow) -> set[tuple[str, int]]:
    """Return the versions of other flows that stand in a flow; not those that stand in these."""
    found: set[tuple[str, int]] = set()
    for node in flow.nodes.values():
        inner = node.subflow
        if inner is not None:
            found |= {(inner.flow, inner.version)} if inner.flow else named_versions(inner)
    return found


def with_rules(flow: Flow, taken: Mapping[tuple[str, int], Rule], rule: Rule) -> Flow:
    """Return a flow in which those that were taken over do under `rule` what their versions do under their own."""

    def change(inner: Flow) -> Flow:
        if not inner.flow:
            return with_rules(inner, taken, rule)
        return _under(inner, taken.get((inner.flow, inner.version), rule), rule)

    return _with_subflows(flow, change)


def _under(flow: Flow, own: Rule, rule: Rule) -> Flow:
    """Return a flow that says at each node what its own rule has left open."""
    if own == rule:
        return flow
    flow = _with_subflows(flow, lambda inner: _under(inner, own, rule))
    left = left_to_rule(flow)
    if own == DEFAULT:
        more = [Edge(source=key, action=ERROR, to=to) for key, to in left.items()]
        return replace(flow, edges=(*flow.edges, *more))
    nodes = {key: replace(node, on_error="fail") if key in left else node for key, node in flow.nodes.items()}
    return replace(flow, nodes=nodes)


def _with_subflows(flow: Flow, change: Callable[[Flow], Flow]) -> Flow:
    def changed(node: Node) -> Node:
        return node if node.subflow is None else replace(node, subflow=change(node.subflow))

    return replace(flow, nodes={key: changed(node) for key, node in flow.nodes.items()})
