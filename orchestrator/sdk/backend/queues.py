"""Queues: pause, limits, purge and retention."""

from __future__ import annotations

from orchestrator.domain.limits.buckets import Rate
from orchestrator.sdk.backend.part import Part, reading
from orchestrator.sdk.calls.queues import QueueCalls
from orchestrator.store.limits import queues


class QueueBackend(Part, QueueCalls):
    """Calls about queues, by name."""

    named = reading(queues.named)
    open_tasks = reading(queues.open_tasks)
    delayed = reading(queues.delayed)

    def pause(self, name: str, paused: bool) -> None:
        with self._connections.changing(f"queue {name!r} was paused or resumed") as connection:
            if queues.set_paused(connection, name, paused):
                self._connections.record(connection, "pause" if paused else "resume", "queue", name)

    def limit(self, name: str, concurrency: int | None, rate: Rate | None) -> None:
        with self._connections.changing(f"queue {name!r} was limited") as connection:
            queues.set_limits(connection, name, concurrency, rate)
            per_second = rate.count / rate.per if rate else None
            self._connections.record(connection, "limit", "queue", name, concurrency=concurrency, rate=per_second)

    def retain(self, name: str, success: float | None, failed: float | None) -> None:
        with self._connections.changing(f"the retention of queue {name!r} was stored", nudge=False) as connection:
            queues.set_retention(connection, name, success, failed)
            self._connections.record(connection, "retain", "queue", name, success=success, failed=failed)

    def purge(self, name: str) -> None:
        with self._connections.changing(f"the request to purge queue {name!r} was stored") as connection:
            queues.ask_purge(connection, name)
            self._connections.record(connection, "purge", "queue", name)
