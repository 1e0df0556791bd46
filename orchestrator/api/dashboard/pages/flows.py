"""Flow graphs: a list, each version drawn, and a run with its cursor, state and visits."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

import msgspec
from msgspec import Meta
from starlette.responses import Response

from orchestrator.api.context import LARGEST, Api
from orchestrator.api.dashboard.flow_graph import gantt_of_visits, graphs, walk
from orchestrator.api.dashboard.list_notes import run_notes
from orchestrator.api.dashboard.pages.workflows import last_runs, squares
from orchestrator.api.dashboard.rendering import page, pages
from orchestrator.api.key_scope import WITHIN, WORKFLOW
from orchestrator.api.routes import flows as flow_routes
from orchestrator.domain.access import KeyScope
from orchestrator.domain.flow.definition import body_of
from orchestrator.monitoring.times import present
from orchestrator.store.insights import find_node

routes = pages("/ui/flows")

_MOST_FLOWS = 100
"""Of which the last runs are shown."""
_MOST_VISITS = 300


class FlowQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which version."""

    version: Annotated[int, Meta(ge=1, le=LARGEST)] | None = None


@routes.get("", about=WITHIN)
def list_flows(api: Api, key_scope: KeyScope) -> Response:
    """List flows."""
    found = flow_routes.list_flows(api, key_scope).flows
    return page("flows.html", flows=found, last=squares(api, [one.name for one in found[:_MOST_FLOWS]]))


@routes.get("/{name}", about=WORKFLOW)
def show_flow(api: Api, name: str, query: FlowQuery, key_scope: KeyScope) -> Response:
    """Show a version of a flow, the newest if none is named."""
    flows = api.backend.flows
    stored = flows.latest(name) if query.version is None else flows.read(name, query.version)
    runs = last_runs(api, name, key_scope)
    return page(
        "flow.html",
        name=name,
        stored=stored,
        versions=flows.versions(name),
        graphs=graphs(stored.flow, {}),
        definition=body_of(stored.flow),
        runs=[*reversed(runs)],
        notes=run_notes(api, runs),
    )


def of_run(api: Api, run: UUID) -> dict[str, Any]:
    """Return what the page of a run of a flow shows: where it stands, and the last nodes that it has visited."""
    view = flow_routes.hidden(api, api.backend.flows.show(run.bytes))
    last = api.backend.flows.last_visit(run.bytes)
    visits = flow_routes.node_runs(api, run, max(0, last - _MOST_VISITS))
    flow = api.backend.flows.read(view.flow, view.version).flow
    node = find_node(flow, view.cursor) if view.cursor and view.ended_at is None else None
    return {
        "view": view,
        "node": node,
        "visits": visits,
        "all_visits": max(last, max((visit.number for visit in visits), default=0)),
        "left_out": max(0, min((visit.number for visit in visits), default=1) - 1),
        "graphs": graphs(flow, walk(flow, view, visits)),
        "gantt": gantt_of_visits(view, visits, present()),
    }
