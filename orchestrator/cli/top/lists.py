"""Headers and rows of each list on the screen."""

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
    """Return values as bars, the newest at the right. Neighboring values are summed so that all fit."""
    if width < 1 or not values:
        return ""
    per_bar = -(-len(values) // width)
    pad = (-len(values)) % per_bar
    padded = [0] * pad + list(values)
    sums = [sum(padded[start : start + per_bar]) for start in range(0, len(padded), per_bar)]
    largest = max(sums)
    if not largest:
        return " " * len(sums)
    return "".join(" " if not value else _BARS[min(7, value * 8 // (largest + 1))] for value in sums)


def bar(share: float, width: int, style: str = "") -> Text:
    """Return a bar of a share between 0 and 1. Without a style, the color warns of a high share."""
    full = round(max(0.0, min(1.0, share)) * width)
    style = style or ("red" if share > 0.95 else "yellow" if share > 0.75 else "green")
    return Text.assemble(("■" * full, style), ("·" * (width - full), "dim"))


def rate(value: float) -> str:
    """Return a rate per second as text; an empty string for 0."""
    return "" if not value else f"{value:,.1f}" if value < 10 else f"{value:,.0f}"


_HEADERS = ("queue*", "ready>", "oldest>", "delayed>", "in flight>", "slots>", "ended/s>", "failed/s>", "last minute")
_STYLES = {"live": "green", "still": "bold red", "unheard": "yellow", "draining": "yellow"}
Row = tuple[str, list[Text]]
Rows = tuple[list[str], list[Row]]
"""Headers (`>` right-aligned, `*` takes the remaining width), and rows by name."""


def queue_rows(data: Snapshot, view: View, width: int) -> Rows:
    spark = max(0, min(60, width - 78))
    needs = {"in flight>": 56, "slots>": 64, "delayed>": 78, "failed/s>": 72, "last minute": 86}
    headers = [header for header in _HEADERS if width >= needs.get(header, 0)]
    is_led = data.hears_workers
    return headers, [(queue.queue, [*_queue_cells(queue, headers, spark, is_led)]) for queue in queues(view, data)]


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


def _running_rows(data: Snapshot, view: View, width: int) -> Rows:
    headers = ["time>", "task*", "queue", "state", *(["done"] if data.done else []), "id"]
    headers += ["worker"] if width >= 110 else []
    rows: list[Row] = []
    for task in data.running:
        if matches(view, task.name, task.queue, task.worker or ""):
            slow = "bold yellow" if task.status == "running" and task.seconds > 60 else ""
            name = one_line(task.name) + (f"  try {task.attempt}" if task.attempt > 1 else "")
            state = Text(task.status, style="cyan" if task.status == "running" else "dim")
            cells = [Text(duration(task.seconds), style=slow), Text(name), Text(one_line(task.queue)), state]
            if data.done:
                cells.append(bar(data.done[task.id], 8, "cyan") if task.id in data.done else Text())
            cells += [Text(task.id[-12:], style="dim"), Text(one_line(task.worker or ""), style="dim")]
            rows.append((task.id, cells[: len(headers)]))
    return headers, rows


def _worker_rows(data: Snapshot, view: View, width: int) -> Rows:
    del width
    rows: list[Row] = []
    for worker in data.workers:
        if matches(view, worker.id, *worker.queues):
            names = Counter(task.name for task in data.running if task.worker == worker.id)
            current = ", ".join(f"{number} {name}" if number > 1 else name for name, number in names.items())
            running = max(worker.running, names.total())  # the leader publishes the fleet only every few seconds
            use = bar(running / worker.slots if worker.slots else 0.0, 8)
            cells = [Text(one_line(worker.id)), Text(worker.state, style=_STYLES.get(worker.state, ""))]
            cells += [Text(f"{running}/{worker.slots}"), use]
            cells += [Text(one_line(current)) if current else Text("idle", style="dim")]
            rows.append((worker.id, cells))
    return ["worker", "state", "slots>", "", "running*"], rows


def _failure_rows(data: Snapshot, view: View, width: int) -> Rows:
    del width
    rows: list[Row] = []
    for group in data.failures:
        if matches(view, group.name, group.kind, group.message):
            age = (data.at - group.last).total_seconds()
            error = Text(one_line(group.kind.rpartition(".")[2]), style="red").append(
                f": {one_line(group.message)}", style="default"
            )
            name = Text(one_line(group.name)).append(f" {group.state}" if group.state else "", style="dim")
            rows.append((group.key, [Text(f"{group.tasks:,}"), Text(duration(max(1.0, age))), name, error]))
    return ["15 min>", "last>", "task", "error*"], rows


def _run_rows(data: Snapshot, view: View, width: int) -> Rows:
    del width
    rows: list[Row] = []
    for run in data.runs:
        if matches(view, run.name, run.workflow or ""):
            share = (run.total - run.open) / run.total if run.total else 0.0
            state = (
                Text("stuck", style="bold red") if run.stuck else Text("cancelling" if run.cancelling else run.status)
            )
            age = (data.at - (run.began_at or run.created_at)).total_seconds()
            cells = [Text(duration(max(0.1, age))), Text(one_line(run.name)), state, bar(share, 12, "cyan")]
            cells += [Text(f"{run.total - run.open:,}/{run.total:,}")]
            cells += [Text(f"{run.failed:,}" if run.failed else "", style="red"), Text(str(run.id)[-12:], style="dim")]
            rows.append((str(run.id), cells))
    return ["time>", "run*", "state", "", "tasks>", "failed>", "id"], rows


ROWS = {Panel.RUNNING: _running_rows, Panel.WORKERS: _worker_rows, Panel.FAILURES: _failure_rows, Panel.RUNS: _run_rows}
