"""Queues: pause, limit and purge them, and set their retention."""

from __future__ import annotations

from datetime import datetime
from typing import Protocol

from orchestrator.domain.access import Scope
from orchestrator.domain.limits.buckets import Rate
from orchestrator.sdk.calls.checked import Concurrency, FailedRetention, QueueName, SuccessRetention
from orchestrator.sdk.calls.declaring import Kind, call


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
