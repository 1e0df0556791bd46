"""Messages in quarantine, which could not be decoded or applied."""

from __future__ import annotations

from typing import Annotated, Protocol

from msgspec import Meta

from orchestrator.domain.access import Scope
from orchestrator.domain.plain import whole
from orchestrator.sdk.calls.declaring import SYSTEM, Rest, Wrapped, call
from orchestrator.transport.quarantine import CAP, SetAside

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
