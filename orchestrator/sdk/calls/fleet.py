"""Calls about workers, queues, and quarantined messages, which could not be decoded or applied."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Protocol

from msgspec import Meta

from orchestrator.domain.access import Scope
from orchestrator.domain.limits.buckets import Rate
from orchestrator.domain.plain import anchored
from orchestrator.sdk.calls.checked import Concurrency, FailedRetention, QueueName, SuccessRetention
from orchestrator.sdk.calls.declaring import SYSTEM, Kind, Rest, Wrapped, call
from orchestrator.transport.quarantine import CAP, SetAside

Name = Annotated[str, Meta(min_length=1, max_length=300)]


@dataclass(frozen=True, kw_only=True)
class Drained:
    """A worker that was asked to drain."""

    worker: str
    """The name of the worker: its host and the number of its parent process."""
    processes: tuple[str, ...]
    """The ids of the worker's processes, all of which will end."""
    is_heard: bool
    """Whether the worker has sent a recent heartbeat. Otherwise it drains as soon as it is back."""


class FleetCalls(Protocol):
    """Calls about workers."""

    @call(Scope.OPERATE, about=SYSTEM, repeatable=True)
    def drain(self, worker: Name) -> Drained:
        """Drain a worker, given by name, host or process: it takes no more tasks, finishes those it has, and ends."""


Limit = Annotated[int, Meta(ge=1, le=CAP)]
EntryId = Annotated[str, Meta(pattern=anchored("[0-9]{1,19}(-[0-9]{1,19})?"))]


class QuarantineCalls(Protocol):
    """Calls about quarantined messages."""

    @call(Scope.OPERATE, about=SYSTEM, repeatable=True)
    def newest(self, limit: Limit) -> list[SetAside]:
        """Return the newest quarantined messages."""

    @call(Scope.OPERATE, about=SYSTEM, repeatable=True)
    def find(self, entry: EntryId) -> SetAside | None:
        """Return one quarantined message."""

    @call(
        Scope.OPERATE,
        about=SYSTEM,
        rest=Rest(
            "DELETE /quarantine",
            name="clear_quarantine",
            answer=Wrapped("Cleared", "messages", "How many were dropped."),
            summary="Delete all messages in the quarantine",
        ),
    )
    def clear(self) -> int:
        """Drop all quarantined messages and return their number."""


class QueueCalls(Protocol):
    """Calls about queues, by name."""

    @call(Scope.OPERATE, about={Kind.QUEUE: "name"}, repeatable=True)
    def pause(self, name: QueueName, paused: bool) -> None:
        """Pause or resume a queue."""

    @call(Scope.OPERATE, about={Kind.QUEUE: "name"}, repeatable=True)
    def limit(self, name: QueueName, concurrency: Concurrency, rate: Rate | None) -> None:
        """Set or remove the limits of a queue."""

    @call(Scope.OPERATE, about={Kind.QUEUE: "name"}, repeatable=True)
    def retain(self, name: QueueName, success: SuccessRetention, failed: FailedRetention) -> None:
        """Set how long ended tasks of a queue are kept."""

    @call(Scope.OPERATE, about={Kind.QUEUE: "name"}, expensive=True)
    def purge(self, name: QueueName) -> None:
        """Cancel all waiting tasks of a queue."""

    @call(about={Kind.QUEUE: "name"})
    def open_tasks(self, name: QueueName) -> int:
        """Return the number of tasks in a queue that have not ended."""

    @call(about={Kind.QUEUE: "name"})
    def delayed(self, name: QueueName) -> tuple[int, datetime | None]:
        """Return the number of delayed tasks in a queue, and the earliest time at which a task is due."""

    @call(keeps={Kind.QUEUE: ""})
    def named(self) -> list[str]:
        """Return all queues that tasks, workers, workflows or settings name."""
