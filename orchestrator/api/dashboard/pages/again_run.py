"""Start a run like another one, with the same or with changed parameters."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import msgspec
from starlette.responses import Response

from orchestrator.api.context import Api
from orchestrator.api.dashboard.fields import Field, of_params
from orchestrator.api.dashboard.pages.again import (
    Again,
    Call,
    filled,
    given_by,
    kept_by_browser,
    opened,
    pretty,
    read_json,
    takes,
)
from orchestrator.api.dashboard.pages.seen import RERUN, record, started_since
from orchestrator.api.dashboard.rendering import Note, page, page_actions, pages, visitor
from orchestrator.api.key_scope import RUN
from orchestrator.api.problems import Refused, refused
from orchestrator.api.routes import flows as flow_routes
from orchestrator.api.routes import workflows as workflow_routes
from orchestrator.api.routes.tasks import Arguments
from orchestrator.domain.access import Scope
from orchestrator.domain.dag.composed import is_composed
from orchestrator.domain.tasks.parameters import Misfit, check_call
from orchestrator.errors import InvalidWorkflow, NotFound, PayloadError
from orchestrator.store import insights
from orchestrator.store.fleet import parameters_of
from orchestrator.store.insights import RunDetail

routes, actions = pages("/ui/runs"), page_actions("/ui/runs")


@routes.get("/{id}/again", about=RUN, scope=Scope.OPERATE)
def ask_again(api: Api, id: UUID) -> Response:
    """Show a form with the parameters of a run."""
    run = _found(api, id)
    try:
        shown = _call(api, run).shown
    except PayloadError as error:
        return page("again_run.html", 409, run=run, form=None, wrong=str(error), takes="", fields=None)
    return _form(api, run, Again(args=pretty(shown.args), kwargs=pretty(shown.kwargs)), shown)


@actions.post("/{id}/again", about=RUN)
def start_again(api: Api, id: UUID, body: Again) -> Note | Response:
    """Start a run of the newest version with the tags of another one, or show the form again with its mistake."""
    run = _found(api, id)
    if said := started_since(api, str(id), RERUN, body.since):
        return _refused(api, run, body, 409, said)
    try:
        new = _start(api, run, body)
    except (InvalidWorkflow, Misfit) as error:
        return _refused(api, run, body, 422, str(error))
    except Refused as error:
        return _refused(api, run, body, error.problem.status, error.problem.detail)
    return record(api, RERUN, "run", str(id), new)


def _start(api: Api, run: RunDetail, body: Again) -> UUID:
    name, tags = str(run.workflow), list(run.tags)
    known = api.read(parameters_of, name) if run.code else None
    if not run.code:  # which has no signature: all of it is by name
        body = Again(kwargs=body.named or body.kwargs)
    args, kwargs = given_by(_call(api, run), body, known or ())
    if run.flow:
        return flow_routes.start_flow(api, name, flow_routes.NewFlowRun(params=kwargs, tags=tags), None).id
    if known:
        check_call(known, args, kwargs)
    given = workflow_routes.NewRunOf(args=args, params=kwargs, tags=tags)
    due = (run.fire_time or run.created_at).isoformat()  # as if it were started over
    return workflow_routes.start(api, name, given, None, visitor().key_scope, due)


def _found(api: Api, id: UUID) -> RunDetail:
    """Return a run that can be started again, as it is stored."""
    run = api.read(insights.show_run, id)
    if run is None:
        raise NotFound.by_id("run", str(id))
    if run.workflow is None or is_composed(run.workflow):
        raise refused(409, "It cannot be started again", f"Run {id} is not of a workflow.")
    return run


def _call(api: Api, run: RunDetail) -> Call:
    """Return what a run was started with; raises PayloadError where that cannot be had here."""
    hidden = api.redaction_of_run(run.id)
    if run.code:
        code = api.read(insights.show_code, run.id)
        return opened(f"run {run.id}", b"" if code is None else code.payload, hidden)
    params = insights.readable_params(run.params)
    if isinstance(params, str):
        raise PayloadError(f"The parameters of run {run.id} cannot be read here: {params}")
    return Call(Arguments([], dict(params)), Arguments([], hidden.shown(dict(params))))


def _form(
    api: Api, run: RunDetail, form: Again, typed: Arguments | None, status: int = 200, wrong: str = ""
) -> Response:
    """Show the form, with a field for each parameter of the newest version that is known."""
    name = str(run.workflow)
    fields: list[Field] | None = None
    more, known = "", None
    if run.code:
        known = api.read(parameters_of, name)
        fields, more = filled(known, typed)
    elif typed is not None:
        fields = of_params({} if run.flow else workflow_routes.find(api, name).definition.params, typed.kwargs)
        names = {one.name for one in fields}
        rest: dict[str, Any] = {key: value for key, value in typed.kwargs.items() if key not in names}
        more = pretty(rest) if rest or run.flow else ""
    if form.named:
        form = msgspec.structs.replace(form, kwargs=form.named)
    shown = {"form": form, "wrong": wrong, "takes": takes(known), "fields": fields, "more": more}
    return page("again_run.html", status, run=run, **shown)


def _refused(api: Api, run: RunDetail, form: Again, status: int, wrong: str) -> Response:
    try:
        typed = Arguments([], read_json("named", form.named, dict)) if form.named else None
    except Refused:
        typed = None
    return kept_by_browser(_form(api, run, form, typed, status, wrong))
