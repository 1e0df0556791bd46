"""A flow graph as lines of text, in the order in which it is walked, with the cursor of a run on it."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from rich.text import Text

from orchestrator.domain.flow.definition import DEFAULT, Flow, Node
from orchestrator.terminal_safe import one_line

_MOST_LINES = 500


def draw(flow: Flow, cursor: str = "", visited: Collection[str] = ()) -> Text:
    """Return the graph; `cursor` is where a run stands, `visited` where it has been."""
    lines = [*_lines(flow, cursor, frozenset(visited), "", 0)]
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], Text(f"… and {len(lines) - _MOST_LINES:,} lines more")]
    return Text("\n").join(lines)


def _lines(flow: Flow, cursor: str, visited: frozenset[str], above: str, depth: int) -> Iterator[Text]:
    for key in _walk(flow):
        node = flow.nodes[key]
        path = above + key
        is_here = cursor == path or cursor.startswith(f"{path}/")
        mark = "▶" if is_here else "✓" if path in visited else "·"
        style = "bold yellow" if is_here else "green" if path in visited else ""
        yield Text("  " * depth).append(f"{mark} {one_line(key)}", style).append(f"  {_what(node)}", "dim")
        for edge in flow.edges:
            if edge.source == key:
                way = "─" if edge.action == DEFAULT else f"─ {one_line(edge.action)} ─"
                yield Text("  " * depth + "    ").append(f"└{way}▶ {one_line(edge.to) or 'end'}", "dim")
        if node.subflow is not None:
            yield from _lines(node.subflow, cursor, visited, f"{path}/", depth + 2)


def _walk(flow: Flow) -> Iterator[str]:
    """Yield the nodes from the start on, each once; what cannot be reached comes last."""
    ways: dict[str, list[str]] = {}
    for edge in flow.edges:
        ways.setdefault(edge.source, []).append(edge.to)
    seen: set[str] = set()
    waiting = [flow.start]
    while waiting:
        key = waiting.pop()
        if key in flow.nodes and key not in seen:
            seen.add(key)
            yield key
            waiting += reversed(ways.get(key, []))
    yield from (key for key in flow.nodes if key not in seen)


def _what(node: Node) -> str:
    runs = node.func or node.service or (node.script.cmd if node.script else "")
    if node.kind == "parallel":
        runs = ", ".join(node.parallel_services or [one.func or one.service for one in node.parallel_execs])
    if node.kind == "subflow" and node.subflow is not None and node.subflow.flow:
        runs = f"{node.subflow.flow}@{node.subflow.version}"
    waits = node.params.get("signal_key") or node.params.get("approval_key") or node.params.get("delay_ms") or ""
    detail = one_line(str(runs or waits or ""))
    return f"{node.kind} {detail}".rstrip()
