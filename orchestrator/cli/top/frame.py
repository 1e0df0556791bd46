"""Renders the screen as lines of text: a pure function of the snapshot, the view's state and the screen's size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from orchestrator.cli.top.lists import ROWS, Rows, bar, queue_rows, sparkline
from orchestrator.cli.top.sampling import Snapshot
from orchestrator.cli.top.view import LOWER, Panel, View, queues, selected_row
from orchestrator.monitoring.times import duration
from orchestrator.terminal_safe import one_line

_MIN_SIZE = (40, 8)
_LEADER_LATE = 10.0
"""Seconds without a useful tick after which the leader is reported as late."""


@dataclass(frozen=True)
class Size:
    """The size of the screen, in columns and lines."""

    width: int
    height: int


def draw(data: Snapshot | None, view: View, size: Size, trouble: str | None = None, stale: float = 0.0) -> list[Text]:
    """Return the lines of the screen, padded and cut to its size."""
    if size.width < _MIN_SIZE[0] or size.height < _MIN_SIZE[1]:
        return [Text("too small: at least 40 x 8"[: size.width])]
    lines = [*_head(data, view, size, trouble, stale)]
    foot = _foot(view, size.width)
    room = size.height - len(lines) - 1
    if view.sheet is not None:
        lines += _sheet(view, size.width, room)
    elif data is not None:
        lines += _lists(data, view, size.width, room)
    lines = lines[: size.height - 1]
    lines += [Text()] * (size.height - 1 - len(lines))
    return [_fitted(line, size.width) for line in (*lines, foot)]


# -- head and foot


def _head(data: Snapshot | None, view: View, size: Size, trouble: str | None, stale: float) -> Iterator[Text]:
    title = Text.assemble((" orchestrator top ", "bold reverse"), "  ")
    if data is None:
        title.append("looking …")
    else:
        title.append(f"{data.rate:,.0f}/s", style="bold green").append(" end")
        if data.failing:
            title.append(f", {data.failing:,.1f}/s fail", style="red")
        title.append(f"  {sparkline(data.minute, min(30, max(0, size.width - 62)))}", style="green")
        right = Text(f"{data.at:%H:%M:%S} UTC")
        if view.frozen:
            right = Text("paused (space)", style="black on yellow")
        title = _spread(title, right, size.width)
    yield title
    if data is not None:
        yield _system_line(data, size.width)
    if trouble is not None:
        yield Text(f"! Postgres cannot be used, for {duration(stale)}: {one_line(trouble)}", style="bold white on red")
    if data is not None:
        for text in problems(data):
            yield Text(f"! {text}", style="bold yellow")
            if size.height < 20:
                break


def _system_line(data: Snapshot, width: int) -> Text:
    line, load = Text(), data.load
    if data.leader is None:
        line.append("no leader", style="bold red")
    else:
        line.append("leader ", style="dim").append(one_line(data.leader.address)).append(f" term {data.leader.term}")
    use = load.running / load.slots if load.slots else 0.0
    workers = str(load.live_workers) if data.hears_workers else "?"
    line.append("  workers ", style="dim").append(workers, style="" if load.live_workers else "bold red")
    line.append("  slots ", style="dim").append(f"{load.running}/{load.slots} ").append_text(bar(use, 8))
    if width >= 100:
        line.append("  open ", style="dim").append(f"{load.open_tasks:,}")
        line.append("  inbox ", style="dim").append(f"{load.inbox:,}")
        line.append("  redis ", style="dim").append(f"{data.redis_memory / 1e6:,.0f} MB")
    return line


def problems(data: Snapshot) -> Iterator[str]:
    """Yield the current problems of the system, the worst first."""
    if data.leader is None:
        yield "No scheduler leads: no task starts. Start one: orchestrator scheduler"
    elif (data.leader.idle or 0.0) > _LEADER_LATE:
        why = one_line(data.leader.trouble or "it gives no reason")
        yield f"The leader has made no progress for {duration(data.leader.idle)}: {why}"
    elif (data.load.lease_remaining or 0.0) < 0:
        yield "No scheduler leads a shard: no task starts there. To find it: orchestrator status"
    if data.redis is not None:
        yield f"Redis cannot be used: {one_line(data.redis)}"
    unserved = [queue.queue for queue in data.queues if queue.ready and not queue.slots]
    if unserved and data.hears_workers:
        yield f"No worker serves {one_line(', '.join(unserved[:5]))}{' …' if len(unserved) > 5 else ''}"
    if data.load.stuck_runs:
        yield f"{data.load.stuck_runs:,} runs are stuck: orchestrator runs list --stuck"
    if data.quarantined:
        yield f"{data.quarantined:,} messages are in quarantine: orchestrator quarantine list"
    if data.load.late_schedules:
        yield f"{data.load.late_schedules:,} schedules are late, the first by {duration(data.load.lateness)}"
    still = [worker.id for worker in data.workers if worker.state == "still"]
    if still:
        yield f"Worker {one_line(still[0])} is unresponsive: a task blocks its process"


def _foot(view: View, width: int) -> Text:
    if view.question is not None:
        return Text.assemble((f" {one_line(view.question.text)} ", "black on yellow"), (" y / n ", "bold"))
    if view.typing is not None:
        return Text.assemble((" / ", "reverse"), one_line(view.typing), ("▏", "blink"))
    if view.message:
        return Text(f" {one_line(view.message)}", style="bold")
    if view.sheet is not None:
        return _key("esc", "close").append_text(_key("up down", "move"))
    last = _key("?", "keys")
    keys = _key("q", "quit")
    filter_key = f"filter: {one_line(view.matching)}" if view.matching else "filter"
    for key, what in (
        ("enter", "open"),
        ("s", f"sort: {view.sort}"),
        ("/", filter_key),
        ("p", "pause"),
        ("c", "cancel"),
        ("tab", "lists"),
        ("space", "stand still"),
    ):
        more = _key(key, what)
        if keys.cell_len + more.cell_len + last.cell_len <= width:
            keys.append_text(more)
    return keys.append_text(last)


def _key(key: str, what: str) -> Text:
    return Text.assemble((f" {key} ", "reverse"), f" {what} ")


# -- lists


def _lists(data: Snapshot, view: View, width: int, room: int) -> Iterator[Text]:
    panels = LOWER[LOWER.index(view.panel) :] + LOWER[: LOWER.index(view.panel)]
    panels = panels[: 1 if room < 30 else 2 if room < 46 else 4]
    needed = len(queues(view, data)) + 1
    upper = max(3, min(needed, room - 4 * len(panels), room // 2 if len(panels) == 1 else room // 3))
    yield from _table(view, Panel.QUEUES, data, queue_rows(data, view, width), width, upper)
    left = room - upper - 1
    yield _tabs(view, data)
    contents = [ROWS[panel](data, view, width) for panel in panels]
    heights = [min(left // len(panels), len(rows) + 3) for _, rows in contents]  # a title, a header and a blank line
    heights[0] = left - sum(heights[1:])
    for panel, content, height in zip(panels, contents, heights, strict=True):
        title = [] if panel is view.panel else [Text(f" {panel.value}", style="bold cyan")]
        lines = [*title, *_table(view, panel, data, content, width, height - len(title) - (panel is not panels[-1]))]
        yield from (lines + [Text()] * height)[:height]


def _tabs(view: View, data: Snapshot) -> Text:
    counts = {
        Panel.RUNNING: len(data.running),
        Panel.WORKERS: len(data.workers),
        Panel.FAILURES: sum(one.tasks for one in data.failures),
        Panel.RUNS: len(data.runs),
    }
    line = Text()
    for number, panel in enumerate(LOWER, 1):
        style = "bold cyan" if panel is view.panel else "dim"
        line.append(
            f" {number} {panel.value} {counts[panel]:,} ", style=f"{style} reverse" if panel is view.panel else style
        )
        line.append(" ")
    return line


_EMPTY = {
    Panel.QUEUES: "no queue has tasks or workers",
    Panel.RUNNING: "nothing runs",
    Panel.WORKERS: "no live worker. Start one: orchestrator worker --app module:app",
    Panel.FAILURES: "nothing has failed in the last quarter of an hour",
    Panel.RUNS: "no run is open",
}


def _table(view: View, panel: Panel, data: Snapshot, content: Rows, width: int, height: int) -> Iterator[Text]:
    """Yield a header and up to `height - 1` rows around the selected one. Columns fit the visible rows."""
    headers, rows = content
    if not rows:
        empty_text = f"no name here contains {view.matching!r}" if view.matching else _EMPTY[panel]
        yield Text(f" {one_line(empty_text)}", style="dim")
        return
    names = [name for name, _ in rows]
    current = selected_row(view, panel, data)
    index = names.index(current) if current in names else 0
    first = max(0, min(index - (height - 1) // 2, len(rows) - height + 1))
    visible = rows[first : first + height - 1]
    widths = _widths(headers, [cells for _, cells in visible], width)
    yield _row([Text(header.rstrip(">*"), style="bold") for header in headers], headers, widths)
    for name, cells in visible:
        line = _row(cells, headers, widths)
        if name == current and view.focus is panel:
            line = _fitted(line, width)
            line.stylize("reverse")
        yield line


def _widths(headers: Sequence[str], rows: Sequence[Sequence[Text]], width: int) -> list[int]:
    widths = [
        max([cell_len(header.rstrip(">*")), *(cells[index].cell_len for cells in rows)])
        for index, header in enumerate(headers)
    ]
    widest = max(12, width // 3)
    widths = [min(widest, each) for each in widths]
    star = next(index for index, header in enumerate(headers) if header.endswith("*"))
    taken = sum(widths) - widths[star] + 2 * len(headers) - 1
    widths[star] = max(8, width - taken)
    return widths


def _row(cells: Sequence[Text], headers: Sequence[str], widths: Sequence[int]) -> Text:
    line = Text(" ")
    for cell, header, width in zip(cells, headers, widths, strict=True):
        truncated = cell.copy()
        truncated.truncate(width, overflow="ellipsis")
        blanks = " " * (width - truncated.cell_len)
        line.append(blanks if header.endswith(">") else "").append_text(truncated)
        line.append("" if header.endswith(">") else blanks).append("  ")
    line.right_crop(2)
    return line


def _sheet(view: View, width: int, room: int) -> Iterator[Text]:
    assert view.sheet is not None
    sheet = view.sheet
    yield Text(f" {one_line(sheet.title)}", style="bold cyan")
    yield Text("─" * width, style="dim")
    folded = [part for line in sheet.lines for part in _folded(one_line(line), width - 2)]
    sheet.top = max(0, min(sheet.top, len(folded) - (room - 2)))
    for line in folded[sheet.top : sheet.top + room - 2]:
        yield Text(f" {line}")


def _folded(line: str, width: int) -> list[str]:
    return [line[start : start + width] for start in range(0, len(line), width)] or [""]


# -- small things


def _spread(left: Text, right: Text, width: int) -> Text:
    blanks = width - left.cell_len - right.cell_len
    return left.append(" " * max(1, blanks)).append_text(right)


def _fitted(line: Text, width: int) -> Text:
    fitted = line.copy()
    if fitted.cell_len > width:
        fitted.truncate(width, overflow="ellipsis")
    elif fitted.cell_len < width:
        fitted.append(" " * (width - fitted.cell_len))
    return fitted
