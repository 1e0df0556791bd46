"""Workflows: a list, and a workflow with its steps, last runs and start form."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from math import ceil
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta
from starlette.responses import Response

from orchestrator.api.context import Api
from orchestrator.api.dashboard.fields import Field, of_parameters, of_params
from orchestrator.api.dashboard.graph import counts_of, fold, planned_step, rows_of, worst
from orchestrator.api.dashboard.layout import draw
from orchestrator.api.dashboard.list_notes import run_notes
from orchestrator.api.dashboard.rendering import page, pages, redirect
from orchestrator.api.dashboard.words import address, with_query
from orchestrator.api.key_scope import WITHIN, WORKFLOW
from orchestrator.api.routes import runs as run_routes
from orchestrator.api.routes import workflows as workflow_routes
from orchestrator.domain.access import KeyScope
from orchestrator.domain.dag.definition import Definition
from orchestrator.errors import NotFound
from orchestrator.sdk.dag.document import to_data
from orchestrator.store import insights
from orchestrator.store.fleet import parameters_of
from orchestrator.store.insights import LastRun, StepStates, StepView, states_of_runs

routes = pages("/ui/workflows")

_LAST_RUNS = 20
_GRID_RUNS, _FEW_RUNS, _GRID_ROWS = 50, 10, 60
_MAX_STEPS = 200
"""Steps of a workflow, beyond which the grid has few runs."""
_MAX_SHOWN = 100
"""Workflows whose last runs are shown."""


@routes.get("", about=WITHIN)
def list_workflows(api: Api, key_scope: KeyScope) -> Response:
    """List workflow definitions and workflows as code."""
    found = workflow_routes.list_workflows(api, key_scope)
    names = [*(workflow.name for workflow in found.workflows), *(one.name for one in found.code)][:_MAX_SHOWN]
    return page("workflows.html", found=found, last=squares(api, names))


def squares(api: Api, workflows: Iterable[str], limit: int = _LAST_RUNS) -> dict[str, list[LastRun]]:
    """Return the last runs of each workflow, oldest first, with one query for all."""
    names = tuple(dict.fromkeys(workflows))
    return api.recent.get(("squares", names, limit), 1.0, lambda: api.read_list(insights.last_runs, names, limit))


def last_runs(api: Api, workflow: str, key_scope: KeyScope, limit: int = _LAST_RUNS) -> list[Any]:
    """Return the last runs of a workflow, oldest first."""
    query = run_routes.RunQuery(workflow=workflow, limit=limit)
    return api.recent.get(
        ("last runs", workflow, key_scope, limit),
        1.0,
        lambda: [*reversed(run_routes.list_page(api, query, key_scope, may_lag=True).items)],
    )


class WorkflowQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which groups of steps are expanded in the graph and the grid."""

    open: Annotated[tuple[str, ...], Meta(max_length=20)] = ()


@routes.get("/{name}", about=WORKFLOW)
def show_workflow(api: Api, name: str, query: WorkflowQuery, key_scope: KeyScope) -> Response:
    """Show one workflow."""
    code_workflows = api.read(insights.list_code_workflows, key_scope.workflows)
    code = next((workflow for workflow in code_workflows if workflow.name == name), None)
    stored = None
    try:
        stored = workflow_routes.find(api, name)
    except NotFound:
        if api.backend.flows.find(name) is not None:
            return redirect(address("flows", name))
        if code is None and not last_runs(api, name, key_scope):
            raise
    steps = _steps(stored.definition) if stored else []
    runs = last_runs(api, name, key_scope)
    folded = fold(steps, frozenset(), query.open)
    return page(
        "workflow.html",
        name=name,
        stored=stored,
        definition=to_data(stored.definition) if stored else None,
        code=code,
        graph=draw(folded.steps, frozenset(), folded.frames) if steps else None,
        groups=folded.groups,
        opened=query.open,
        grid=_grid(api, name, steps, query.open) if steps else None,
        fields=of_params(stored.definition.params) if stored else _fields(api, name) if code else [],
        runs=[*reversed(runs)],
        notes=run_notes(api, runs),
        asked=datetime.now(UTC),
    )


def _fields(api: Api, name: str) -> list[Field]:
    parameters = api.read(parameters_of, name)
    return of_parameters(parameters or ())


class Cell(NamedTuple):
    """The state of a step, or of a group of steps, in one run."""

    state: str
    """The state; empty if the run has no such step."""
    link: str
    seconds: float | None = None
    part: int = 0
    """The duration, in fifths of the slowest in the row."""
    counts: str = ""
    """The number of steps of the group in each state."""


def _grid(
    api: Api, name: str, steps: list[StepView], opened: tuple[str, ...]
) -> tuple[list[StepStates], dict[str, list[Cell]], set[str]]:
    """Return the last runs of a workflow, oldest first, the cells of each row, and the rows that are groups."""
    number = _GRID_RUNS if len(steps) <= _MAX_STEPS else _FEW_RUNS
    ids = [run.id for run in squares(api, [name], number)[name]]
    runs = api.recent.get(("grid", name, number), 2.0, lambda: api.read_list(states_of_runs, name, ids))
    failed = {step for run in runs for step, state in run.states.items() if state == "failed"}
    rows = rows_of([step.name for step in steps], _GRID_ROWS, failed, opened)
    cells = {label: _with_parts([_cell(run, names) for run in runs]) for label, names in rows.items()}
    return runs, cells, {label for label, names in rows.items() if names != [label]}


def _with_parts(cells: list[Cell]) -> list[Cell]:
    slowest = max((cell.seconds or 0.0 for cell in cells), default=0.0) or 1.0
    return [cell._replace(part=ceil(5 * (cell.seconds or 0.0) / slowest)) for cell in cells]


def _cell(run: StepStates, names: list[str]) -> Cell:
    states = {name: run.states[name] for name in names if name in run.states}
    state = worst(states.values())
    link = address("runs", run.id)
    name = next((name for name in names if states.get(name) == state), "")
    seconds = max((run.seconds[name] for name in names if name in run.seconds), default=None)
    link = with_query(link, {"step": name}) if state not in ("", "waiting", "skipped") else link
    counts = counts_of([*states.values()]) or f"{len(states):,} success"
    return Cell(state, link, seconds, counts=counts if len(names) > 1 and states else "")


def _steps(definition: Definition) -> list[StepView]:
    """Return the steps of a definition as those of a run that has not started."""
    return [
        planned_step(
            name=step.name,
            kind="workflow" if step.workflow else "task",
            calls=step.workflow or step.task or "",
            depends_on=tuple(step.depends_on),
        )
        for step in definition.steps
    ]
