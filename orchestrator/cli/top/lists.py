"""What each list of the screen shows: headers, and cells by row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.text import Text

from orchestrator.cli.top.sampling import QueueNow, Snapshot
from orchestrator.cli.top.view import Panel, View, matches, queues
from orchestrator.monitoring.times import duration
from orchestrator.terminal_safe import one_line

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[int], width: int) -> str:
    """Return values as bars, the last at the right; as many to a bar as it takes for a minute to fit."""
    if width < 1 or not values:
        return ""
    each = -(-len(values) // width)
    pad = (-len(values)) % each
    padded = [0] * pad + list(values)
    sums = [sum(padded[start : start + each]) for start in range(0, len(padded), each)]
    most = max(sums)
    if not most:
        return " " * len(sums)
    return "".join(" " if not value else _BARS[min(7, value * 8 // (most + 1))] for value in sums)


def bar(share: float, width: int, style: str = "") -> Text:
    """Return how full something is; without a style, in a colour that warns."""
    full = round(max(0.0, min(1.0, share)) * width)
    style = style or ("red" if share > 0.95 else "yellow" if share > 0.75 else "green")
    return Text.assemble(("■" * full, style), ("·" * (width - full), "dim"))


def rate(value: float) -> str:
    """Return how often something happens in a second; nothing where it does not."""
    return "" if not value else f"{value:,.1f}" if value < 10 else f"{value:,.0f}"


_HEADERS = ("queue*", "ready>", "oldest>", "delayed>", "in flight>", "slots>", "ended/s>", "failed/s>", "last minute")
_STYLES = {"live": "green", "still": "bold red", "unheard": "yellow", "draining": "yellow"}
Row = tuple[str, list[Text]]
Rows = tuple[list[str], list[Row]]
"""Headers (`>` at the right, `*` takes what room is left), and rows by name."""


def queue_rows(found: Snapshot, view: View, width: int) -> Rows:
    spark = max(0, min(60, width - 78))
    needs = {"in flight>": 56, "slots>": 64, "delayed>": 78, "failed/s>": 72, "last minute": 86}
    headers = [header for header in _HEADERS if width >= needs.get(header, 0)]
    is_led = found.hears_workers
    return headers, [(queue.queue, [*_queue_cells(queue, headers, spark, is_led)]) for queue in queues(view, found)]


def _queue_cells(queue: QueueNow, headers: Sequence[str], spark: int, is_led: bool) -> Iterator[Text]:
    old = queue.oldest or 0.0
    unserved = is_led and queue.ready and not queue.slots
    slots = f"{queue.slots:,}" if queue.slots else "none" if is_led else "?"
    name = Text(one_line(queue.queue))
    if queue.paused:
        name.append(" paused", style="black on yellow")
    cells = {
        "queue*": name,
        "ready>": Text(f"{queue.ready:,}" + ("+" if queue.ready >= 10_000 else "")),
        "oldest>": Text(duration(old) if old else "", style="red" if old > 300 else "yellow" if old > 60 else ""),
        "delayed>": Text(f"{queue.delayed:,}" if queue.delayed else ""),
        "in flight>": Text(f"{queue.in_flight:,}" if queue.in_flight else "", style="cyan"),
        "slots>": Text(slots, style="bold red" if unserved else ""),
        "ended/s>": Text(rate(queue.rate), style="green"),
        "failed/s>": Text(rate(queue.failing), style="red"),
        "last minute": Text(sparkline(queue.minute, spark), style="green"),
    }
    yield from (cells[header] for header in headers)


def _running_rows(found: Snapshot, view: View, width: int) -> Rows:
    headers = ["time>", "task*", "queue", "state", *(["done"] if found.done else []), "id"]
    headers += ["worker"] if width >= 110 else []
    rows: list[Row] = []
    for task in found.running:
        if matches(view, task.name, task.queue, task.worker or ""):
            slow = "bold yellow" if task.status == "running" and task.seconds > 60 else ""
            name = one_line(task.name) + (f"  try {task.attempt}" if task.attempt > 1 else "")
            state = Text(task.status, style="cyan" if task.status == "running" else "dim")
            cells = [Text(duration(task.seconds), style=slow), Text(name), Text(one_line(task.queue)), state]
            if found.done:
                cells.append(bar(found.done[task.id], 8, "cyan") if task.id in found.done else Text())
            cells += [Text(task.id[-12:], style="dim"), Text(one_line(task.worker or ""), style="dim")]
            rows.append((task.id, cells[: len(headers)]))
    return headers, rows


def _worker_rows(found: Snapshot, view: View, width: int) -> Rows:
    del width
    rows: list[Row] = []
    for worker in found.workers:
        if matches(view, worker.id, *worker.queues):
            names = Counter(task.name for task in found.running if task.worker == worker.id)
            does = ", ".join(f"{number} {name}" if number > 1 else name for name, number in names.items())
            running = max(worker.running, names.total())  # the leader publishes the fleet every few seconds
            use = bar(running / worker.slots if worker.slots else 0.0, 8)
            cells = [Text(one_line(worker.id)), Text(worker.state, style=_STYLES.get(worker.state, ""))]
            cells += [Text(f"{running}/{worker.slots}"), use]
            cells += [Text(one_line(does)) if does else Text("idle", style="dim")]
            rows.append((worker.id, cells))
    return ["worker", "state", "slots>", "", "running*"], rows


def _failure_rows(found: Snapshot, view: View, width: int) -> Rows:
    del width
    rows: list[Row] = []
    for one in found.failures:
        if matches(view, one.name, one.kind, one.message):
            age = (found.at - one.last).total_seconds()
            error = Text(one_line(one.kind.rpartition(".")[2]), style="red").append(
                f": {one_line(one.message)}", style="default"
            )
            name = Text(one_line(one.name)).append(f" {one.state}" if one.state else "", style="dim")
            rows.append((one.key, [Text(f"{one.tasks:,}"), Text(duration(max(1.0, age))), name, error]))
    return ["15 min>", "last>", "task", "error*"], rows


def _run_rows(found: Snapshot, view: View, width: int) -> Rows:
    del width
    rows: list[Row] = []
    for run in found.runs:
        if matches(view, run.name, run.workflow or ""):
            share = (run.total - run.open) / run.total if run.total else 0.0
            state = (
                Text("stuck", style="bold red") if run.stuck else Text("cancelling" if run.cancelling else run.status)
            )
            age = (found.at - (run.began_at or run.created_at)).total_seconds()
            cells = [Text(duration(max(0.1, age))), Text(one_line(run.name)), state, bar(share, 12, "cyan")]
            cells += [Text(f"{run.total - run.open:,}/{run.total:,}")]
            cells += [Text(f"{run.failed:,}" if run.failed else "", style="red"), Text(str(run.id)[-12:], style="dim")]
            rows.append((str(run.id), cells))
    return ["time>", "run*", "state", "", "tasks>", "failed>", "id"], rows


ROWS = {Panel.RUNNING: _running_rows, Panel.WORKERS: _worker_rows, Panel.FAILURES: _failure_rows, Panel.RUNS: _run_rows}
