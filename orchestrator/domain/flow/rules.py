"""The rule for failed nodes. Each version of a flow has one, and a subflow keeps the rule of its own version."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from msgspec.structs import replace

from orchestrator.domain.flow.definition import DEFAULT, ERROR, TIMEOUT, Edge, Flow, Node, Rule


def left_to_rule(flow: Flow) -> dict[str, str]:
    """Return the nodes whose failures are handled by the rule alone, with the targets of their `default` edges."""
    targets = {edge.source: edge.to for edge in flow.edges if (edge.action or DEFAULT) == DEFAULT}
    caught = {edge.source for edge in flow.edges if edge.action == ERROR}
    nodes = flow.nodes
    return {key: to for key, to in targets.items() if key not in caught and key in nodes and not nodes[key].on_error}


def named_versions(flow: Flow) -> set[tuple[str, int]]:
    """Return the flow versions used directly as subflows."""
    versions: set[tuple[str, int]] = set()
    for node in flow.nodes.values():
        inner = node.subflow
        if inner is not None:
            versions |= {(inner.flow, inner.version)} if inner.flow else named_versions(inner)
    return versions


def with_rules(flow: Flow, rules: Mapping[tuple[str, int], Rule], rule: Rule) -> Flow:
    """Return a flow whose copied subflows behave under `rule` as they did under the rules of their own versions."""

    def change(inner: Flow) -> Flow:
        if not inner.flow:
            return with_rules(inner, rules, rule)
        return _under(inner, rules.get((inner.flow, inner.version), rule), rule)

    return _with_subflows(flow, change)


def _under(flow: Flow, old_rule: Rule, rule: Rule) -> Flow:
    """Return a flow that states at each node what its own rule implied."""
    if old_rule == rule:
        return flow
    flow = _with_subflows(flow, lambda inner: _under(inner, old_rule, rule))
    open_nodes = left_to_rule(flow)
    if old_rule == DEFAULT:
        more = [Edge(source=key, action=ERROR, to=to) for key, to in open_nodes.items()]
        return replace(flow, edges=(*flow.edges, *more))
    nodes = {key: replace(node, on_error="fail") if key in open_nodes else node for key, node in flow.nodes.items()}
    return replace(flow, nodes=nodes)


def _with_subflows(flow: Flow, change: Callable[[Flow], Flow]) -> Flow:
    def changed(node: Node) -> Node:
        return node if node.subflow is None else replace(node, subflow=change(node.subflow))

    return replace(flow, nodes={key: changed(node) for key, node in flow.nodes.items()})


# -- differences from the flow schedulers that the format comes from


_NODE_KEYS = ("description", "options", "timeout_ms", "queue", "priority", "on_error")
_FLOW_KEYS = ("max_steps", "schedule")
_MAX_NAMED = 5
_THERE = "the flow schedulers that this format comes from"


def differences(flow: Flow) -> list[str]:
    """Return where a run differs from runs of the same definition in other flow schedulers."""
    failing, edges, keys = list[str](), list[str](), set[str]()
    for path, inner in _flows(flow):
        failing += [path + key for key in left_to_rule(inner)]
        edges += [path + edge.source for edge in inner.edges if edge.action in (ERROR, TIMEOUT)]
        keys.update(name for name in _FLOW_KEYS if getattr(inner, name))
        for node in inner.nodes.values():
            keys.update(_own_keys(node))
    messages = []
    if failing:
        messages.append(
            f"if {_named(failing)} fails, the run fails; {_THERE} take the default edge. Give it an error edge, or say "
            f"`on_error: fail` or `on_error: continue`."
        )
    if edges:
        messages.append(f"{_named(edges)} has an error or timeout edge, which {_THERE} do not take.")
    if keys:
        messages.append(f"{', '.join(sorted(keys))}: {_THERE} do not know that.")
    return messages


def _flows(flow: Flow, path: str = "") -> Iterator[tuple[str, Flow]]:
    yield path, flow
    for key, node in flow.nodes.items():
        if node.subflow is not None:
            yield from _flows(node.subflow, f"{path}{key}/")


def _own_keys(node: Node) -> Iterator[str]:
    yield from (name for name in _NODE_KEYS if getattr(node, name))
    if node.params.get("consume") and node.kind in ("wait_event", "approval"):
        yield "params.consume"
    if node.subflow is not None and node.subflow.flow:
        yield "subflow.flow"


def _named(paths: list[str]) -> str:
    first = " or ".join(repr(path) for path in paths[:_MAX_NAMED])
    more = len(paths) - _MAX_NAMED
    return f"node {first}" + (f" or one of {more:,} more" if more > 0 else "")
