"""What waits for a person: what it is about, since when, and the two buttons that decide it."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

import msgspec
from msgspec import Meta
from starlette.responses import Response

from orchestrator.api.context import Api, Asked
from orchestrator.api.dashboard.rendering import page, pages
from orchestrator.api.key_scope import WITHIN
from orchestrator.api.problems import refused
from orchestrator.api.routes import approvals as approval_routes
from orchestrator.api.routes import flows as flow_routes
from orchestrator.domain.access import KeyScope
from orchestrator.domain.tasks.obstacles import NO_LEADER
from orchestrator.store import audit, insights

routes = pages("/ui/approvals")


class ApprovalsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which part of them."""

    cursor: UUID | None = None


class Decided(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is decided of the approval at which a run stood when the page was made."""

    node: str
    why: Annotated[str, Meta(max_length=2_000)] = ""


class Stored(msgspec.Struct, frozen=True):
    """A decision that is stored while no scheduler leads."""

    note: str


def approve(api: Api, id: UUID, body: Decided) -> Asked | Stored:
    """Approve what a run of a flow waits for, if it still does."""
    _check_place(api, id, body.node)
    return _told(api, flow_routes.approve_flow(api, id, flow_routes.Decision(body.why)), "approved")


def reject(api: Api, id: UUID, body: Decided) -> Asked | Stored:
    """Reject what a run of a flow waits for, if it still does."""
    _check_place(api, id, body.node)
    return _told(api, flow_routes.reject_flow(api, id, flow_routes.Decision(body.why)), "rejected")


def _told(api: Api, asked: Asked, decision: str) -> Asked | Stored:
    """Return what was asked for or, if no scheduler leads, that it is stored."""
    with api.reading() as connection:
        is_led = NO_LEADER not in insights.find_obstacles(connection, asked.id.bytes)
    said = f"{decision}, which is stored: no scheduler leads, and the next one that does lets the run go on"
    return asked if is_led else Stored(said)


def _check_place(api: Api, run: UUID, node: str) -> None:
    """Refuse a decision about a node that the run has left: somebody else decided first."""
    cursor = api.backend.flows.show(run.bytes).cursor
    if cursor != node:
        stands = f"stands at {cursor!r}" if cursor else "has come to its end"
        with api.reading() as connection:
            known = audit.decision(connection, str(run), node)
        by = "somebody else may have decided it" if known is None else f"it was {known}"
        detail = f"Run {run} waited at {node!r:.200}, and {stands} by now: {by}."
        raise refused(409, "It is decided already", detail)


@routes.get("", about=WITHIN)
def list_approvals(api: Api, query: ApprovalsQuery, key_scope: KeyScope) -> Response:
    """Show what waits for a person."""
    wanted = approval_routes.ApprovalsQuery(cursor=query.cursor)
    return page("approvals.html", query=query, found=approval_routes.list_approvals(api, wanted, key_scope))
