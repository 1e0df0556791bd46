"""Queues: paused, limited, emptied, and told how long to keep what has ended."""

from __future__ import annotations

from datetime import datetime

from orchestrator.domain.limits.buckets import Rate
from orchestrator.sdk.backend.connections import Connections
from orchestrator.sdk.calls.queues import QueueCalls
from orchestrator.store.limits import queues


class QueueBackend(QueueCalls):
    """What a client can do with queues, by name."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def pause(self, name: str, paused: bool) -> None:
        with self._connections.writing(f"queue {name!r} was paused or resumed", transaction=True) as connection:
            has_changed = queues.set_paused(connection, name, paused)
            if has_changed:
                self._connections.record(connection, "pause" if paused else "resume", "queue", name)
        if has_changed:
            self._connections.nudge()

    def limit(self, name: str, concurrency: int | None, rate: Rate | None) -> None:
        with self._connections.writing(f"queue {name!r} was limited", transaction=True) as connection:
            queues.set_limits(connection, name, concurrency, rate)
            per_second = rate.count / rate.per if rate else None
            self._connections.record(connection, "limit", "queue", name, concurrency=concurrency, rate=per_second)
        self._connections.nudge()

    def retain(self, name: str, success: float | None, failed: float | None) -> None:
        what = f"the retention of queue {name!r} was stored"
        with self._connections.writing(what, transaction=True) as connection:
            queues.set_retention(connection, name, success, failed)
            self._connections.record(connection, "retain", "queue", name, success=success, failed=failed)

    def purge(self, name: str) -> None:
        what = f"the request to purge queue {name!r} was stored"
        with self._connections.writing(what, transaction=True) as connection:
            queues.ask_purge(connection, name)
            self._connections.record(connection, "purge", "queue", name)
        self._connections.nudge()

    def named(self) -> list[str]:
        with self._connections.reading() as connection:
            return sorted(queues.named(connection))

    def open_tasks(self, name: str) -> int:
        with self._connections.reading() as connection:
            return queues.open_tasks(connection, name)

    def delayed(self, name: str) -> tuple[int, datetime | None]:
        with self._connections.reading() as connection:
            return queues.delayed(connection, name)
