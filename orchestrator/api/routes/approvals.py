"""Promises and approvals that wait for a person; the routes of their runs decide them."""

from __future__ import annotations

import dataclasses
from typing import Annotated
from uuid import UUID

import msgspec
from msgspec import Meta

from orchestrator.api.context import LARGEST_PAGE, PAGE, Api, Page
from orchestrator.api.endpoints import Routes
from orchestrator.api.key_scope import WITHIN
from orchestrator.domain.access import KeyScope
from orchestrator.domain.tasks.parameters import by_name
from orchestrator.sdk.values.display import as_json, call_of
from orchestrator.store import insights
from orchestrator.store.fleet import parameters_of
from orchestrator.store.insights import ApprovalView

routes = Routes("runs", "/api/v1/approvals")


class ApprovalsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which part of them."""

    limit: Annotated[int, Meta(ge=1, le=LARGEST_PAGE)] = PAGE
    """Runs, each with what it waits for."""
    cursor: UUID | None = None
    """`next` of the page before."""


@routes.get("", about=WITHIN)
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
