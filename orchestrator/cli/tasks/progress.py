"""What a task says of itself: how far it has come."""

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
"""Seconds between two looks at a task; its end is announced."""


def ended_processes(calls: Calls, task: bytes) -> TaskProgress | None:
    """Return a task's progress, or None if Redis is away."""
    with suppress(OrchestratorError):
        return calls.tasks.progress(task)
    return None


def bar(progress: TaskProgress) -> str:
    """Return progress as a bar in letters, and how old it is."""
    full = round(_WIDTH * progress.fraction)
    return f"{'█' * full}{'░' * (_WIDTH - full)} {_words(progress)} ({duration(progress.age)} ago)"


def _words(progress: TaskProgress) -> str:
    return f"{progress.fraction * 100:.0f} % {one_line(progress.text)}".rstrip()


# -- watching


@dataclass(frozen=True)
class _Sight:
    """A task as it is watched."""

    status: str
    progress: TaskProgress | None

    def __str__(self) -> str:
        if self.progress is None or self.status in ENDED_TASK_STATES:
            return self.status
        return f"{self.status} {_words(self.progress)}"


def watch_task(app: Orchestrator, task: bytes, name: str, *, quiet: bool) -> str:
    """Show a task until it ends: a bar on a terminal, else a line for every change; return how it ended."""
    if quiet:
        return _follow(app, task, lambda _: None)
    if not on_terminal():
        return _follow(app, task, lambda sight: echo(str(sight)))
    columns = (
        text_column("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        text_column("{task.fields[remark]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console()) as progress:
        line = progress.add_task(name, total=1.0, remark="")

        def show(sight: _Sight) -> None:
            said = sight.progress
            done = 1.0 if sight.status == "success" else said.fraction if said is not None else 0.0
            text = one_line(said.text) if said is not None and sight.status not in ENDED_TASK_STATES else ""
            progress.update(line, completed=done, remark=f"{sight.status} {text}".rstrip())

        return _follow(app, task, show)


def _follow(app: Orchestrator, task: bytes, show: Callable[[_Sight], None]) -> str:
    shown = ""
    while True:
        sight = _Sight(app._client.backend.tasks.status(task), app._client.backend.tasks.progress(task))
        if str(sight) != shown:
            show(sight)
            shown = str(sight)
        if sight.status in ENDED_TASK_STATES:
            return sight.status
        complete(app._client.backend.tasks.wait(task, TimeLimit(_REFRESH)))
