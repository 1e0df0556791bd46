"""The audit log."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from orchestrator.api.context import LARGEST_PAGE, PAGE, Api
from orchestrator.api.endpoints import Routes
from orchestrator.api.key_scope import WHOLE
from orchestrator.api.shapes import filter_fields, made_from
from orchestrator.domain.access import Scope
from orchestrator.store import audit
from orchestrator.store.audit import AuditEntry, AuditFilter

routes = Routes("audit", "/api/v1/audit")


class AuditQuery(filter_fields(AuditFilter)):  # type: ignore[misc]
    """Which lines to show, and how many."""

    cursor: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    """`next` of the page before."""
    limit: Annotated[int, Meta(ge=1, le=LARGEST_PAGE)] = PAGE


class AuditPage(msgspec.Struct, frozen=True):
    """Some lines of the audit log, newest first.

    A page looks at some thousand lines: of what is rare, it may have few, or none, and yet not be the last.
    """

    items: list[AuditEntry]
    next: int | None
    """Give it as `cursor` to get the next page; null on the last one."""


@routes.get("", about=WHOLE, scope=Scope.ADMIN)
def list_audit(api: Api, query: AuditQuery) -> AuditPage:
    """Show who did what to which task, run, queue, schedule, workflow or key, newest first.

    Enqueueing tasks, starting runs and posting events is not in it.
    """
    found = api.read(audit.page, made_from(AuditFilter, query), limit=query.limit, before=query.cursor)
    return AuditPage(found.lines, found.next)
