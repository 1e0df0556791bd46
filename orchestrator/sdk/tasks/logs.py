"""Progress and log lines of tasks, as the Python API returns them."""

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
    """The completed share of the work, from 0 to 1."""
    text: str
    """The text of the report."""
    attempt: int
    """The attempt that sent the report."""
    age: float
    """Seconds since the report."""


class LogEntry(msgspec.Struct, frozen=True, array_like=True):
    """A line that a task logged or printed."""

    said_at: float
    """Seconds since 1970, by the worker's clock."""
    attempt: int
    """The attempt that wrote the line."""
    level: str
    """debug, info, warning, error or critical."""
    text: str
    """The text of the line."""
    source: str = ""
    """`stdout`, `stderr`, the name of a logger, or `dropped` where lines are missing; empty for `ctx.log`."""
    task: str = ""
    """The id of the task."""
    step: str = ""
    """The name of the task; for a step of a workflow, the name of the step and its index in a fan-out."""
    entry: str = ""
    """The cursor of the line in the log; pass it to read the lines after this one."""

    @property
    def at(self) -> datetime:
        """When the line was written."""
        return datetime.fromtimestamp(self.said_at, UTC)

    def __str__(self) -> str:
        return self.text


class LogPage(NamedTuple):
    """A page of the log of a task or of a run."""

    lines: list[LogEntry]
    last: str
    """The cursor after which the next page begins."""


def all_lines(read: Callable[[str], LogPage]) -> list[LogEntry]:
    """Read all pages of a log. `read` returns the page after a cursor."""
    lines: list[LogEntry] = []
    last = ""
    while (page := read(last)).lines:
        lines += page.lines
        last = page.last
    return lines
