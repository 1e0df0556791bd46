"""Approvals that wait for a person, and the two buttons that decide one."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

import msgspec
from msgspec import Meta
from starlette.responses import Response

from orchestrator.api.context import Api
from orchestrator.api.dashboard.rendering import Note, page, page_actions, pages
from orchestrator.api.key_scope import RUN, WITHIN
from orchestrator.api.problems import refused
from orchestrator.api.routes import approvals as approval_routes
from orchestrator.domain.access import KeyScope
from orchestrator.domain.flow.decisions import APPROVED, REJECTED
from orchestrator.domain.tasks.obstacles import NO_LEADER
from orchestrator.store import audit

routes, actions = pages("/ui/approvals"), page_actions("/ui/runs")


class ApprovalsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which part of them."""

    cursor: UUID | None = None


class Decided(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A decision about the approval at which a run stood when the page was made."""

    node: str
    why: Annotated[str, Meta(max_length=2_000)] = ""


@actions.post("/{id}/approve", about=RUN)
def approve(api: Api, id: UUID, body: Decided) -> Note:
    """Approve what a run of a flow waits for, if it still does."""
    return _decide(api, id, body, APPROVED, "approved", "the run goes on")


@actions.post("/{id}/reject", about=RUN)
def reject(api: Api, id: UUID, body: Decided) -> Note:
    """Reject what a run of a flow waits for, if it still does."""
    return _decide(api, id, body, REJECTED, "rejected", "the run goes on, or ends, as its flow says")


def _decide(api: Api, run: UUID, body: Decided, decision: str, word: str, outcome: str) -> Note:
    """Decide an approval; say what follows or, if no scheduler leads, that the decision is stored."""
    _check_node(api, run, body.node)
    api.backend.flows.decide(run.bytes, decision, body.why)
    is_led = NO_LEADER not in api.backend.tasks.obstacles(run.bytes)
    stored = "which is stored: no scheduler leads, and the next one that does lets the run go on"
    return Note(f"{word}: {outcome}" if is_led else f"{word}, {stored}")


def _check_node(api: Api, run: UUID, node: str) -> None:
    """Refuse a decision about a node that the run has left: it was decided before."""
    cursor = api.backend.flows.show(run.bytes).cursor
    if cursor != node:
        stands = f"stands at {cursor!r}" if cursor else "has come to its end"
        known = api.read(audit.decision, str(run), node)
        by = "somebody else may have decided it" if known is None else f"it was {known}"
        detail = f"Run {run} waited at {node!r:.200}, and {stands} by now: {by}."
        raise refused(409, "It is decided already", detail)


@routes.get("", about=WITHIN)
def list_approvals(api: Api, query: ApprovalsQuery, key_scope: KeyScope) -> Response:
    """Show what waits for a person."""
    wanted = approval_routes.ApprovalsQuery(cursor=query.cursor)
    return page("approvals.html", query=query, found=approval_routes.list_approvals(api, wanted, key_scope))
