"""A graph of steps: layers from left to right, ordered so that few lines cross. Many layers are wrapped like text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from orchestrator.store.insights import StepView

WIDTH, HEIGHT = 172, 52
"""Of a step."""
ROOM = (1158.0, 600.0)
"""Of the pane in a window of 1440 by 900."""
_READABLE = 0.85
"""The part of its size below which a graph is not drawn so that all of it is seen: names have 11 pixels then."""
_BETWEEN, _ABOVE, _MARGIN = 48, 14, 8
_GUTTER, _AROUND = 36, 24
"""Between two rows of layers, and beside them: lines lead from one to the next there."""
_TURN, _ROUND = 8, 8
"""How far outside of a row a line leads to the next, and how round it turns."""
_TITLE, _PADDING, _CELL = 28, 10, 10
"""Of a frame."""
_MOST_COLUMNS = 6
_LONGEST_NAME = 18
_SWEEPS = 6
_BEND = 12
"""The height of a line that passes a layer by."""
_COUNT = re.compile(r" \([0-9]+\)$")
_Slot = str | tuple[str, str, int]
"""Of a layer: a step, a frame, or where the line between two of them passes it."""


@dataclass(frozen=True)
class Node:
    """A step and its position."""

    step: StepView
    x: float
    y: float
    is_critical: bool

    @property
    def label(self) -> str:
        """Its name, as far as there is room."""
        name = _COUNT.sub("", self.step.name) if self.step.kind == "group" else self.step.name
        half = _LONGEST_NAME // 2
        return name if len(name) <= _LONGEST_NAME else f"{name[: half - 1]}…{name[-half:]}"

    @property
    def seconds(self) -> float | None:
        """How long it took."""
        if self.step.started_at is None or self.step.ended_at is None:
            return None
        return (self.step.ended_at - self.step.started_at).total_seconds()


@dataclass(frozen=True)
class Edge:
    """A line from a step to one that follows it."""

    path: str
    is_critical: bool
    is_done: bool
    upper: str = ""
    lower: str = ""
    label: str = ""
    """Its label."""
    at: tuple[float, float] = (0.0, 0.0)
    """Where the label stands: in the middle of its first part."""


@dataclass(frozen=True)
class Frame:
    """A group that is opened, around its steps."""

    name: str
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Graph:
    """All of it."""

    nodes: list[Node]
    edges: list[Edge]
    width: float
    height: float
    frames: list[Frame] = field(default_factory=list)
    inset: float = 0.0
    """Room to the left of it, for lines that come in from there."""


@dataclass(frozen=True)
class _Box:
    """Where a step, a frame or a bend of a line stands, and in which row of layers."""

    x: float
    y: float
    width: float
    height: float
    right: float
    """Where its layer ends."""
    top: float
    """Where its row of layers begins."""

    @property
    def middle(self) -> float:
        """Where lines begin and end: at the title of a frame."""
        return self.y + min(self.height, HEIGHT) / 2


def draw(
    steps: Sequence[StepView],
    critical: frozenset[str],
    frames: Mapping[str, Sequence[str]] | None = None,
    between: int = _BETWEEN,
    room: tuple[float, float] | None = ROOM,
) -> Graph:
    """Return where each step stands, and the lines between them; a long line has a slot of its own in each layer.

    The steps of a frame stand in rows within it, and one line leads from all of them to the same other. Without
    `room`, no layers are wrapped.
    """
    framed = {name: frame for frame, inside in (frames or {}).items() for name in inside}
    pairs: dict[tuple[str, str], list[tuple[StepView, StepView]]] = {}
    by_name = {step.name: step for step in steps}
    above_of: dict[str, list[str]] = {}
    for step in steps:
        lower = framed.get(step.name, step.name)
        uppers = above_of.setdefault(lower, [])
        for one in (by_name[name] for name in step.depends_on if name in by_name):
            upper = framed.get(one.name, one.name)
            if upper != lower:
                pairs.setdefault((upper, lower), []).append((one, step))
                uppers.append(upper)
    layers = layers_of(above_of)
    depths: dict[_Slot, int] = {name: depth for depth, layer in enumerate(layers) for name in layer}
    columns: list[list[_Slot]] = [[*layer] for layer in layers]
    above: dict[_Slot, list[_Slot]] = {name: [] for name in depths}
    bends: dict[tuple[str, str], list[_Slot]] = {}
    for upper, lower in pairs:
        between_them = range(depths[upper] + 1, depths[lower])
        passed: list[_Slot] = [(upper, lower, depth) for depth in between_them]
        bends[upper, lower] = passed
        for depth, bend in zip(between_them, passed, strict=True):
            columns[depth].append(bend)
        for start, end in pairwise((upper, *passed, lower)):
            above.setdefault(end, []).append(start)
    sizes: dict[_Slot, tuple[float, float]] = {name: _size(len(inside)) for name, inside in (frames or {}).items()}
    places = _placed(_ordered(columns, above), sizes, between, room)
    edges: dict[str, Edge] = {}
    for (upper, lower), found in pairs.items():
        is_critical = any(one.name in critical and other.name in critical for one, other in found)
        is_done = all(one.state == "success" for one, _ in found)
        at = _label_of(places[upper], places[(*bends[upper, lower], lower)[0]])
        for path in _lines([places[slot] for slot in (upper, *bends[upper, lower], lower)]):
            known = edges.get(path)
            both = (
                (is_critical, is_done)
                if known is None
                else (is_critical or known.is_critical, is_done and known.is_done)
            )
            edges[path] = Edge(path, *both, upper, lower, at=at)
    cells = {
        name: (places[frame].x + x, places[frame].y + y)
        for frame, inside in (frames or {}).items()
        for name, (x, y) in zip(inside, _cells(len(inside)), strict=True)
    }
    nodes = [Node(step, *_at(cells, places, step.name), step.name in critical) for step in steps]
    around = _MARGIN if len({box.top for box in places.values()}) <= 1 else _AROUND
    return Graph(
        nodes,
        [*edges.values()],
        max((box.x + box.width for box in places.values()), default=0.0) + around,
        max((box.y + box.height for box in places.values()), default=0.0) + _MARGIN,
        [Frame(name, box.x, box.y, box.width, box.height) for name in frames or () for box in (places[name],)],
    )


def _at(cells: Mapping[str, tuple[float, float]], places: Mapping[_Slot, _Box], name: str) -> tuple[float, float]:
    return cells[name] if name in cells else (places[name].x, places[name].y)


def _label_of(start: _Box, end: _Box) -> tuple[float, float]:
    return (start.x + start.width + end.x) / 2, (start.middle + end.middle) / 2


def _columns_of(count: int) -> int:
    return min(_MOST_COLUMNS, max(1, round(0.7 * math.sqrt(count))))


def _cells(count: int) -> list[tuple[float, float]]:
    """Return where the steps of a frame stand in it."""
    columns = _columns_of(count)
    return [
        (_PADDING + (WIDTH + _CELL) * (place % columns), _TITLE + (HEIGHT + _CELL) * (place // columns))
        for place in range(count)
    ]


def _size(count: int) -> tuple[float, float]:
    """Return the width and height of a frame around so many steps."""
    x, y = max(x for x, _ in _cells(count)), max(y for _, y in _cells(count))
    return x + WIDTH + _PADDING, y + HEIGHT + _PADDING


def _placed(
    columns: Sequence[Sequence[_Slot]],
    sizes: Mapping[_Slot, tuple[float, float]],
    between: int,
    room: tuple[float, float] | None,
) -> dict[_Slot, _Box]:
    """Return the places of all in these layers, which stand in a middle line, or in several rows."""
    widths = [max(sizes.get(slot, (WIDTH, 0))[0] for slot in column) for column in columns]
    heights = [sum(_height(slot, sizes) for slot in column) + _ABOVE * (len(column) - 1) for column in columns]
    rows = _wrapped(widths, heights, between, room)
    places: dict[_Slot, _Box] = {}
    top = float(_MARGIN)
    for row in rows:
        x = float(_MARGIN if len(rows) == 1 else _AROUND)
        tallest = max(heights[depth] for depth in row)
        for depth in row:
            y = top + (tallest - heights[depth]) / 2
            for slot in columns[depth]:
                height, right = _height(slot, sizes), x + widths[depth]
                width = sizes.get(slot, (WIDTH, 0))[0] if isinstance(slot, str) else widths[depth]
                places[slot] = _Box(x, y, width, height, right, top)
                y += height + _ABOVE
            x += widths[depth] + between
        top += tallest + _GUTTER
    return places


def _wrapped(
    widths: Sequence[float], heights: Sequence[float], between: int, room: tuple[float, float] | None
) -> list[range]:
    """Return the rows of layers: one, or several if all of them can be read together then, or if the rows are low."""
    whole = [range(len(widths))]
    if room is None or not widths or _scale(whole, widths, heights, between, room) >= _READABLE:
        return whole
    rows = whole
    for wanted in (1.0, 0.92, _READABLE):
        rows, start, used = [], 0, 0.0
        for depth, width in enumerate(widths):
            if depth > start and used + width > room[0] / wanted - 2 * _AROUND:
                rows.append(range(start, depth))
                start, used = depth, 0.0
            used += width + between
        rows.append(range(start, len(widths)))
        if _scale(rows, widths, heights, between, room) >= wanted:
            return rows
    return rows if max(heights) < room[1] / 2 or max(widths) > WIDTH else whole


def _scale(
    rows: Sequence[range], widths: Sequence[float], heights: Sequence[float], between: int, room: tuple[float, float]
) -> float:
    """Return the part of their size in which all rows are seen in the room."""
    around = _MARGIN if len(rows) == 1 else _AROUND
    width = max(sum(widths[depth] + between for depth in row) for row in rows) - between + 2 * around
    height = sum(max(heights[depth] for depth in row) + _GUTTER for row in rows) - _GUTTER + 2 * _MARGIN
    return min(room[0] / width, room[1] / height)


def _height(slot: _Slot, sizes: Mapping[_Slot, tuple[float, float]]) -> float:
    return sizes.get(slot, (WIDTH, HEIGHT))[1] if isinstance(slot, str) else _BEND


def layers_of(above: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Return steps by the length of the longest path to them; a definition has no circles."""
    depths: dict[str, int] = {}
    for step in above:
        waiting = [step]
        while waiting:
            name = waiting[-1]
            missing = [one for one in above[name] if one in above and one not in depths]
            if missing:
                waiting += missing
                continue
            depths[name] = 1 + max((depths[one] for one in above[name] if one in depths), default=-1)
            waiting.pop()
    found: list[list[str]] = [[] for _ in range(max(depths.values(), default=-1) + 1)]
    for step in above:
        found[depths[step]].append(step)
    return found


def _ordered(columns: list[list[_Slot]], above: Mapping[_Slot, Sequence[_Slot]]) -> list[list[_Slot]]:
    """Return the layers, each sorted by where the neighbours of its positions stand on average."""
    below: dict[_Slot, list[_Slot]] = {}
    for slot, uppers in above.items():
        for upper in uppers:
            below.setdefault(upper, []).append(slot)
    for sweep in range(_SWEEPS):
        neighbours: Mapping[_Slot, Sequence[_Slot]] = above if sweep % 2 == 0 else below
        rows = {slot: row / len(column) for column in columns for row, slot in enumerate(column)}
        for column in columns if sweep % 2 == 0 else reversed(columns):
            averages = {slot: _average(slot, neighbours, rows) for slot in column}
            column.sort(key=averages.__getitem__)
            rows.update((slot, row / len(column)) for row, slot in enumerate(column))
    return columns


def _average(slot: _Slot, neighbours: Mapping[_Slot, Sequence[_Slot]], rows: Mapping[_Slot, float]) -> float:
    found = [rows[one] for one in neighbours.get(slot, ())]
    return sum(found) / len(found) if found else rows[slot]


def _lines(stops: Sequence[_Box]) -> list[str]:
    """Return the parts of a line that leaves a step to the right, passes others by, and comes in from the left.

    Where it leads to the next row, it has parts that it shares with others, which are drawn once.
    """
    parts = [f"M{stops[0].x + stops[0].width:g},{stops[0].middle:g}"]
    for start, end in pairwise(stops):
        x, y, left, top = start.right, start.middle, end.x, end.middle
        if start.top == end.top:
            half = (left - x) / 2
            straight = f" H{x:g}" if x > start.x + start.width else ""
            parts[-1] += f"{straight} C{x + half:g},{y:g} {left - half:g},{top:g} {left:g},{top:g}"
        else:
            right, outside, gutter, turn = x + _TURN, left - _TURN, end.top - _GUTTER / 2, _ROUND
            parts[-1] += f" H{right:g} q{turn},0 {turn},{turn} V{gutter - turn:g}"
            parts += [
                f"M{right + turn:g},{gutter - turn:g} q0,{turn} -{turn},{turn} H{outside:g} q-{turn},0 -{turn},{turn}",
                f"M{outside - turn:g},{gutter + turn:g} V{top - turn:g} q0,{turn} {turn},{turn} H{left:g}",
            ]
        if end is not stops[-1]:
            parts[-1] += f" H{end.x + end.width:g}"
    return parts
