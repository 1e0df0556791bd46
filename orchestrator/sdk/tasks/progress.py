"""Progress of a running task."""

from __future__ import annotations

from dataclasses import dataclass


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
