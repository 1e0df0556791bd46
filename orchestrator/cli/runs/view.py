"""Draws a workflow's run: a line per step or, if there are too many, per layer of steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from graphlib import TopologicalSorter

from rich.cells import cell_len
from rich.console import Group
from rich.text import Text

from orchestrator.domain.tasks.task import error_text
from orchestrator.monitoring.times import between
from orchestrator.store.insights import RunView, StepView
from orchestrator.terminal_safe import one_line

MAX_LINES = 40
"""Number of steps up to which each has its own line."""
_BAR = 24
_WIDE_TERMINAL = 5 * _BAR
"""Terminal width from which a bar has its full length."""
_MAX_NAMES = 3
_MAX_FAILURES = 5
_SYMBOLS = {
    "waiting": ("○", "dim"),
    "pending": ("○", "yellow"),
    "open": ("●", "cyan"),
    "running": ("●", "cyan"),
    "success": ("✓", "green"),
    "failed": ("✗", "red"),
    "skipped": ("⤼", "dim"),
    "cancelled": ("⊘", "yellow"),
}
_BAD_ENDS = ("failed", "cancelled", "skipped")
_ENDED = ("success", *_BAD_ENDS)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the view."""

    name: str
    """The name of the step, or of the layer."""
    state: str
    """The step's state; for a layer, the most important state of its steps."""
    gutter: str = ""
    """The tree branches drawn before the name, which show what the step depends on."""
    bar: bool = False
    """Whether the line has a bar: for a fan-out or a layer."""
    ended: int = 0
    """Tasks that have ended."""
    total: int | None = 1
    """Number of all tasks; None while a fan-out's size is unknown."""
    failed: int = 0
    """Tasks that failed."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """For a layer: the number of its failed, cancelled and skipped steps, by state."""
    started_at: datetime | None = None
    """The start of the first task."""
    ended_at: datetime | None = None
    """The end of the last task."""
    trouble: str = ""
    """Why the step did not succeed."""
    note: str = ""
    """Further remarks."""


# -- steps to lines


def to_lines(steps: Sequence[StepView], limit: int = MAX_LINES) -> list[Line]:
    """Return a line for each step; for more than `limit` steps, a line for each layer."""
    graph = {step.name: step.depends_on for step in steps}
    by_name = {step.name: step for step in steps}
    if len(steps) <= limit:
        return [_step_line(by_name[name], gutter) for gutter, name in gutters(graph)]
    return [_layer_line(number, [by_name[name] for name in layer]) for number, layer in enumerate(layers(graph), 1)]


def _step_line(step: StepView, gutter: str) -> Line:
    notes = [f"workflow {step.calls}"] if step.kind == "workflow" else []
    if step.state == "open" and step.started_at is None:
        notes.append("queued")
    if len(step.depends_on) > 1:
        notes.append(f"← {_some(step.depends_on)}")
    return Line(
        name=step.name,
        state=step.state,
        gutter=gutter,
        bar=step.fan_out,
        ended=step.ended,
        total=step.total,
        failed=step.failed,
        started_at=step.started_at,
        ended_at=step.ended_at,
        trouble=trouble(step),
        note="  ".join(notes),
    )


def _layer_line(number: int, steps: Sequence[StepView]) -> Line:
    state = _state_of_layer({step.state for step in steps})
    counts = Counter(step.state for step in steps if step.state in _BAD_ENDS)
    ends = [step.ended_at for step in steps if step.ended_at is not None]
    note = f"{len(steps):,} steps" if len(steps) > 1 else steps[0].name
    return Line(
        name=f"layer {number}",
        state=state,
        bar=True,
        ended=sum(step.ended if step.total is not None else step.state in _ENDED for step in steps),
        total=sum(1 if step.total is None else step.total for step in steps),
        failed=sum(step.failed for step in steps),
        started_at=min((step.started_at for step in steps if step.started_at is not None), default=None),
        ended_at=max(ends, default=None) if state in _ENDED else None,
        counts=counts,
        trouble=_counted(counts),
        note=note,
    )


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{counts[state]:,} {state}" for state in _BAD_ENDS if state in counts)


def _state_of_layer(states: set[str]) -> str:
    if states == {"waiting"}:
        return "waiting"
    if states & {"open", "waiting"}:
        return "open"
    return next((state for state in _BAD_ENDS if state in states), "success")


def trouble(step: StepView) -> str:
    """Return in one line why a step did not succeed; an empty string if it did."""
    if step.reason:
        return _one_line(step.reason)
    if step.error is None:
        return ""
    failed = f"{step.failed:,} failed, first: " if step.fan_out else ""
    return _one_line(failed + error_text(step.error.kind, step.error.message))


def _one_line(text: str) -> str:
    return " ".join(one_line(text).split())


def _some(names: Sequence[str]) -> str:
    remaining = len(names) - _MAX_NAMES
    return ", ".join([*names[:_MAX_NAMES], *([f"{remaining} more"] if remaining > 0 else [])])


# -- lines to a picture


def draw(
    run: RunView, steps: Sequence[StepView], now: datetime, height: int | None = None, width: int = _WIDE_TERMINAL
) -> Group:
    """Return the picture of a run that fits into the terminal's height, with bars scaled to its width."""
    room = max(4, height - 4) if height else MAX_LINES
    lines = to_lines(steps, min(MAX_LINES, room))
    is_layered = len(lines) > 0 and len(steps) > min(MAX_LINES, room)
    failures = [step for step in steps if step.state == "failed"][:_MAX_FAILURES] if is_layered else []
    room -= len(failures)
    picture: list[Text] = [headline(run, now), Text()]
    picture += draw_lines(_fit(lines, room), now, width)
    picture += [_crop(Text.assemble(("✗ ", "red"), step.name, "  ", (trouble(step), "red"))) for step in failures]
    return Group(*picture)


def headline(run: RunView, now: datetime) -> Text:
    """Return the headline of a run: state, tasks, duration and id."""
    state = "cancelling" if run.cancelling and run.ended_at is None else run.shown_status
    symbol, style = _SYMBOLS[run.status]
    text = Text.assemble((f"{symbol} ", style), (run.name, "bold"))
    if run.version is not None:
        text.append(f" v{run.version}", "dim")
    text.append(f"  {state}", style)
    text.append(f"  {run.total - run.open:,}/{run.total:,} tasks")
    if run.failed:
        text.append(f"  {run.failed:,} failed", "red")
    if run.skipped:
        text.append(f"  {run.skipped:,} skipped", "yellow")
    if run.reason:
        text.append(f"  {run.reason}", "red")
    text.append(f"  {between(run.began_at, run.ended_at or now)}", "dim")
    text.append(f"  {run.id}", "dim")
    return _crop(text)


def draw_lines(lines: Sequence[Line], now: datetime, width: int = _WIDE_TERMINAL) -> list[Text]:
    """Return lines as aligned columns: tree, bar, count, time, remarks. The end of a long line is cut off."""
    graphs = [_graph(line) for line in lines]
    counts = [_count(line) for line in lines]
    times = [between(line.started_at, line.ended_at or now) for line in lines]
    graph_width = max(map(_width, graphs), default=0)
    bar = min(_BAR, width // 5) if any(line.bar for line in lines) else 0
    count_width = max(map(len, counts), default=0)
    time_width = max(map(len, times), default=0)
    drawn = []
    for line, graph, count, time in zip(lines, graphs, counts, times, strict=True):
        text = graph.copy()
        text.append(" " * (graph_width - _width(graph)))
        if bar:
            text.append("  ").append_text(_bar(line, bar))
        if count_width:
            text.append(f"  {count:>{count_width}}")
        text.append(f"  {time:>{time_width}}", "dim")
        if line.trouble:
            text.append(f"  {line.trouble}", "red" if line.state == "failed" or line.failed else "dim")
        if line.note:
            text.append(f"  {line.note}", "dim")
        text.rstrip()
        drawn.append(_crop(text))
    return drawn


def _graph(line: Line) -> Text:
    symbol, style = _SYMBOLS[line.state]
    name_style = {"waiting": "dim", "skipped": "dim", "open": "bold"}.get(line.state, "")
    return Text.assemble((line.gutter, "dim"), (symbol, style), " ", (line.name, name_style))


def _bar(line: Line, width: int) -> Text:
    """Return a bar of the succeeded, skipped, failed and remaining tasks."""
    if not line.bar or (line.state == "skipped" and not line.counts):
        return Text(" " * width)
    total = line.total or 0
    if total == 0:
        return Text("━" * width, "green") if line.state == "success" else Text("─" * width, "bright_black")
    failed = _bar_share(line.failed, total, width)
    done = width if line.ended >= total else min(width - 1, int(width * line.ended / total))
    done = max(done, failed)
    skipped = min(done - failed, _bar_share(line.counts.get("skipped", 0), total, width))
    colour = {"open": "cyan", "cancelled": "yellow"}.get(line.state, "green")
    parts = ((done - skipped - failed, colour), (skipped, "dim"), (failed, "red"))
    return Text.assemble(*(("━" * size, style) for size, style in parts), ("─" * (width - done), "bright_black"))


def _bar_share(count: int, total: int, width: int) -> int:
    """Return the bar columns for `count` of `total` tasks: at least one if there are any."""
    return min(width, max(1, round(width * count / total))) if count else 0


def _count(line: Line) -> str:
    if not line.bar or (line.state == "skipped" and not line.counts):
        return ""
    return f"{line.ended:,}/{'?' if line.total is None else f'{line.total:,}'}"


def _fit(lines: Sequence[Line], room: int) -> list[Line]:
    """Return the lines that fit: those around the first one that has not ended. The others are folded into one line."""
    if len(lines) <= room:
        return list(lines)
    active = next((index for index, line in enumerate(lines) if line.state not in _ENDED), len(lines) - 1)
    first = max(0, min(active - (room - 2) // 2, len(lines) - (room - 2)))
    last = first + room - 2
    return [*_folded(lines[:first]), *lines[first:last], *_folded(lines[last:])]


def _folded(lines: Sequence[Line]) -> Iterable[Line]:
    if lines:
        counts = sum((Counter(line.counts) for line in lines), Counter[str]())
        yield Line(
            name=f"{len(lines):,} layers",
            state=_state_of_layer({line.state for line in lines}),
            bar=True,
            ended=sum(line.ended for line in lines),
            total=sum(line.total or 0 for line in lines),
            failed=sum(line.failed for line in lines),
            counts=counts,
            trouble=_counted(counts),
        )


def _width(text: Text) -> int:
    return cell_len(text.plain)


def _crop(text: Text) -> Text:
    text.plain = one_line(text.plain)
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


# -- lines to words


def changes(before: Sequence[Line], after: Sequence[Line], now: datetime) -> list[str]:
    """Return a line of text for every change. Steps that are still waiting are left out."""
    previous = {line.name: _key(line) for line in before}
    return [_text(line, now) for line in after if line.state != "waiting" and previous.get(line.name) != _key(line)]


def _key(line: Line) -> tuple[str, int, int | None, int, bool]:
    return line.state, line.ended, line.total, line.failed, line.started_at is None


def _text(line: Line, now: datetime) -> str:
    state = "running" if line.state == "open" else line.state
    if line.state == "open" and line.started_at is None and not line.ended:
        state = "queued"
    parts = [f"{line.name}: {state}"]
    if count := _count(line):
        parts.append(count)
    if line.state in _ENDED and (took := between(line.started_at, line.ended_at or now)):
        parts.append(f"in {took}")
    remark = line.trouble or (f"{line.failed:,} failed" if line.failed and line.bar else "")
    return one_line(" ".join(parts) + (f" ({remark})" if remark else ""))


Graph = Mapping[str, Sequence[str]]
"""The dependencies of each step."""
_ROOT = ""


def layers(graph: Graph) -> list[list[str]]:
    """Return the steps grouped by the length of the longest path to them."""
    grouped: list[list[str]] = []
    for name, depth in _depths(graph).items():
        while len(grouped) <= depth:
            grouped.append([])
        grouped[depth].append(name)
    return grouped


def gutters(graph: Graph) -> list[tuple[str, str]]:
    """Return the steps in drawing order, each with the tree branches drawn before it."""
    depths = _depths(graph)
    below: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, dominator in _dominators(graph, depths).items():
        below[dominator][depths[name]].append(name)
    return list(_draw(below, _ROOT, ""))


def _draw(below: Mapping[str, Mapping[int, list[str]]], parent: str, margin: str) -> Iterator[tuple[str, str]]:
    last_drawn = None if parent == _ROOT else margin
    for _, group in sorted(below[parent].items()) if parent in below else ():
        for index, name in enumerate(group):
            is_last = index == len(group) - 1
            if len(group) == 1:
                corner = inner = ""
            elif is_last:
                corner, inner = "╰─ ", "   "
            else:
                corner, inner = "├─ " if index or last_drawn == margin else "╭─ ", "│  "
            yield margin + corner, name
            last_drawn = margin + corner
            for last_drawn, deeper in _draw(below, name, margin + inner):
                yield last_drawn, deeper


def _depths(graph: Graph) -> dict[str, int]:
    """Return the length of the longest path to each step, in topological order."""
    depths: dict[str, int] = {}
    order = {name: index for index, name in enumerate(graph)}
    for name in TopologicalSorter(graph).static_order():
        depths[name] = 1 + max((depths[parent] for parent in graph[name]), default=-1)
    return dict(sorted(depths.items(), key=lambda item: (item[1], order[item[0]])))


def _dominators(graph: Graph, depths: Mapping[str, int]) -> dict[str, str]:
    """Return the immediate dominator of each step: the last step that all paths to it share, or the root."""
    chains: dict[str, tuple[str, ...]] = {}
    dominators: dict[str, str] = {}
    for name in depths:
        parents = [chains[parent] for parent in graph[name]] or [()]
        shared = 0
        for level in zip(*parents, strict=False):
            if len(set(level)) > 1:
                break
            shared += 1
        chains[name] = (*parents[0][:shared], name)
        dominators[name] = parents[0][shared - 1] if shared else _ROOT
    return dominators
