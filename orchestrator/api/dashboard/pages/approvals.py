"""Approvals that wait for a person, and the two buttons that decide one."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

import msgspec
from msgspec import Meta
from starlette.responses import Response

from orchestrator.api.context import Api
from orchestrator.api.dashboard.rendering import Note, page, page_actions, pages
from orchestrator.api.key_scope import RUN, WITHIN
from orchestrator.api.problems import refused
from orchestrator.api.routes import code as code_routes
from orchestrator.domain.access import KeyScope
from orchestrator.domain.flow.decisions import APPROVED, REJECTED
from orchestrator.domain.tasks.obstacles import is_without_leader
from orchestrator.sdk.waiting.steps import Steps
from orchestrator.store import audit
from orchestrator.store.code.expectations import open_promises

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
    is_led = not is_without_leader(api.backend.tasks.obstacles(run.bytes))
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


class Resolved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The value of a promise that was open when the page was made."""

    value: Any = msgspec.UNSET
    why: Annotated[str, Meta(max_length=2_000)] = ""
    promise: UUID | None = None


class Refused(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The reason why a promise is rejected that was open when the page was made."""

    reason: str = ""
    promise: UUID | None = None


@actions.post("/{id}/promises/{name}/resolve", about=RUN)
def resolve_promise(api: Api, id: UUID, name: str, body: Resolved) -> Steps[code_routes.Settled]:
    """Resolve a promise, if it is still open."""
    if body.value is msgspec.UNSET:
        raise refused(422, "The form is not complete", "Give a value, such as true; null is a value, too.")
    _check_promise(api, id, name, body.promise)
    return (yield from code_routes.resolve(api, id, name, code_routes.Resolution(body.value, body.why)))


@actions.post("/{id}/promises/{name}/reject", about=RUN)
def reject_promise(api: Api, id: UUID, name: str, body: Refused) -> Steps[code_routes.Settled]:
    """Reject a promise, if it is still open."""
    _check_promise(api, id, name, body.promise)
    return (yield from code_routes.reject(api, id, name, code_routes.Rejection(body.reason)))


def _check_promise(api: Api, run: UUID, name: str, promise: UUID | None) -> None:
    """Refuse a decision about a promise that is no longer open: the next one of its name is another question."""
    if promise is None or promise.bytes in {one for _, one, _ in api.read(open_promises, [run.bytes])}:
        return
    known = api.read(audit.decision, str(run), name)
    by = "somebody else may have decided it" if known is None else f"it was {known}"
    raise refused(409, "It is decided already", f"Run {run} no longer waits for this {name!r:.200}: {by}.")


@routes.get("", about=WITHIN)
def list_approvals(api: Api, query: ApprovalsQuery, key_scope: KeyScope) -> Response:
    """Show what waits for a person."""
    wanted = code_routes.ApprovalsQuery(cursor=query.cursor)
    return page("approvals.html", query=query, found=code_routes.list_approvals(api, wanted, key_scope))
