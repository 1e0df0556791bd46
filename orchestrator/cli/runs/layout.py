"""Where the steps of a run stand when they are drawn: one to a line, forks as branches, joins back on the line.

    ✓ discover
    ├─ ● process
    │  ○ check              after process: same column, right below
    ╰─ ✓ shards             beside process
    ○ report                after both branches: back in the column of the fork

A step belongs below its immediate dominator, the last step through which every path to it goes. Steps below the same
one are drawn layer by layer, so a line never stands above one that it waits for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from graphlib import TopologicalSorter

Graph = Mapping[str, Sequence[str]]
"""By step, the steps that it depends on."""
_ROOT = ""


def layers(graph: Graph) -> list[list[str]]:
    """Return the steps by the length of the longest path to them."""
    found: list[list[str]] = []
    for name, depth in _depths(graph).items():
        while len(found) <= depth:
            found.append([])
        found[depth].append(name)
    return found


def gutters(graph: Graph) -> list[tuple[str, str]]:
    """Return the steps in the order in which they are drawn, each with what is drawn in front of it."""
    depths = _depths(graph)
    below: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, dominator in _dominators(graph, depths).items():
        below[dominator][depths[name]].append(name)
    return list(_draw(below, _ROOT, ""))


def _draw(below: Mapping[str, Mapping[int, list[str]]], parent: str, margin: str) -> Iterator[tuple[str, str]]:
    last_drawn = None if parent == _ROOT else margin
    for _, group in sorted(below[parent].items()) if parent in below else ():
        for place, name in enumerate(group):
            is_last = place == len(group) - 1
            if len(group) == 1:
                corner = inner = ""
            elif is_last:
                corner, inner = "╰─ ", "   "
            else:
                corner, inner = "├─ " if place or last_drawn == margin else "╭─ ", "│  "
            yield margin + corner, name
            last_drawn = margin + corner
            for last_drawn, deeper in _draw(below, name, margin + inner):
                yield last_drawn, deeper


def _depths(graph: Graph) -> dict[str, int]:
    """Return the length of the longest path to each step, in an order that respects all dependencies."""
    depths: dict[str, int] = {}
    order = {name: place for place, name in enumerate(graph)}
    for name in TopologicalSorter(graph).static_order():
        depths[name] = 1 + max((depths[parent] for parent in graph[name]), default=-1)
    return dict(sorted(depths.items(), key=lambda item: (item[1], order[item[0]])))


def _dominators(graph: Graph, depths: Mapping[str, int]) -> dict[str, str]:
    """Return the immediate dominator of each step; the root stands above all that depend on nothing."""
    chains: dict[str, tuple[str, ...]] = {}
    found: dict[str, str] = {}
    for name in depths:
        parents = [chains[parent] for parent in graph[name]] or [()]
        shared = 0
        for same in zip(*parents, strict=False):
            if len(set(same)) > 1:
                break
            shared += 1
        chains[name] = (*parents[0][:shared], name)
        found[name] = parents[0][shared - 1] if shared else _ROOT
    return found
