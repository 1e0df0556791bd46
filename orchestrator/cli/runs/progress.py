"""Live progress of a run or a backfill."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from orchestrator.cli.runs.view import Line, changes, draw, to_lines
from orchestrator.cli.terminal.output import console, counting_bar, echo, on_terminal, text_column
from orchestrator.cli.terminal.reading import ObstacleNotices
from orchestrator.domain.states import ENDED_RUN_STATES
from orchestrator.errors import ResultTimeout
from orchestrator.monitoring.times import present
from orchestrator.sdk.tasks.handle import RunHandle
from orchestrator.store.insights import RunView, StepView
from orchestrator.store.schedules.backfills import BackfillView
from orchestrator.terminal_safe import one_line

_INTERVAL = 0.25
_REFRESH = 0.5
"""Seconds between two reads of a run's steps; its end is notified."""

T = TypeVar("T")


def watch_run(read: Callable[[], RunView], *, quiet: bool = False) -> RunView:
    """Show a run until it ends: a bar on a terminal, else a line per change. Return the ended run."""
    if quiet or not on_terminal():
        return _follow(read, lambda run: None if quiet else echo(_line(run)), _has_ended)

    def bar_of(run: RunView) -> dict[str, Any]:
        return {"description": run.name, "total": run.total, "completed": run.total - run.open, "remark": _remark(run)}

    return _with_bar(read, bar_of, _has_ended)


def watch_workflow(handle: RunHandle[Any], read: Callable[[], tuple[RunView, Sequence[StepView]]]) -> RunView:
    """Draw a workflow's run until it ends: live on a terminal, else a line per change. Return the ended run."""
    return watch_drawn(handle, read, draw, _ChangePrinter())


def watch_drawn(
    handle: RunHandle[Any],
    read: Callable[[], tuple[RunView, T]],
    draw: Callable[[RunView, T, datetime, int | None, int], RenderableType],
    print_change: Callable[[RunView, T, datetime], None],
) -> RunView:
    """Draw a run with its details until it ends; without a terminal, call `print_change` at each change."""
    if not on_terminal():
        return _follow_closely(handle, read, print_change, None)
    out = console()
    with Live(console=out, auto_refresh=False, vertical_overflow="crop") as live:

        def show(run: RunView, details: T, now: datetime) -> None:
            height = None if run.status in ENDED_RUN_STATES else out.height  # the final picture may scroll
            live.update(draw(run, details, now, height, out.width), refresh=True)

        return _follow_closely(handle, read, show, lambda text: out.print(Text(text, style="yellow")))


def watch_backfill(read: Callable[[], BackfillView]) -> BackfillView:
    """Show a backfill until its last run has ended: a bar on a terminal, else a line per change."""

    def bar_of(view: BackfillView) -> dict[str, Any]:
        name = f"{view.workflow}/{view.name}"
        return {"description": name, "total": view.total, "completed": view.done, "remark": _problem_text(view)}

    if not on_terminal():
        return _follow(read, lambda view: echo(backfill_line(view)), lambda view: view.is_over)
    return _with_bar(read, bar_of, lambda view: view.is_over)


def backfill_line(view: BackfillView) -> str:
    return one_line(f"{view.workflow}/{view.name} {view.done}/{view.total} {_problem_text(view)}".rstrip())


def _problem_text(view: BackfillView) -> str:
    counts = {"running": view.running, "stuck": view.stuck, "failed": view.failed, "already run": view.had_run}
    parts = [f"{count} {what}" for what, count in counts.items() if count]
    return ", ".join(part for part in (*parts, view.error or "") if part)


class _ChangePrinter:
    """Prints a line for everything that has changed since the last call."""

    def __init__(self) -> None:
        self._lines: list[Line] = []

    def __call__(self, run: RunView, steps: Sequence[StepView], now: datetime) -> None:
        lines = to_lines(steps)
        for line in changes(self._lines, lines, now):
            echo(line)
        self._lines = lines
        if run.status in ENDED_RUN_STATES:
            echo(_line(run))


def _follow_closely(
    handle: RunHandle[Any],
    read: Callable[[], tuple[RunView, T]],
    show: Callable[[RunView, T, datetime], None],
    say: Callable[[str], None] | None,
) -> RunView:
    notices = ObstacleNotices(partial(handle._client.backend.tasks.obstacles, handle._id), say)
    while True:
        run, details = read()
        show(run, details, present())
        if run.status in ENDED_RUN_STATES:
            return run
        with suppress(ResultTimeout):
            handle.wait_ended(_REFRESH)
        notices.check()


def _has_ended(run: RunView) -> bool:
    return run.status in ENDED_RUN_STATES


def _with_bar(read: Callable[[], T], bar_of: Callable[[T], dict[str, Any]], is_over: Callable[[T], bool]) -> T:
    with counting_bar(text_column("{task.fields[remark]}")) as progress:
        bar = progress.add_task("", remark="")
        return _follow(read, lambda value: progress.update(bar, **bar_of(value)), is_over)


def _follow(read: Callable[[], T], show: Callable[[T], None], is_over: Callable[[T], bool]) -> T:
    """Call `show` at each change until the end; return the final value."""
    previous: T | None = None
    while True:
        value = read()
        if value != previous:
            show(value)
            previous = value
        if is_over(value):
            return value
        time.sleep(_INTERVAL)


def _line(run: RunView) -> str:
    return one_line(f"{run.name} {run.total - run.open}/{run.total} {_remark(run)}")


def _remark(run: RunView) -> str:
    parts = [
        f"{count} {what}"
        for what, count in (("failed", run.failed), ("cancelled", run.cancelled), ("skipped", run.skipped))
        if count
    ]
    return ", ".join([run.shown_status, *parts])
