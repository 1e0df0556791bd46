"""Messages that were set aside, in Redis."""

from __future__ import annotations

from orchestrator.sdk.backend.connections import Connections
from orchestrator.transport import quarantine
from orchestrator.transport.quarantine import SetAside


class QuarantineBackend:
    """What people can do with what was set aside."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def newest(self, limit: int) -> list[SetAside]:
        """Return what was set aside last."""
        return quarantine.newest(self._connections.redis, self._connections.keys, limit)

    def find(self, entry: str) -> SetAside | None:
        """Return one message."""
        return quarantine.find(self._connections.redis, self._connections.keys, entry)

    def clear(self) -> int:
        """Drop everything; return how much that was."""
        with self._connections.writing("what was set aside was dropped", transaction=True) as connection:
            self._connections.record(connection, "clear", "quarantine", "")
            return quarantine.clear(self._connections.redis, self._connections.keys)
