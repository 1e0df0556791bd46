"""Progress that a task reports, and `tasks watch`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeElapsedColumn

from orchestrator.cli.terminal.output import console, echo, on_terminal, text_column
from orchestrator.domain.states import ENDED_TASK_STATES
from orchestrator.errors import OrchestratorError
from orchestrator.monitoring.times import duration
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.calls.interface import Calls
from orchestrator.sdk.tasks.logs import TaskProgress
from orchestrator.sdk.waiting.steps import complete
from orchestrator.terminal_safe import one_line
from orchestrator.time_limits import TimeLimit

_WIDTH = 20
_REFRESH = 0.25
"""Seconds between two reads of a watched task; its end is notified."""


def read_progress(calls: Calls, task: bytes) -> TaskProgress | None:
    """Return a task's progress, or None if it cannot be read."""
    with suppress(OrchestratorError):
        return calls.tasks.progress(task)
    return None


def bar(progress: TaskProgress) -> str:
    """Return progress as a bar of characters, with its age."""
    full = round(_WIDTH * progress.fraction)
    return f"{'█' * full}{'░' * (_WIDTH - full)} {_percent_text(progress)} ({duration(progress.age)} ago)"


def _percent_text(progress: TaskProgress) -> str:
    return f"{progress.fraction * 100:.0f} % {one_line(progress.text)}".rstrip()


# -- watching


@dataclass(frozen=True)
class _Sample:
    """The state of a watched task at one time."""

    status: str
    progress: TaskProgress | None

    def __str__(self) -> str:
        if self.progress is None or self.status in ENDED_TASK_STATES:
            return self.status
        return f"{self.status} {_percent_text(self.progress)}"


def watch_task(app: Orchestrator, task: bytes, name: str, *, quiet: bool) -> str:
    """Follow a task until it ends: with a bar on a terminal, else a line per change. Return its final state."""
    if quiet:
        return _follow(app, task, lambda _: None)
    if not on_terminal():
        return _follow(app, task, lambda sample: echo(str(sample)))
    columns = (
        text_column("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        text_column("{task.fields[remark]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console()) as progress:
        line = progress.add_task(name, total=1.0, remark="")

        def show(sample: _Sample) -> None:
            progress_ = sample.progress
            fraction = 1.0 if sample.status == "success" else progress_.fraction if progress_ is not None else 0.0
            text = one_line(progress_.text) if progress_ is not None and sample.status not in ENDED_TASK_STATES else ""
            progress.update(line, completed=fraction, remark=f"{sample.status} {text}".rstrip())

        return _follow(app, task, show)


def _follow(app: Orchestrator, task: bytes, show: Callable[[_Sample], None]) -> str:
    printed = ""
    while True:
        sample = _Sample(app._client.backend.tasks.status(task), app._client.backend.tasks.progress(task))
        if str(sample) != printed:
            show(sample)
            printed = str(sample)
        if sample.status in ENDED_TASK_STATES:
            return sample.status
        complete(app._client.backend.tasks.wait(task, TimeLimit(_REFRESH)))
