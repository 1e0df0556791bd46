"""Runs of workflows as code: signals, promises, queries, updates, histories and resets."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any
from uuid import UUID

import msgspec
from msgspec import Meta
from starlette.responses import Response

from orchestrator.api.bodies import ONE_VALUE
from orchestrator.api.context import MAX_INT, MAX_PAGE_SIZE, PAGE_SIZE, Api, Asked, Page
from orchestrator.api.endpoints import Routes
from orchestrator.api.key_scope import RUN, WITHIN
from orchestrator.api.redacting import hides
from orchestrator.api.routes.workflows import Started
from orchestrator.domain.access import KeyScope, Scope
from orchestrator.domain.code.resets import preview
from orchestrator.domain.tasks.parameters import by_name
from orchestrator.errors import ResultTimeout
from orchestrator.sdk.values.display import as_json, call_of
from orchestrator.sdk.values.payload import decode_value, encode_call, encode_value
from orchestrator.sdk.waiting.steps import Steps
from orchestrator.store import insights
from orchestrator.store.fleet import parameters_of
from orchestrator.store.insights import ApprovalView

routes = Routes("workflows as code", "/api/v1/runs")

Timeout = Annotated[float, Meta(ge=0, le=300)]


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value."""

    value: Any = None


class Resolution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The value of a resolved promise."""

    value: Any = None
    why: Annotated[str, Meta(max_length=2_000)] = ""
    """The reason for the audit log, stored with the value."""


class Rejection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The reason of a rejected promise."""

    reason: str = ""
    """The reason that the code receives."""
    why: Annotated[str, Meta(max_length=2_000)] = ""
    """A note for the audit log, stored with the reason."""


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of a query or an update."""

    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: Timeout = 30.0
    """Seconds to wait for the answer."""


class Answer(msgspec.Struct, frozen=True):
    """The answer of a query or update."""

    result: Any


@hides(Answer)
def _hidden(_: Api, found: Answer) -> Answer:
    return found  # built from redacted values


def _answer(api: Api, run: UUID, data: bytes) -> Answer:
    return Answer(as_json(api.redaction_of_run(run).redacted(decode_value(data))))


class Settled(msgspec.Struct, frozen=True):
    """The result of resolving or rejecting a promise."""

    settled: bool
    """Whether the code waited for the promise. If not, the value is kept for the first promise of this name that the
    code makes, or no scheduler has applied it yet, as the note says."""
    waits: list[str]
    """If the value is kept: the names of the first promises that the code does wait for."""
    note: str
    """A sentence that describes the result."""


def _settled(name: str, answer: Steps[bytes], outcome: str) -> Steps[Settled]:
    try:
        waits = decode_value((yield from answer))
    except ResultTimeout as timeout:
        return Settled(False, [], str(timeout))
    if waits is None:
        return Settled(True, [], f"the code waited for {name!r}, and {outcome}")
    others = f"; it waits for {', '.join(map(repr, waits))}" if waits else ""
    return Settled(
        False, list(waits), f"the code does not wait for {name!r}{others}: the decision is kept in case it does later"
    )


def _is_unsettled(answer: Settled) -> bool:
    return not answer.settled


class ResetTo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Up to which event a run is repeated."""

    to: Annotated[int, Meta(ge=1, le=MAX_INT)]
    """The last event to keep."""
    reason: str = ""


class ResetQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Up to which event a run would be repeated."""

    to: Annotated[int, Meta(ge=1, le=MAX_INT)] = 1
    """The last event to keep; with 1, only the start of the run is kept."""


class ResetLine(msgspec.Struct, frozen=True):
    """A number of tasks, timers or other items of one kind and name with the same outcome."""

    number: int
    what: str
    fate: str
    """The outcome of these items, in words."""


class ResetPreview(msgspec.Struct, frozen=True):
    """A preview of a reset."""

    lines: list[ResetLine]


@routes.get("/{id}/history", about=RUN, is_expensive=True)
def history(api: Api, id: UUID) -> Response:
    """Show the history of a run of a workflow as code, in the format for replay tests."""
    text = api.backend.code.history(id.bytes).to_json(api.redaction_of_run(id))
    return Response(text, media_type="application/json")


@routes.post("/{id}/signals/{name}", about=RUN, status=202, examples=[{"value": {"approved": True}}])
def signal(api: Api, id: UUID, name: str, body: Value) -> Asked:
    """Send a signal. It is kept until the code receives it."""
    api.backend.code.signal(id.bytes, name, encode_value(body.value, f"Signal {name!r}", api.settings.max_payload))
    return Asked(id, "signal")


@routes.post("/{id}/promises/{name}/resolve", about=RUN, examples=[{"value": "yes"}], is_pending=_is_unsettled)
def resolve(api: Api, id: UUID, name: str, body: Resolution) -> Steps[Settled]:
    """Resolve the oldest open promise of a name, or the next one if none is open.

    Only workers know which type the code expects: an unsuitable value raises PayloadError in the code, where the
    promise is awaited.
    """
    data = encode_value(body.value, f"Promise {name!r}", api.settings.max_payload)
    answer = api.backend.code.resolve(id.bytes, name, data, body.why)
    return (yield from _settled(name, answer, "continues"))


@routes.post("/{id}/promises/{name}/reject", about=RUN, examples=[{"reason": "out of stock"}], is_pending=_is_unsettled)
def reject(api: Api, id: UUID, name: str, body: Rejection) -> Steps[Settled]:
    """Reject the oldest open promise of a name, or the next one if none is open."""
    answer = api.backend.code.reject(id.bytes, name, body.reason, body.why)
    return (yield from _settled(name, answer, "receives PromiseRejected"))


@routes.post("/{id}/queries/{name}", about=RUN, scope=Scope.READ, examples=[{"args": ["items"]}], max_body=ONE_VALUE)
def query_run(api: Api, id: UUID, name: str, body: Question) -> Steps[Answer]:
    """Query the code of a run."""
    payload = encode_call(name, body.args, body.kwargs, api.settings.max_payload, "query")
    return _answer(api, id, (yield from api.backend.code.query(id.bytes, name, payload, body.timeout)))


@routes.post("/{id}/updates/{name}", about=RUN, examples=[{"kwargs": {"amount": 5}}])
def update_run(api: Api, id: UUID, name: str, body: Question) -> Steps[Answer]:
    """Send an update to the code of a run, and wait for its answer."""
    payload = encode_call(name, body.args, body.kwargs, api.settings.max_payload, "update")
    return _answer(api, id, (yield from api.backend.code.update(id.bytes, name, payload, body.timeout)))


@routes.post("/{id}/reset", about=RUN, status=201, examples=[{"to": 12, "reason": "the address was wrong"}])
def reset(api: Api, id: UUID, body: ResetTo) -> Steps[Started]:
    """Reset a run: start a new run that repeats it up to an event, and continues from there."""
    return Started(UUID(bytes=(yield from api.backend.code.reset(id.bytes, body.to, body.reason))))


@routes.get("/{id}/reset", about=RUN, is_expensive=True)
def preview_reset(api: Api, id: UUID, query: ResetQuery) -> ResetPreview:
    """Preview a reset: show what would happen to each task, timer and other item. Nothing is changed."""
    lines = preview(id.bytes, api.backend.code.history(id.bytes).events, query.to)
    return ResetPreview([ResetLine(line.number, line.what, str(line.fate)) for line in lines])


approval_routes = Routes("runs", "/api/v1/approvals")


class ApprovalsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which page of approvals to list."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE_SIZE)] = PAGE_SIZE
    """Runs on a page, each with all its approvals."""
    cursor: UUID | None = None
    """`next` of the previous page."""


@approval_routes.get("", about=WITHIN)
def list_approvals(api: Api, query: ApprovalsQuery, key_scope: KeyScope) -> Page[ApprovalView]:
    """List promises and approvals that wait for a decision, of the oldest runs first."""
    found = api.read(insights.page_of_approvals, limit=query.limit, after=query.cursor, within=key_scope.workflows)
    return Page([_redacted_approval(api, approval) for approval in found.approvals], found.next)


def _redacted_approval(api: Api, approval: ApprovalView) -> ApprovalView:
    if approval.kind != "promise":
        hidden = api.redaction_of_run(approval.run) if approval.redact or api.redaction else api.redaction
        return dataclasses.replace(approval, input=hidden.redacted(as_json(approval.input)))
    arguments, keywords = api.redaction_of_run(approval.run).redacted_call(*call_of(approval.input or b""))
    parameters = api.recent.get(
        ("parameters", approval.workflow), 30.0, lambda: api.read(parameters_of, approval.workflow)
    )
    named = None if parameters is None else by_name(parameters, arguments, keywords)
    if named is None:  # no live worker has announced the parameter names
        named = {str(number): value for number, value in enumerate(arguments, 1)} | keywords
    return dataclasses.replace(approval, input=as_json(named) if named else None)
