"""Approvals that wait for a person, and the forms that decide them."""

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
    """Which page of approvals to list."""

    cursor: UUID | None = None


class Decided(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A decision about the approval that the page showed."""

    node: str
    why: Annotated[str, Meta(max_length=2_000)] = ""


@actions.post("/{id}/approve", about=RUN)
def approve(api: Api, id: UUID, body: Decided) -> Note:
    """Approve the approval that a run of a flow waits for, if it still does."""
    return _decide(api, id, body, APPROVED, "approved", "the run continues")


@actions.post("/{id}/reject", about=RUN)
def reject(api: Api, id: UUID, body: Decided) -> Note:
    """Reject the approval that a run of a flow waits for, if it still does."""
    return _decide(api, id, body, REJECTED, "rejected", "the run continues or ends, as its flow defines")


def _decide(api: Api, run: UUID, body: Decided, decision: str, word: str, outcome: str) -> Note:
    """Decide an approval. The note tells whether a leader will apply it at once."""
    _check_node(api, run, body.node)
    api.backend.flows.decide(run.bytes, decision, body.why)
    is_led = not is_without_leader(api.backend.tasks.obstacles(run.bytes))
    stored = "and the decision is stored: no scheduler leads, and the run continues when one does"
    return Note(f"{word}: {outcome}" if is_led else f"{word}, {stored}")


def _check_node(api: Api, run: UUID, node: str) -> None:
    """Reject a decision about an approval that was decided before."""
    cursor = api.backend.flows.show(run.bytes).cursor
    if cursor != node:
        position = f"is now at {cursor!r}" if cursor else "has ended"
        decision = api.read(audit.decision, str(run), node)
        by = "it may have been decided by another user" if decision is None else f"it was {decision}"
        detail = f"Run {run} waited at {node!r:.200}, and {position}: {by}."
        raise refused(409, "It is already decided", detail)


class Resolved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The value of the promise that the page showed."""

    value: Any = msgspec.UNSET
    why: Annotated[str, Meta(max_length=2_000)] = ""
    promise: UUID | None = None


class Refused(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The reason for rejecting the promise that the page showed."""

    reason: str = ""
    promise: UUID | None = None


@actions.post("/{id}/promises/{name}/resolve", about=RUN)
def resolve_promise(api: Api, id: UUID, name: str, body: Resolved) -> Steps[code_routes.Settled]:
    """Resolve a promise, if it is still open."""
    if body.value is msgspec.UNSET:
        raise refused(422, "The form is incomplete", "Enter a value, such as true; null is a value, too.")
    _check_promise(api, id, name, body.promise)
    return (yield from code_routes.resolve(api, id, name, code_routes.Resolution(body.value, body.why)))


@actions.post("/{id}/promises/{name}/reject", about=RUN)
def reject_promise(api: Api, id: UUID, name: str, body: Refused) -> Steps[code_routes.Settled]:
    """Reject a promise, if it is still open."""
    _check_promise(api, id, name, body.promise)
    return (yield from code_routes.reject(api, id, name, code_routes.Rejection(body.reason)))


def _check_promise(api: Api, run: UUID, name: str, promise: UUID | None) -> None:
    """Reject a decision about a promise that is no longer open: the next promise of its name is another question."""
    if promise is None or promise.bytes in {
        open_promise for _, open_promise, _ in api.read(open_promises, [run.bytes])
    }:
        return
    decision = api.read(audit.decision, str(run), name)
    by = "it may have been decided by another user" if decision is None else f"it was {decision}"
    raise refused(409, "It is already decided", f"Run {run} no longer waits for this {name!r:.200}: {by}.")


@routes.get("", about=WITHIN)
def list_approvals(api: Api, query: ApprovalsQuery, key_scope: KeyScope) -> Response:
    """Show the approvals that wait for a person."""
    approvals_query = code_routes.ApprovalsQuery(cursor=query.cursor)
    return page("approvals.html", query=query, found=code_routes.list_approvals(api, approvals_query, key_scope))
