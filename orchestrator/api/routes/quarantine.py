"""Messages in quarantine: list and show them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from orchestrator.api.context import Api
from orchestrator.api.endpoints import Routes
from orchestrator.api.key_scope import WHOLE
from orchestrator.api.shapes import made_from, view_fields
from orchestrator.domain.access import Scope
from orchestrator.domain.plain import whole
from orchestrator.errors import NotFound
from orchestrator.transport.quarantine import CAP, SetAside

routes = Routes("quarantine", "/api/v1/quarantine")

EntryId = Annotated[str, Meta(pattern=whole("[0-9]{1,19}(-[0-9]{1,19})?"), examples=["1731600000000-0"])]


class QuarantineQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many to show."""

    limit: Annotated[int, Meta(ge=1, le=CAP)] = 50


class MessageView(view_fields(SetAside)):  # type: ignore[misc]
    """A message that could not be understood or applied."""


class Messages(msgspec.Struct, frozen=True):
    """Quarantined messages, newest first. The last thousand are kept."""

    messages: list[MessageView]


@routes.get("", about=WHOLE, scope=Scope.OPERATE)
def list_quarantine(api: Api, query: QuarantineQuery) -> Messages:
    """List messages that could not be understood or applied. Nothing waits for them."""
    return Messages([made_from(MessageView, one) for one in api.backend.quarantine.newest(query.limit)])


@routes.get("/{id}", about=WHOLE, scope=Scope.OPERATE)
def show_quarantined(api: Api, id: EntryId) -> MessageView:
    """Show one message: where it stood, why it was refused, and what is in it."""
    found = api.backend.quarantine.find(id)
    if found is None:
        raise NotFound(f"Nothing was set aside under {id}. It may have been cleared, or made room for later ones.")
    return made_from(MessageView, found)
