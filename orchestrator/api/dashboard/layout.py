"""The layout of a graph of steps: layers from left to right, with few crossing edges. Many layers wrap into rows."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from orchestrator.store.insights import StepView

WIDTH, HEIGHT = 172, 52
PANE_SIZE = (1158.0, 600.0)
"""The size of the pane in a window of 1440 by 900."""
_READABLE = 0.85
"""The smallest scale at which names can be read (11 pixels). A larger graph is not scaled down to fit."""
_LAYER_GAP, _SLOT_GAP, _MARGIN = 48, 14, 8
_GUTTER, _SIDE_MARGIN = 36, 24
"""The space between two rows of layers, and beside them, for the edges between rows."""
_EXIT, _RADIUS = 8, 8
"""The distance from a row at which an edge turns to the next row, and the radius of the turn."""
_TITLE, _PADDING, _CELL = 28, 10, 10
"""The title, padding and gap of a frame."""
_MAX_COLUMNS = 6
_MAX_NAME_LENGTH = 18
_SORT_PASSES = 6
_BEND = 12
"""The height of an edge that passes a layer."""
_COUNT = re.compile(r" \([0-9]+\)$")
_Slot = str | tuple[str, str, int]
"""A slot of a layer: a step, a frame, or an edge that passes the layer."""


@dataclass(frozen=True)
class Node:
    """A step and its position."""

    step: StepView
    x: float
    y: float
    is_critical: bool

    @property
    def label(self) -> str:
        """The name, shortened to the width of a node."""
        name = _COUNT.sub("", self.step.name) if self.step.kind == "group" else self.step.name
        half = _MAX_NAME_LENGTH // 2
        return name if len(name) <= _MAX_NAME_LENGTH else f"{name[: half - 1]}…{name[-half:]}"

    @property
    def seconds(self) -> float | None:
        if self.step.started_at is None or self.step.ended_at is None:
            return None
        return (self.step.ended_at - self.step.started_at).total_seconds()


@dataclass(frozen=True)
class Edge:
    """An edge from a step to a step that depends on it."""

    path: str
    is_critical: bool
    is_done: bool
    upper: str = ""
    lower: str = ""
    label: str = ""
    at: tuple[float, float] = (0.0, 0.0)
    """The position of the label: the middle of the first segment."""


@dataclass(frozen=True)
class Frame:
    """The frame around the steps of an expanded group."""

    name: str
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Graph:
    nodes: list[Node]
    edges: list[Edge]
    width: float
    height: float
    frames: list[Frame] = field(default_factory=list)
    inset: float = 0.0
    """The space at the left for edges that come in from there."""


@dataclass(frozen=True)
class _Box:
    """The position of a step, a frame or a bend of an edge."""

    x: float
    y: float
    width: float
    height: float
    right: float
    """The right end of its layer."""
    top: float
    """The top of its row of layers."""

    @property
    def middle(self) -> float:
        """The y position of edges; of a frame, that of its title."""
        return self.y + min(self.height, HEIGHT) / 2


def draw(
    steps: Sequence[StepView],
    critical: frozenset[str],
    frames: Mapping[str, Sequence[str]] | None = None,
    between: int = _LAYER_GAP,
    pane: tuple[float, float] | None = PANE_SIZE,
) -> Graph:
    """Return the positions of all steps, and the edges between them.

    A long edge has a slot in each layer that it passes.

    The steps of a frame stand in rows within it, and their edges to the same step are drawn as one. Without `pane`,
    layers do not wrap.
    """
    framed = {name: frame for frame, inside in (frames or {}).items() for name in inside}
    pairs: dict[tuple[str, str], list[tuple[StepView, StepView]]] = {}
    by_name = {step.name: step for step in steps}
    dependencies: dict[str, list[str]] = {}
    for step in steps:
        lower = framed.get(step.name, step.name)
        uppers = dependencies.setdefault(lower, [])
        for dependency in (by_name[name] for name in step.depends_on if name in by_name):
            upper = framed.get(dependency.name, dependency.name)
            if upper != lower:
                pairs.setdefault((upper, lower), []).append((dependency, step))
                uppers.append(upper)
    layers = layers_of(dependencies)
    depths: dict[_Slot, int] = {name: depth for depth, layer in enumerate(layers) for name in layer}
    columns: list[list[_Slot]] = [[*layer] for layer in layers]
    above: dict[_Slot, list[_Slot]] = {name: [] for name in depths}
    bends: dict[tuple[str, str], list[_Slot]] = {}
    for upper, lower in pairs:
        passed_layers = range(depths[upper] + 1, depths[lower])
        passed: list[_Slot] = [(upper, lower, depth) for depth in passed_layers]
        bends[upper, lower] = passed
        for depth, bend in zip(passed_layers, passed, strict=True):
            columns[depth].append(bend)
        for start, end in pairwise((upper, *passed, lower)):
            above.setdefault(end, []).append(start)
    sizes: dict[_Slot, tuple[float, float]] = {name: _size(len(inside)) for name, inside in (frames or {}).items()}
    boxes = _place_slots(_sort_layers(columns, above), sizes, between, pane)
    edges: dict[str, Edge] = {}
    for (upper, lower), found in pairs.items():
        is_critical = any(dependency.name in critical and dependent.name in critical for dependency, dependent in found)
        is_done = all(dependency.state == "success" for dependency, _ in found)
        at = _label_position(boxes[upper], boxes[(*bends[upper, lower], lower)[0]])
        for path in _edge_paths([boxes[slot] for slot in (upper, *bends[upper, lower], lower)]):
            existing = edges.get(path)
            both = (
                (is_critical, is_done)
                if existing is None
                else (is_critical or existing.is_critical, is_done and existing.is_done)
            )
            edges[path] = Edge(path, *both, upper, lower, at=at)
    cells = {
        name: (boxes[frame].x + x, boxes[frame].y + y)
        for frame, inside in (frames or {}).items()
        for name, (x, y) in zip(inside, _cells(len(inside)), strict=True)
    }
    nodes = [Node(step, *_at(cells, boxes, step.name), step.name in critical) for step in steps]
    margin = _MARGIN if len({box.top for box in boxes.values()}) <= 1 else _SIDE_MARGIN
    return Graph(
        nodes,
        [*edges.values()],
        max((box.x + box.width for box in boxes.values()), default=0.0) + margin,
        max((box.y + box.height for box in boxes.values()), default=0.0) + _MARGIN,
        [Frame(name, box.x, box.y, box.width, box.height) for name in frames or () for box in (boxes[name],)],
    )


def _at(cells: Mapping[str, tuple[float, float]], boxes: Mapping[_Slot, _Box], name: str) -> tuple[float, float]:
    return cells[name] if name in cells else (boxes[name].x, boxes[name].y)


def _label_position(start: _Box, end: _Box) -> tuple[float, float]:
    return (start.x + start.width + end.x) / 2, (start.middle + end.middle) / 2


def _columns_of(count: int) -> int:
    return min(_MAX_COLUMNS, max(1, round(0.7 * math.sqrt(count))))


def _cells(count: int) -> list[tuple[float, float]]:
    """Return the positions of the steps in a frame."""
    columns = _columns_of(count)
    return [
        (_PADDING + (WIDTH + _CELL) * (index % columns), _TITLE + (HEIGHT + _CELL) * (index // columns))
        for index in range(count)
    ]


def _size(count: int) -> tuple[float, float]:
    """Return the size of a frame around a number of steps."""
    x, y = max(x for x, _ in _cells(count)), max(y for _, y in _cells(count))
    return x + WIDTH + _PADDING, y + HEIGHT + _PADDING


def _place_slots(
    columns: Sequence[Sequence[_Slot]],
    sizes: Mapping[_Slot, tuple[float, float]],
    between: int,
    pane: tuple[float, float] | None,
) -> dict[_Slot, _Box]:
    """Return the boxes of all slots, centered vertically in one or several rows of layers."""
    widths = [max(sizes.get(slot, (WIDTH, 0))[0] for slot in column) for column in columns]
    heights = [sum(_height(slot, sizes) for slot in column) + _SLOT_GAP * (len(column) - 1) for column in columns]
    rows = _wrap_layers(widths, heights, between, pane)
    boxes: dict[_Slot, _Box] = {}
    top = float(_MARGIN)
    for row in rows:
        x = float(_MARGIN if len(rows) == 1 else _SIDE_MARGIN)
        tallest = max(heights[depth] for depth in row)
        for depth in row:
            y = top + (tallest - heights[depth]) / 2
            for slot in columns[depth]:
                height, right = _height(slot, sizes), x + widths[depth]
                width = sizes.get(slot, (WIDTH, 0))[0] if isinstance(slot, str) else widths[depth]
                boxes[slot] = _Box(x, y, width, height, right, top)
                y += height + _SLOT_GAP
            x += widths[depth] + between
        top += tallest + _GUTTER
    return boxes


def _wrap_layers(
    widths: Sequence[float], heights: Sequence[float], between: int, pane: tuple[float, float] | None
) -> list[range]:
    """Return the rows of layers: one, or several if these can be read as a whole, or are low."""
    single_row = [range(len(widths))]
    if pane is None or not widths or _scale(single_row, widths, heights, between, pane) >= _READABLE:
        return single_row
    rows = single_row
    for scale in (1.0, 0.92, _READABLE):
        rows, start, used = [], 0, 0.0
        for depth, width in enumerate(widths):
            if depth > start and used + width > pane[0] / scale - 2 * _SIDE_MARGIN:
                rows.append(range(start, depth))
                start, used = depth, 0.0
            used += width + between
        rows.append(range(start, len(widths)))
        if _scale(rows, widths, heights, between, pane) >= scale:
            return rows
    return rows if max(heights) < pane[1] / 2 or max(widths) > WIDTH else single_row


def _scale(
    rows: Sequence[range], widths: Sequence[float], heights: Sequence[float], between: int, pane: tuple[float, float]
) -> float:
    """Return the scale at which all rows fit into the pane."""
    margin = _MARGIN if len(rows) == 1 else _SIDE_MARGIN
    width = max(sum(widths[depth] + between for depth in row) for row in rows) - between + 2 * margin
    height = sum(max(heights[depth] for depth in row) + _GUTTER for row in rows) - _GUTTER + 2 * _MARGIN
    return min(pane[0] / width, pane[1] / height)


def _height(slot: _Slot, sizes: Mapping[_Slot, tuple[float, float]]) -> float:
    return sizes.get(slot, (WIDTH, HEIGHT))[1] if isinstance(slot, str) else _BEND


def layers_of(above: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Return steps by the length of the longest path to them. Definitions have no cycles."""
    depths: dict[str, int] = {}
    for step in above:
        waiting = [step]
        while waiting:
            name = waiting[-1]
            missing = [dependency for dependency in above[name] if dependency in above and dependency not in depths]
            if missing:
                waiting += missing
                continue
            depths[name] = 1 + max(
                (depths[dependency] for dependency in above[name] if dependency in depths), default=-1
            )
            waiting.pop()
    found: list[list[str]] = [[] for _ in range(max(depths.values(), default=-1) + 1)]
    for step in above:
        found[depths[step]].append(step)
    return found


def _sort_layers(columns: list[list[_Slot]], above: Mapping[_Slot, Sequence[_Slot]]) -> list[list[_Slot]]:
    """Return the layers, each sorted by the average position of the neighbors."""
    below: dict[_Slot, list[_Slot]] = {}
    for slot, uppers in above.items():
        for upper in uppers:
            below.setdefault(upper, []).append(slot)
    for sweep in range(_SORT_PASSES):
        neighbors: Mapping[_Slot, Sequence[_Slot]] = above if sweep % 2 == 0 else below
        rows = {slot: row / len(column) for column in columns for row, slot in enumerate(column)}
        for column in columns if sweep % 2 == 0 else reversed(columns):
            averages = {slot: _average(slot, neighbors, rows) for slot in column}
            column.sort(key=averages.__getitem__)
            rows.update((slot, row / len(column)) for row, slot in enumerate(column))
    return columns


def _average(slot: _Slot, neighbors: Mapping[_Slot, Sequence[_Slot]], rows: Mapping[_Slot, float]) -> float:
    positions = [rows[neighbor] for neighbor in neighbors.get(slot, ())]
    return sum(positions) / len(positions) if positions else rows[slot]


def _edge_paths(stops: Sequence[_Box]) -> list[str]:
    """Return the SVG paths of an edge, which leaves a step at the right, passes other steps, and arrives at the left.

    An edge to another row has parts that it shares with other edges. These are drawn once.
    """
    parts = [f"M{stops[0].x + stops[0].width:g},{stops[0].middle:g}"]
    for start, end in pairwise(stops):
        x, y, left, top = start.right, start.middle, end.x, end.middle
        if start.top == end.top:
            half = (left - x) / 2
            straight = f" H{x:g}" if x > start.x + start.width else ""
            parts[-1] += f"{straight} C{x + half:g},{y:g} {left - half:g},{top:g} {left:g},{top:g}"
        else:
            right, outside, gutter, turn = x + _EXIT, left - _EXIT, end.top - _GUTTER / 2, _RADIUS
            parts[-1] += f" H{right:g} q{turn},0 {turn},{turn} V{gutter - turn:g}"
            parts += [
                f"M{right + turn:g},{gutter - turn:g} q0,{turn} -{turn},{turn} H{outside:g} q-{turn},0 -{turn},{turn}",
                f"M{outside - turn:g},{gutter + turn:g} V{top - turn:g} q0,{turn} {turn},{turn} H{left:g}",
            ]
        if end is not stops[-1]:
            parts[-1] += f" H{end.x + end.width:g}"
    return parts
