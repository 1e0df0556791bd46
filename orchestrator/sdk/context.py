"""Who is running: the task around the current code, if any."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from orchestrator.domain.task import NewTask


@dataclass(frozen=True, kw_only=True)
class TaskContext:
    """The attempt that is running. A parameter annotated with this type receives it."""

    task_id: UUID
    task_name: str
    attempt: int
    queue: str
    run_id: UUID | None = None
    position: int | None = None
    """Place among the tasks of its run."""
    workflow_name: str | None = None
    """The workflow that it is a step of; `task_name` is then the step's name."""
    parallel_index: int | None = None
    """Place in its fan-out."""
    parallel_count: int | None = None
    """Size of its fan-out."""


class Outlet(Protocol):
    """The way out of a worker, which has no database: tasks that a task enqueues go through the events stream."""

    def context(self) -> TaskContext:
        """Return what the running task may know of itself."""

    def next_id(self) -> bytes:
        """Return the id of the next task that this attempt enqueues; the same for every repetition of the attempt."""

    def enqueue(self, tasks: Sequence[NewTask]) -> None:
        """Hand tasks to the leader, and return once it has them in Postgres."""

    def enqueue_on_success(self, tasks: Sequence[NewTask]) -> None:
        """Keep tasks until this attempt succeeds; they exist only if it does."""


_outlet: ContextVar[Outlet | None] = ContextVar("orchestrator_outlet", default=None)


def current_task() -> TaskContext | None:
    """Return the context of the task around the current code, or None outside of one."""
    outlet = _outlet.get()
    return None if outlet is None else outlet.context()


def current_outlet() -> Outlet | None:
    """Return the way out of the worker, or None outside of a task."""
    return _outlet.get()


def enter(outlet: Outlet | None) -> None:
    """Make this the outlet of the task that the current thread or coroutine runs; None when it has ended."""
    _outlet.set(outlet)
