"""What a definition means here and would not mean to the flow schedulers that the format comes from."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.domain.flow.definition import ERROR, TIMEOUT, Flow, Node
from orchestrator.domain.flow.rules import left_to_rule

_NODE_KEYS = ("description", "options", "timeout_ms", "queue", "priority", "on_error")
_FLOW_KEYS = ("max_steps", "schedule")
_MOST_NAMED = 5
_THERE = "the flow schedulers that this format comes from"


def differences(flow: Flow) -> list[str]:
    """Return how a run differs that another flow scheduler makes of the same definition."""
    failing, edges, keys = list[str](), list[str](), set[str]()
    for path, inner in _flows(flow):
        failing += [path + key for key in left_to_rule(inner)]
        edges += [path + edge.source for edge in inner.edges if edge.action in (ERROR, TIMEOUT)]
        keys.update(name for name in _FLOW_KEYS if getattr(inner, name))
        for node in inner.nodes.values():
            keys.update(_own_keys(node))
    found = []
    if failing:
        found.append(
            f"if {_named(failing)} fails, the run fails; {_THERE} take the default edge. Give it an error edge, or say "
            f"`on_error: fail` or `on_error: continue`."
        )
    if edges:
        found.append(f"{_named(edges)} has an error or timeout edge, which {_THERE} do not take.")
    if keys:
        found.append(f"{', '.join(sorted(keys))}: {_THERE} do not know that.")
    return found


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
    first = " or ".join(repr(path) for path in paths[:_MOST_NAMED])
    more = len(paths) - _MOST_NAMED
    return f"node {first}" + (f" or one of {more:,} more" if more > 0 else "")
