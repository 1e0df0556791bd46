"""Who did what, and which keys there are."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.responses import Response

from orchestrator.api.context import Api
from orchestrator.api.dashboard.rendering import HTML, page
from orchestrator.api.endpoints import Routes
from orchestrator.api.reach import WHOLE
from orchestrator.api.routes import audit as audit_routes
from orchestrator.domain.access import Scope
from orchestrator.store import keys

routes = Routes("dashboard", "/ui")


class AuditQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which lines to show."""

    who: str | None = None
    act: str | None = None
    kind: str | None = None
    target: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    cursor: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None


@routes.get("/audit", about=WHOLE, scope=Scope.ADMIN, media_type=HTML)
def show_audit(api: Api, query: AuditQuery) -> Response:
    """Show who did what."""
    given = {name: getattr(query, name) for name in query.__struct_fields__}
    found = audit_routes.list_audit(api, audit_routes.AuditQuery(**given))
    return page("audit.html", query=query, found=found)


@routes.get("/keys", about=WHOLE, scope=Scope.ADMIN, media_type=HTML)
def show_keys(api: Api) -> Response:
    """Show the keys that there are, and what they may do."""
    with api.reading() as connection:
        found = keys.list_all(connection)
    return page("keys.html", keys=found)
