"""Runs of workflows as code: signals, promises, queries, updates, histories and resets."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any
from uuid import UUID

import msgspec
from msgspec import Meta
from starlette.responses import Response

from orchestrator.api.bodies import ONE_VALUE
from orchestrator.api.context import LARGEST, LARGEST_PAGE, PAGE, Api, Asked, Page
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
    """The value."""

    value: Any = None


class Resolution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The value of a resolved promise."""

    value: Any = None
    why: Annotated[str, Meta(max_length=2_000)] = ""
    """Stands in the audit log, beside the value."""


class Rejection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The reason of a rejected promise."""

    reason: str = ""
    """The value for the code."""
    why: Annotated[str, Meta(max_length=2_000)] = ""
    """Stands in the audit log, beside the reason."""


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of a query or an update."""

    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: Timeout = 30.0
    """Seconds to wait for the answer."""


class Answer(msgspec.Struct, frozen=True):
    """The answer of the code."""

    result: Any


@hides(Answer)
def _hidden(_: Api, found: Answer) -> Answer:
    return found  # it is made of what has been hidden


def _answer(api: Api, run: UUID, data: bytes) -> Answer:
    return Answer(as_json(api.redaction_of_run(run).shown(decode_value(data))))


class Settled(msgspec.Struct, frozen=True):
    """The result of resolving or rejecting a promise."""

    settled: bool
    """Whether the code waited for it. If not, it is kept for the first promise of this name that the code makes; or no
    scheduler has come to it yet, as the note says."""
    waits: list[str]
    """Where it is kept: the names of the first promises that the code does wait for."""
    note: str
    """The same in words."""


def _settled(name: str, answer: Steps[bytes], outcome: str) -> Steps[Settled]:
    try:
        waits = decode_value((yield from answer))
    except ResultTimeout as late:
        return Settled(False, [], str(late))
    if waits is None:
        return Settled(True, [], f"the code waited for {name!r}, and {outcome}")
    others = f"; it waits for {', '.join(map(repr, waits))}" if waits else ""
    return Settled(False, list(waits), f"the code does not wait for {name!r}{others}: this is kept in case it will")


def _is_kept(answer: Settled) -> bool:
    return not answer.settled


class ResetTo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a run is repeated."""

    to: Annotated[int, Meta(ge=1, le=LARGEST)]
    """The last event that is kept."""
    reason: str = ""


class ResetQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a run would be repeated."""

    to: Annotated[int, Meta(ge=1, le=LARGEST)] = 1
    """The last event that would be kept; of the first, only how the run was started is."""


class ResetLine(msgspec.Struct, frozen=True):
    """So many things of a kind and name that share a fate."""

    number: int
    what: str
    fate: str
    """Their fate, in words."""


class ResetPreview(msgspec.Struct, frozen=True):
    """A preview of a reset."""

    lines: list[ResetLine]


@routes.get("/{id}/history", about=RUN, is_expensive=True)
def history(api: Api, id: UUID) -> Response:
    """Show the history of a run of a workflow as code, as tests replay it."""
    text = api.backend.code.history(id.bytes).to_json(api.redaction_of_run(id))
    return Response(text, media_type="application/json")


@routes.post("/{id}/signals/{name}", about=RUN, status=202, examples=[{"value": {"approved": True}}])
def signal(api: Api, id: UUID, name: str, body: Value) -> Asked:
    """Send a signal; it waits until the code takes it."""
    api.backend.code.signal(id.bytes, name, encode_value(body.value, f"Signal {name!r}", api.settings.max_payload))
    return Asked(id, "signal")


@routes.post("/{id}/promises/{name}/resolve", about=RUN, examples=[{"value": "yes"}], is_kept=_is_kept)
def resolve(api: Api, id: UUID, name: str, body: Resolution) -> Steps[Settled]:
    """Resolve the oldest open promise of a name, or the first that there will be.

    Which type the code expects is known to its workers only: a value that does not fit fails in the code, where it is
    awaited, with a PayloadError.
    """
    data = encode_value(body.value, f"Promise {name!r}", api.settings.max_payload)
    answer = api.backend.code.resolve(id.bytes, name, data, body.why)
    return (yield from _settled(name, answer, "goes on"))


@routes.post("/{id}/promises/{name}/reject", about=RUN, examples=[{"reason": "out of stock"}], is_kept=_is_kept)
def reject(api: Api, id: UUID, name: str, body: Rejection) -> Steps[Settled]:
    """Reject the oldest open promise of a name, or the first that there will be."""
    answer = api.backend.code.reject(id.bytes, name, body.reason, body.why)
    return (yield from _settled(name, answer, "it is rejected: PromiseRejected is raised there"))


@routes.post(
    "/{id}/queries/{name}", about=RUN, scope=Scope.READ, examples=[{"args": ["items"]}], largest_body=ONE_VALUE
)
def query_run(api: Api, id: UUID, name: str, body: Question) -> Steps[Answer]:
    """Ask the code of a run something."""
    payload = encode_call(name, body.args, body.kwargs, api.settings.max_payload, "query")
    return _answer(api, id, (yield from api.backend.code.query(id.bytes, name, payload, body.timeout)))


@routes.post("/{id}/updates/{name}", about=RUN, examples=[{"kwargs": {"amount": 5}}])
def update_run(api: Api, id: UUID, name: str, body: Question) -> Steps[Answer]:
    """Ask the code of a run to do something, and wait for its answer."""
    payload = encode_call(name, body.args, body.kwargs, api.settings.max_payload, "update")
    return _answer(api, id, (yield from api.backend.code.update(id.bytes, name, payload, body.timeout)))


@routes.post("/{id}/reset", about=RUN, status=201, examples=[{"to": 12, "reason": "the address was wrong"}])
def reset(api: Api, id: UUID, body: ResetTo) -> Steps[Started]:
    """Start a run that repeats this one up to an event, and goes on by itself from there."""
    return Started(UUID(bytes=(yield from api.backend.code.reset(id.bytes, body.to, body.reason))))


@routes.get("/{id}/reset", about=RUN, is_expensive=True)
def preview_reset(api: Api, id: UUID, query: ResetQuery) -> ResetPreview:
    """Show what would become of everything if a run were reset; nothing is done."""
    lines = preview(id.bytes, api.backend.code.history(id.bytes).events, query.to)
    return ResetPreview([ResetLine(line.number, line.what, str(line.fate)) for line in lines])


approval_routes = Routes("runs", "/api/v1/approvals")


class ApprovalsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which part of them."""

    limit: Annotated[int, Meta(ge=1, le=LARGEST_PAGE)] = PAGE
    """Runs, each with what it waits for."""
    cursor: UUID | None = None
    """`next` of the page before."""


@approval_routes.get("", about=WITHIN)
def list_approvals(api: Api, query: ApprovalsQuery, key_scope: KeyScope) -> Page[ApprovalView]:
    """List promises and approvals that wait for a decision, those of the oldest runs first."""
    found = api.read(insights.page_of_approvals, limit=query.limit, after=query.cursor, within=key_scope.workflows)
    return Page([_shown(api, one) for one in found.approvals], found.next)


def _shown(api: Api, one: ApprovalView) -> ApprovalView:
    if one.kind != "promise":
        hidden = api.redaction_of_run(one.run) if one.redact or api.redaction else api.redaction
        return dataclasses.replace(one, input=hidden.shown(as_json(one.input)))
    arguments, keywords = api.redaction_of_run(one.run).call_shown(*call_of(one.input or b""))
    known = api.recent.get(("parameters", one.workflow), 30.0, lambda: api.read(parameters_of, one.workflow))
    given = None if known is None else by_name(known, arguments, keywords)
    if given is None:  # no live worker says what they are called
        given = {str(number): value for number, value in enumerate(arguments, 1)} | keywords
    return dataclasses.replace(one, input=as_json(given) if given else None)
