"""Messages that were set aside, in Redis."""

from __future__ import annotations

from orchestrator.sdk.backend.connections import Connections
from orchestrator.sdk.calls.quarantine import QuarantineCalls
from orchestrator.transport import quarantine
from orchestrator.transport.quarantine import SetAside


class QuarantineBackend(QuarantineCalls):
    """What people can do with what was set aside."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def newest(self, limit: int) -> list[SetAside]:
        return quarantine.newest(self._connections.redis, self._connections.keys, limit)

    def find(self, entry: str) -> SetAside | None:
        return quarantine.find(self._connections.redis, self._connections.keys, entry)

    def clear(self) -> int:
        with self._connections.writing("the quarantine was cleared", transaction=True) as connection:
            self._connections.record(connection, "clear", "quarantine", "")
            return quarantine.clear(self._connections.redis, self._connections.keys)
