"""Messages that were set aside, in Redis."""

from __future__ import annotations

from orchestrator.sdk.backend.part import Part
from orchestrator.sdk.calls.quarantine import QuarantineCalls
from orchestrator.transport import quarantine
from orchestrator.transport.quarantine import SetAside


class QuarantineBackend(Part, QuarantineCalls):
    """Calls about quarantined messages."""

    def newest(self, limit: int) -> list[SetAside]:
        return quarantine.newest(self._connections.redis, self._connections.keys, limit)

    def find(self, entry: str) -> SetAside | None:
        return quarantine.find(self._connections.redis, self._connections.keys, entry)

    def clear(self) -> int:
        with self._connections.changing("the quarantine was cleared", nudge=False) as connection:
            self._connections.record(connection, "clear", "quarantine", "")
            return quarantine.clear(self._connections.redis, self._connections.keys)
