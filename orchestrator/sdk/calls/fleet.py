"""Workers, queues, and messages in quarantine, which could not be decoded or applied."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Protocol

from msgspec import Meta

from orchestrator.domain.access import Scope
from orchestrator.domain.limits.buckets import Rate
from orchestrator.domain.plain import whole
from orchestrator.sdk.calls.checked import Concurrency, FailedRetention, QueueName, SuccessRetention
from orchestrator.sdk.calls.declaring import SYSTEM, Kind, Rest, Wrapped, call
from orchestrator.transport.quarantine import CAP, SetAside

Name = Annotated[str, Meta(min_length=1, max_length=300)]


@dataclass(frozen=True, kw_only=True)
class Drained:
    """A worker that is being told to drain."""

    worker: str
    """Its name: the host and the number of its parent process."""
    processes: tuple[str, ...]
    """The ids of its processes, all of which end."""
    is_heard: bool
    """It has been heard of lately; else it is told when it is back."""


class FleetCalls(Protocol):
    """Calls about workers."""

    @call(Scope.OPERATE, about=SYSTEM, repeatable=True)
    def drain(self, worker: Name) -> Drained:
        """Have a worker take nothing more, finish what it runs, and end: by its name, its host or a process of it."""


Limit = Annotated[int, Meta(ge=1, le=CAP)]
EntryId = Annotated[str, Meta(pattern=whole("[0-9]{1,19}(-[0-9]{1,19})?"))]


class QuarantineCalls(Protocol):
    """Calls about quarantined messages."""

    @call(Scope.OPERATE, about=SYSTEM, repeatable=True)
    def newest(self, limit: Limit) -> list[SetAside]:
        """Return what was set aside last."""

    @call(Scope.OPERATE, about=SYSTEM, repeatable=True)
    def find(self, entry: EntryId) -> SetAside | None:
        """Return one message."""

    @call(
        Scope.OPERATE,
        about=SYSTEM,
        rest=Rest(
            "DELETE /quarantine",
            name="clear_quarantine",
            answer=Wrapped("Cleared", "messages", "How many were dropped."),
            summary="Drop everything that was set aside",
        ),
    )
    def clear(self) -> int:
        """Drop everything; return how much that was."""


class QueueCalls(Protocol):
    """Calls about queues, by name."""

    @call(Scope.OPERATE, about={Kind.QUEUE: "name"}, repeatable=True)
    def pause(self, name: QueueName, paused: bool) -> None:
        """Keep a queue's tasks from being handed out, or let them go again."""

    @call(Scope.OPERATE, about={Kind.QUEUE: "name"}, repeatable=True)
    def limit(self, name: QueueName, concurrency: Concurrency, rate: Rate | None) -> None:
        """Set or lift a queue's limits."""

    @call(Scope.OPERATE, about={Kind.QUEUE: "name"}, repeatable=True)
    def retain(self, name: QueueName, success: SuccessRetention, failed: FailedRetention) -> None:
        """Set how long a queue's tasks are kept after they have ended."""

    @call(Scope.OPERATE, about={Kind.QUEUE: "name"}, expensive=True)
    def purge(self, name: QueueName) -> None:
        """Cancel what waits in a queue."""

    @call(about={Kind.QUEUE: "name"})
    def open_tasks(self, name: QueueName) -> int:
        """Return how many tasks of a queue have not ended."""

    @call(about={Kind.QUEUE: "name"})
    def delayed(self, name: QueueName) -> tuple[int, datetime | None]:
        """Return how many tasks of a queue wait for their time, and when it comes for the first of them."""

    @call(keeps={Kind.QUEUE: ""})
    def named(self) -> list[str]:
        """Return every queue that something stored names."""
