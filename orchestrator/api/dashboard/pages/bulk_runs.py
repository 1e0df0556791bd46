"""Cancel, retry and delete many runs: those that are marked in a list, or all that fit its filters, counted before."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.responses import Response

from orchestrator.api.context import Api
from orchestrator.api.dashboard.list_notes import given, within_span
from orchestrator.api.dashboard.pages import seen
from orchestrator.api.dashboard.pages.runs import RunsQuery
from orchestrator.api.dashboard.pages.tasks import IN_ANOTHER_STATE, check_marked, outcome_of_marked
from orchestrator.api.dashboard.rendering import Note, page, page_actions, pages
from orchestrator.api.dashboard.words import run_name, with_query
from orchestrator.api.key_scope import WITHIN, check_runs
from orchestrator.api.problems import unfit
from orchestrator.api.routes import runs as run_routes
from orchestrator.domain.access import KeyScope, Scope
from orchestrator.domain.states import ENDED_RUN_STATES, RunState
from orchestrator.store.inbox import RequestKind
from orchestrator.store.insights import RunView, runs_of_code

routes, actions = pages("/ui/runs"), page_actions("/ui/runs")

MOST_AT_ONCE = 500
"""Runs that one form acts on."""
_MOST_PAGES = 5
"""Of the list, each of some thousand rows, that are looked at for a preview."""
_Act = Literal["cancel", "retry", "delete"]


@routes.get("/cancel", about=WITHIN, scope=Scope.OPERATE)
def preview_cancel(api: Api, query: RunsQuery, key_scope: KeyScope) -> Response:
    """Say which open runs would be cancelled, before they are."""
    return _preview(api, query, key_scope, "cancel")


@routes.get("/retry", about=WITHIN, scope=Scope.OPERATE)
def preview_retry(api: Api, query: RunsQuery, key_scope: KeyScope) -> Response:
    """Say which failed or stuck runs would be retried, before they are."""
    return _preview(api, query, key_scope, "retry")


@routes.get("/delete", about=WITHIN, scope=Scope.OPERATE)
def preview_delete(api: Api, query: RunsQuery, key_scope: KeyScope) -> Response:
    """Say which ended runs would be deleted, before they are."""
    return _preview(api, query, key_scope, "delete")


def _preview(api: Api, query: RunsQuery, key_scope: KeyScope, act: _Act) -> Response:
    """Show the runs that fit by workflow and state; the form names each of them, so that no other is meant."""
    if query.argument:
        raise unfit("Filter by argument: mark the runs that are meant in the list, of which it does not find all.")
    chosen: list[RunView] = []
    cursor, is_part = None, False
    if asked := {name: value for name, value in given(query).items() if name != "sort"}:
        wanted = msgspec.structs.replace(within_span(query), limit=MOST_AT_ONCE)
        for _ in range(_MOST_PAGES):
            found = run_routes.list_page(api, msgspec.structs.replace(wanted, cursor=cursor), key_scope)
            chosen += _those_for(api, act, found.items)
            cursor = found.next
            if cursor is None or len(chosen) >= MOST_AT_ONCE:
                break
        is_part = cursor is not None or len(chosen) > MOST_AT_ONCE
        chosen = chosen[:MOST_AT_ONCE]
    groups = Counter((run_name(run) or "many tasks", _state(run)) for run in chosen).most_common()
    back = with_query("/ui/runs", given(query))
    return page("bulk_runs.html", act=act, asked=asked, back=back, groups=groups, chosen=chosen, is_part=is_part)


def _those_for(api: Api, act: _Act, runs: list[RunView]) -> list[RunView]:
    """Return those of these runs that it can be done to: of code, only stuck ones are retried."""
    if act == "cancel":
        return [run for run in runs if run.status not in ENDED_RUN_STATES and not run.cancelling]
    if act == "delete":
        return [run for run in runs if run.status in ENDED_RUN_STATES and run.parent_run is None]
    failed = [run.id for run in runs if run.status == RunState.FAILED]
    of_code = api.read(runs_of_code, [id.bytes for id in failed])
    return [run for run in runs if (run.id in failed and run.id not in of_code) or _state(run) == "stuck"]


def _state(run: RunView) -> str:
    return "stuck" if run.stuck and run.ended_at is None else run.status


class Chosen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Selected runs."""

    id: Annotated[list[seen.Marked], Meta(max_length=MOST_AT_ONCE)] = []


@actions.post("/cancel-chosen", about=WITHIN)
def cancel_chosen(api: Api, body: Chosen, key_scope: KeyScope) -> Note:
    """Cancel the runs that are named."""
    return _ask(api, body.id, key_scope, RequestKind.CANCEL_RUN, "being cancelled")


@actions.post("/retry-chosen", about=WITHIN)
def retry_chosen(api: Api, body: Chosen, key_scope: KeyScope) -> Note:
    """Retry the runs that are named."""
    why = f"{IN_ANOTHER_STATE}, or failed runs of code, which are started over"
    return _ask(api, body.id, key_scope, RequestKind.RETRY_RUN, "being retried", why)


@actions.post("/delete-chosen", about=WITHIN)
def delete_chosen(api: Api, body: Chosen, key_scope: KeyScope) -> Note:
    """Delete the runs that are named."""
    return _ask(api, body.id, key_scope, RequestKind.DELETE_RUN, "being deleted")


def _ask(
    api: Api, marked: list[str], key_scope: KeyScope, kind: RequestKind, done: str, why: str = IN_ANOTHER_STATE
) -> Note:
    """Ask for the same about runs, of which none is outside the key scope; skip those in another state."""
    check_marked(marked, "runs")
    ids, shown = seen.split(marked)
    if key_scope.is_bound:
        check_runs(api, key_scope, set(ids))
    asked = api.backend.ask_all(kind, [id.bytes for id in ids], shown)
    return outcome_of_marked(len(asked), len(ids), "runs", done, why)
