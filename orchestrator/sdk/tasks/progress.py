"""Progress of a running task."""

from __future__ import annotations

from dataclasses import dataclass

from redis import Redis

from orchestrator.errors import OrchestratorError
from orchestrator.transport import journal
from orchestrator.transport.keys import Keys


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


def read_progress(redis: Redis, keys: Keys, task: bytes) -> TaskProgress | None:
    """Return a task's last progress, or None if it has said nothing, or long ago."""
    try:
        found = journal.read_progress(redis, keys, task)
    except journal.LOSSES as error:
        raise OrchestratorError(f"Redis, which keeps the progress of tasks, cannot tell: {error}") from error
    if found is None:
        return None
    mark, age = found
    return TaskProgress(fraction=mark.fraction, text=mark.text, attempt=mark.attempt, age=age)
