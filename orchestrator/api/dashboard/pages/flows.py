"""Flows: a list, the graph of each version, and a run with its cursor, state and visits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import msgspec
from msgspec import Meta
from starlette.responses import Response

from orchestrator.api.context import MAX_INT, Api
from orchestrator.api.dashboard.gantt import Gantt, row
from orchestrator.api.dashboard.graph import planned_step
from orchestrator.api.dashboard.layout import HEIGHT, WIDTH, Edge, Graph, Node, draw
from orchestrator.api.dashboard.list_notes import run_notes
from orchestrator.api.dashboard.pages.workflows import last_runs, squares
from orchestrator.api.dashboard.rendering import page, pages
from orchestrator.api.key_scope import WITHIN, WORKFLOW
from orchestrator.api.routes import flows as flow_routes
from orchestrator.domain.access import KeyScope
from orchestrator.domain.flow.definition import DEFAULT, Edges, Flow, body_of
from orchestrator.monitoring.times import present
from orchestrator.store.flow.reads import FlowRunView, NodeRunView
from orchestrator.store.insights import find_node

routes = pages("/ui/flows")

_MAX_FLOWS = 100
"""Flows whose last runs are shown."""
_MAX_VISITS = 300


class FlowQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None


@routes.get("", about=WITHIN)
def list_flows(api: Api, key_scope: KeyScope) -> Response:
    """List flows."""
    flows = flow_routes.list_flows(api, key_scope).flows
    return page("flows.html", flows=flows, last=squares(api, [flow.name for flow in flows[:_MAX_FLOWS]]))


@routes.get("/{name}", about=WORKFLOW)
def show_flow(api: Api, name: str, query: FlowQuery, key_scope: KeyScope) -> Response:
    """Show a version of a flow; the newest by default."""
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
    """Return the template values for a run of a flow: its position, and the last visited nodes."""
    view = flow_routes.redacted_run(api, api.backend.flows.show(run.bytes))
    last = api.backend.flows.last_visit(run.bytes)
    visits = flow_routes.node_runs(api, run, max(0, last - _MAX_VISITS))
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


_LAYER_GAP = 112
"""The gap between two layers, which has room for names of actions."""
_BACK_EDGE_HEIGHT = 18
"""The height of an edge that leads back."""
_MAX_LABEL_LENGTH = 16
_MAX_ROWS = 200
Line = tuple[str, str]


@dataclass
class Walked:
    """The visited nodes of one flow: the run's own, or a subflow."""

    states: dict[str, str] = field(default_factory=dict)
    visits: Counter[str] = field(default_factory=Counter)
    lines: Counter[Line] = field(default_factory=Counter)
    """The number of times each edge was taken."""


def graphs(flow: Flow, walked: Mapping[str, Walked], path: str = "", at_most: int = 20) -> list[tuple[str, Graph]]:
    """Return the graphs of a flow and its subflows with the path of each subflow's node, the outermost first."""
    drawn = [(path, _draw_flow(flow, walked.get(path, Walked())))]
    for key, node in flow.nodes.items():
        if node.subflow is not None and len(drawn) < at_most:
            drawn += graphs(node.subflow, walked, f"{path}/{key}".lstrip("/"), at_most - len(drawn))
    return drawn


def walk(flow: Flow, view: FlowRunView, visits: Sequence[NodeRunView]) -> dict[str, Walked]:
    """Return the visited nodes of a run, by the path of each subflow's node."""
    flows = _by_path(flow, "")
    walked = {path: Walked() for path in flows}
    for visit in visits:
        parent, _, key = visit.node.rpartition("/")
        if visit.branch is not None or parent not in walked or (not visit.action and visit.status == "failed"):
            continue
        visited = walked[parent]
        visited.states[key] = visit.status
        visited.visits[key] += 1
        visited.lines[key, Edges(flows[parent]).follow(key, visit.action)] += 1
    for visit in visits:
        parent, _, key = visit.node.rpartition("/")
        if parent in walked:
            walked[parent].states[key] = visit.status
    if view.ended_at is None:
        parts = view.cursor.split("/") if view.cursor else []
        for depth, key in enumerate(parts):
            if (parent := "/".join(parts[:depth])) in walked:
                walked[parent].states[key] = "open"
    return walked


def _by_path(flow: Flow, path: str) -> dict[str, Flow]:
    found = {path: flow}
    for key, node in flow.nodes.items():
        if node.subflow is not None:
            found |= _by_path(node.subflow, f"{path}/{key}".lstrip("/"))
    return found


def _draw_flow(flow: Flow, walked: Walked) -> Graph:
    labels: dict[Line, list[str]] = {}
    for edge in flow.edges:
        if edge.to in flow.nodes and edge.source in flow.nodes:
            labels.setdefault((edge.source, edge.to), []).append(edge.action or DEFAULT)
    back = _back_edges(flow, labels)
    steps = [
        planned_step(
            name=key,
            kind=node.kind,
            calls=node.func or node.service or node.exec_type,
            state=walked.states.get(key, "waiting"),
            total=walked.visits[key],
            ended=walked.visits[key],
            reason=node.description or None,
            depends_on=tuple(source for source, to in labels if to == key and (source, to) not in back),
        )
        for key, node in flow.nodes.items()
    ]
    plain = draw(steps, frozenset(), between=_LAYER_GAP, pane=None)
    edges = [
        replace(edge, label=_label(labels[edge.upper, edge.lower]), is_done=walked.lines[edge.upper, edge.lower] > 0)
        for edge in plain.edges
    ]
    nodes = {node.step.name: node for node in plain.nodes}
    for lane, line in enumerate(sorted(back)):
        y = plain.height + _BACK_EDGE_HEIGHT * (lane + 0.5)
        edges.append(_back_edge(nodes[line[0]], nodes[line[1]], y, line, _label(labels[line]), walked))
    room = _BACK_EDGE_HEIGHT if back else 0
    height = plain.height + room * (len(back) + 0.5)
    return Graph(plain.nodes, edges, plain.width + 2 * room, height, inset=room)


def _label(actions: Sequence[str]) -> str:
    text = "" if list(actions) == [DEFAULT] else ", ".join(sorted(set(actions)))
    return text if len(text) <= _MAX_LABEL_LENGTH else f"{text[: _MAX_LABEL_LENGTH - 1]}…"


def _back_edge(start: Node, end: Node, y: float, line: Line, label: str, walked: Walked) -> Edge:
    """Return an edge that leaves a node at the right, passes below all nodes, and arrives at the left."""
    right, left, top, bottom = start.x + WIDTH, end.x, start.y + HEIGHT / 2, end.y + HEIGHT / 2
    path = (
        f"M{right:g},{top:g} C{right + 22:g},{top:g} {right + 22:g},{y:g} {right:g},{y:g}"
        f" H{left:g} C{left - 22:g},{y:g} {left - 22:g},{bottom:g} {left:g},{bottom:g}"
    )
    middle = ((right + left) / 2, y)
    return Edge(path, False, walked.lines[line] > 0, line[0], line[1], label, middle)


def _back_edges(flow: Flow, lines: Mapping[Line, object]) -> set[Line]:
    """Return the back edges of a flow, without which it has no cycle, by depth-first search from the start."""
    successors: dict[str, list[str]] = {}
    for source, to in lines:
        successors.setdefault(source, []).append(to)
    back: set[Line] = set()
    done: set[str] = set()
    for start in (flow.start, *flow.nodes):
        if start not in flow.nodes or start in done:
            continue
        on_stack = {start}
        stack = [(start, iter(successors.get(start, ())))]
        while stack:
            node, targets = stack[-1]
            to = next(targets, "")
            if not to:
                stack.pop()
                on_stack.discard(node)
                done.add(node)
            elif to in on_stack:
                back.add((node, to))
            elif to not in done:
                on_stack.add(to)
                stack.append((to, iter(successors.get(to, ()))))
    return back


def gantt_of_visits(view: FlowRunView, visits: Sequence[NodeRunView], now: datetime) -> Gantt:
    """Return the chart of the visits to nodes, in order."""
    main_visits = [visit for visit in visits if visit.branch is None][-_MAX_ROWS:]
    begin, end = view.started_at or view.created_at, view.ended_at or now
    if main_visits:
        begin = (
            min(begin, main_visits[0].started_at or main_visits[0].ended_at)
            if main_visits[0].number == 1
            else main_visits[0].ended_at
        )
    rows = [
        row(
            visit.node,
            visit.status,
            max(begin, visit.started_at or visit.ended_at),
            visit.ended_at,
            begin,
            end,
            link=f"/ui/tasks/{visit.task}" if visit.task else "",
        )
        for visit in main_visits
    ]
    if view.cursor and view.ended_at is None:
        since = max((visit.ended_at for visit in main_visits), default=begin)
        rows.append(row(view.cursor, "open", since, end, begin, end))
    return Gantt(rows, begin, end, 0)
