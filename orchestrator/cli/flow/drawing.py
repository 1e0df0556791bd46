"""Draws a flow graph as lines of text in traversal order, with the current node of a run."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from rich.text import Text

from orchestrator.domain.flow.definition import DEFAULT, Flow, Node
from orchestrator.terminal_safe import one_line

_MAX_LINES = 500


def draw(flow: Flow, cursor: str = "", visited: Collection[str] = ()) -> Text:
    """Return the graph as text. `cursor` is the path of the current node, `visited` the paths of earlier nodes."""
    lines = [*_lines(flow, cursor, frozenset(visited), "", 0)]
    if len(lines) > _MAX_LINES:
        lines = [*lines[:_MAX_LINES], Text(f"… and {len(lines) - _MAX_LINES:,} lines more")]
    return Text("\n").join(lines)


def _lines(flow: Flow, cursor: str, visited: frozenset[str], parent: str, depth: int) -> Iterator[Text]:
    for key in _walk(flow):
        node = flow.nodes[key]
        path = parent + key
        is_here = cursor == path or cursor.startswith(f"{path}/")
        symbol = "▶" if is_here else "✓" if path in visited else "·"
        style = "bold yellow" if is_here else "green" if path in visited else ""
        yield Text("  " * depth).append(f"{symbol} {one_line(key)}", style).append(f"  {_description(node)}", "dim")
        for edge in flow.edges:
            if edge.source == key:
                arrow = "─" if edge.action == DEFAULT else f"─ {one_line(edge.action)} ─"
                yield Text("  " * depth + "    ").append(f"└{arrow}▶ {one_line(edge.to) or 'end'}", "dim")
        if node.subflow is not None:
            yield from _lines(node.subflow, cursor, visited, f"{path}/", depth + 2)


def _walk(flow: Flow) -> Iterator[str]:
    """Yield each node once, depth first from the start; unreachable nodes come last."""
    targets: dict[str, list[str]] = {}
    for edge in flow.edges:
        targets.setdefault(edge.source, []).append(edge.to)
    seen: set[str] = set()
    stack = [flow.start]
    while stack:
        key = stack.pop()
        if key in flow.nodes and key not in seen:
            seen.add(key)
            yield key
            stack += reversed(targets.get(key, []))
    yield from (key for key in flow.nodes if key not in seen)


def _description(node: Node) -> str:
    runs = node.func or node.service or (node.script.cmd if node.script else "")
    if node.kind == "parallel":
        runs = ", ".join(node.parallel_services or [one.func or one.service for one in node.parallel_execs])
    if node.kind == "subflow" and node.subflow is not None and node.subflow.flow:
        runs = f"{node.subflow.flow}@{node.subflow.version}"
    waits = node.params.get("signal_key") or node.params.get("approval_key") or node.params.get("delay_ms") or ""
    detail = one_line(str(runs or waits or ""))
    return f"{node.kind} {detail}".rstrip()
