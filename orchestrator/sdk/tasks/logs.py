"""Progress and log lines of tasks, as programs read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec


@dataclass(frozen=True, kw_only=True)
class TaskProgress:
    """The last progress that a task reported with `ctx.progress`."""

    fraction: float
    """From 0 to 1."""
    text: str
    """The text of the progress."""
    attempt: int
    """The attempt that said so."""
    age: float
    """Seconds since then."""


class LogEntry(msgspec.Struct, frozen=True, array_like=True):
    """A line that a task said, printed or logged."""

    said_at: float
    """Seconds since 1970, by the worker's clock."""
    attempt: int
    """The attempt that said it."""
    level: str
    """debug, info, warning, error or critical."""
    text: str
    """Its text."""
    source: str = ""
    """`stdout`, `stderr`, the name of a logger, or `dropped` where lines are missing; nothing for `ctx.log`."""
    task: str = ""
    """The id of the task."""
    step: str = ""
    """The name of the task; of a step of a workflow, that of the step, with its place in a fan-out."""
    entry: str = ""
    """Its place in the log: what comes after it can be asked for."""

    @property
    def at(self) -> datetime:
        """When it was said."""
        return datetime.fromtimestamp(self.said_at, UTC)

    def __str__(self) -> str:
        return self.text


class LogPage(NamedTuple):
    """Some of what a task, or the tasks of a run, said."""

    lines: list[LogEntry]
    last: str
    """The entry after which the next page begins."""


def all_lines(read: Callable[[str], LogPage]) -> list[LogEntry]:
    """Return all lines that there are, page by page; `read` returns those after an entry."""
    lines: list[LogEntry] = []
    last = ""
    while (page := read(last)).lines:
        lines += page.lines
        last = page.last
    return lines
