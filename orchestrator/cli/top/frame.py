"""The screen as lines of text: a pure function of what was found, what was chosen, and how much room there is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from orchestrator.cli.top.lists import ROWS, Rows, bar, queue_rows, sparkline
from orchestrator.cli.top.sampling import Snapshot
from orchestrator.cli.top.view import LOWER, Panel, View, chosen, queues
from orchestrator.monitoring.times import duration
from orchestrator.terminal_safe import one_line

_SMALLEST = (40, 8)
_LEADER_LATE = 10.0
"""Seconds without a useful tick after which a leader is said to be in trouble."""


@dataclass(frozen=True)
class Size:
    """How much room there is."""

    width: int
    height: int


def draw(found: Snapshot | None, view: View, size: Size, trouble: str | None = None, stale: float = 0.0) -> list[Text]:
    """Return the lines of a screen, as many as fit, none wider than it."""
    if size.width < _SMALLEST[0] or size.height < _SMALLEST[1]:
        return [Text("too small: at least 40 x 8"[: size.width])]
    lines = [*_head(found, view, size, trouble, stale)]
    foot = _foot(view, size.width)
    room = size.height - len(lines) - 1
    if view.sheet is not None:
        lines += _sheet(view, size.width, room)
    elif found is not None:
        lines += _lists(found, view, size.width, room)
    lines = lines[: size.height - 1]
    lines += [Text()] * (size.height - 1 - len(lines))
    return [_fitted(line, size.width) for line in (*lines, foot)]


# -- head and foot


def _head(found: Snapshot | None, view: View, size: Size, trouble: str | None, stale: float) -> Iterator[Text]:
    title = Text.assemble((" orchestrator top ", "bold reverse"), "  ")
    if found is None:
        title.append("looking …")
    else:
        title.append(f"{found.rate:,.0f}/s", style="bold green").append(" end")
        if found.failing:
            title.append(f", {found.failing:,.1f}/s fail", style="red")
        title.append(f"  {sparkline(found.minute, min(30, max(0, size.width - 62)))}", style="green")
        right = Text(f"{found.at:%H:%M:%S} UTC")
        if view.frozen:
            right = Text("stands still (space)", style="black on yellow")
        title = _spread(title, right, size.width)
    yield title
    if found is not None:
        yield _whole(found, size.width)
    if trouble is not None:
        yield Text(f"! Postgres cannot be used, for {duration(stale)}: {one_line(trouble)}", style="bold white on red")
    if found is not None:
        for text in wrongs(found):
            yield Text(f"! {text}", style="bold yellow")
            if size.height < 20:
                break


def _whole(found: Snapshot, width: int) -> Text:
    line, load = Text(), found.load
    if found.leader is None:
        line.append("no leader", style="bold red")
    else:
        line.append("leader ", style="dim").append(one_line(found.leader.address)).append(f" term {found.leader.term}")
    use = load.running / load.slots if load.slots else 0.0
    workers = str(load.live_workers) if found.hears_workers else "?"
    line.append("  workers ", style="dim").append(workers, style="" if load.live_workers else "bold red")
    line.append("  slots ", style="dim").append(f"{load.running}/{load.slots} ").append_text(bar(use, 8))
    if width >= 100:
        line.append("  open ", style="dim").append(f"{load.open_tasks:,}")
        line.append("  inbox ", style="dim").append(f"{load.inbox:,}")
        line.append("  redis ", style="dim").append(f"{found.redis_memory / 1e6:,.0f} MB")
    return line


def wrongs(found: Snapshot) -> Iterator[str]:
    """Yield what is wrong now, the worst first."""
    if found.leader is None:
        yield "No scheduler leads: nothing is handed out. Start one: orchestrator scheduler"
    elif (found.leader.idle or 0.0) > _LEADER_LATE:
        why = one_line(found.leader.trouble or "it does not say why")
        yield f"The leader has not done its work for {duration(found.leader.idle)}: {why}"
    elif (found.load.lease_remaining or 0.0) < 0:
        yield "No scheduler leads a shard: nothing is handed out there. Which one: orchestrator status"
    if found.redis is not None:
        yield f"Redis cannot be used: {one_line(found.redis)}"
    unserved = [queue.queue for queue in found.queues if queue.ready and not queue.slots]
    if unserved and found.hears_workers:
        yield f"No worker serves {one_line(', '.join(unserved[:5]))}{' …' if len(unserved) > 5 else ''}"
    if found.load.stuck_runs:
        yield f"{found.load.stuck_runs:,} runs are stuck: orchestrator runs list --stuck"
    if found.quarantined:
        yield f"{found.quarantined:,} messages were set aside: orchestrator quarantine list"
    if found.load.late_schedules:
        yield f"{found.load.late_schedules:,} schedules are late, the first by {duration(found.load.lateness)}"
    still = [worker.id for worker in found.workers if worker.state == "still"]
    if still:
        yield f"Worker {one_line(still[0])} stands still: a task keeps its process"


def _foot(view: View, width: int) -> Text:
    if view.question is not None:
        return Text.assemble((f" {one_line(view.question.text)} ", "black on yellow"), (" y / n ", "bold"))
    if view.typing is not None:
        return Text.assemble((" / ", "reverse"), one_line(view.typing), ("▏", "blink"))
    if view.said:
        return Text(f" {one_line(view.said)}", style="bold")
    if view.sheet is not None:
        return _key("esc", "close").append_text(_key("up down", "move"))
    last = _key("?", "keys")
    keys = _key("q", "quit")
    shown = f"filter: {one_line(view.matching)}" if view.matching else "filter"
    for key, what in (
        ("enter", "open"),
        ("s", f"sort: {view.sort}"),
        ("/", shown),
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


def _lists(found: Snapshot, view: View, width: int, room: int) -> Iterator[Text]:
    shown = LOWER[LOWER.index(view.panel) :] + LOWER[: LOWER.index(view.panel)]
    shown = shown[: 1 if room < 30 else 2 if room < 46 else 4]
    wanted = len(queues(view, found)) + 1
    upper = max(3, min(wanted, room - 4 * len(shown), room // 2 if len(shown) == 1 else room // 3))
    yield from _table(view, Panel.QUEUES, found, queue_rows(found, view, width), width, upper)
    left = room - upper - 1
    yield _tabs(view, found)
    contents = [ROWS[panel](found, view, width) for panel in shown]
    heights = [min(left // len(shown), len(rows) + 3) for _, rows in contents]  # a title, a header and a blank line
    heights[0] = left - sum(heights[1:])
    for panel, content, height in zip(shown, contents, heights, strict=True):
        title = [] if panel is view.panel else [Text(f" {panel.value}", style="bold cyan")]
        lines = [*title, *_table(view, panel, found, content, width, height - len(title) - (panel is not shown[-1]))]
        yield from (lines + [Text()] * height)[:height]


def _tabs(view: View, found: Snapshot) -> Text:
    counts = {
        Panel.RUNNING: len(found.running),
        Panel.WORKERS: len(found.workers),
        Panel.FAILURES: sum(one.tasks for one in found.failures),
        Panel.RUNS: len(found.runs),
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
    Panel.QUEUES: "no queue has anything to do, or a worker",
    Panel.RUNNING: "nothing runs",
    Panel.WORKERS: "no worker lives. Start one: orchestrator worker --app module:app",
    Panel.FAILURES: "nothing has failed in the last quarter of an hour",
    Panel.RUNS: "no run is under way",
}


def _table(view: View, panel: Panel, found: Snapshot, content: Rows, width: int, height: int) -> Iterator[Text]:
    """Yield a header and so many rows, the selected one among them; columns are as wide as what is shown needs."""
    headers, rows = content
    if not rows:
        none = f"nothing here has {view.matching!r} in its name" if view.matching else _EMPTY[panel]
        yield Text(f" {one_line(none)}", style="dim")
        return
    names = [name for name, _ in rows]
    current = chosen(view, panel, found)
    place = names.index(current) if current in names else 0
    first = max(0, min(place - (height - 1) // 2, len(rows) - height + 1))
    shown = rows[first : first + height - 1]
    widths = _widths(headers, [cells for _, cells in shown], width)
    yield _row([Text(header.rstrip(">*"), style="bold") for header in headers], headers, widths)
    for name, cells in shown:
        line = _row(cells, headers, widths)
        if name == current and view.focus is panel:
            line = _fitted(line, width)
            line.stylize("reverse")
        yield line


def _widths(headers: Sequence[str], rows: Sequence[Sequence[Text]], width: int) -> list[int]:
    found = [
        max([cell_len(header.rstrip(">*")), *(cells[place].cell_len for cells in rows)])
        for place, header in enumerate(headers)
    ]
    widest = max(12, width // 3)
    found = [min(widest, each) for each in found]
    star = next(place for place, header in enumerate(headers) if header.endswith("*"))
    taken = sum(found) - found[star] + 2 * len(headers) - 1
    found[star] = max(8, width - taken)
    return found


def _row(cells: Sequence[Text], headers: Sequence[str], widths: Sequence[int]) -> Text:
    line = Text(" ")
    for cell, header, width in zip(cells, headers, widths, strict=True):
        cut = cell.copy()
        cut.truncate(width, overflow="ellipsis")
        blanks = " " * (width - cut.cell_len)
        line.append(blanks if header.endswith(">") else "").append_text(cut)
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
    cut = line.copy()
    if cut.cell_len > width:
        cut.truncate(width, overflow="ellipsis")
    elif cut.cell_len < width:
        cut.append(" " * (width - cut.cell_len))
    return cut
