"""Enqueue a task or start a run like another one, with the same or with changed arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Annotated, Any
from uuid import UUID

import msgspec
from msgspec import UNSET, Meta
from starlette.responses import Response

from orchestrator.api.bodies import check_shape
from orchestrator.api.context import LARGEST, Api
from orchestrator.api.dashboard.fields import Field, misfit_of, of_parameters, of_params
from orchestrator.api.dashboard.pages.seen import RERUN, moved_on, record, started_since
from orchestrator.api.dashboard.rendering import Note, page, page_actions, pages, visitor
from orchestrator.api.key_scope import RUN, TASK
from orchestrator.api.problems import Refused, refused, unfit
from orchestrator.api.routes import flows as flow_routes
from orchestrator.api.routes import workflows as workflow_routes
from orchestrator.api.routes.enqueueing import NewCall, new_task
from orchestrator.api.routes.tasks import Arguments, found_task
from orchestrator.domain.access import KeyScope, Scope
from orchestrator.domain.dag.composed import is_composed
from orchestrator.domain.limits.lane_limits import lane_name
from orchestrator.domain.redaction import HIDDEN, Redaction
from orchestrator.domain.tasks.parameters import Misfit, Parameter, as_call, by_name, check_call, signature_of
from orchestrator.domain.tasks.task import parse_options
from orchestrator.errors import InvalidTask, InvalidWorkflow, NotFound, PayloadError
from orchestrator.references import whole_reference
from orchestrator.sdk.values.display import NOT_JSON, as_shown
from orchestrator.sdk.values.payload import decode_call
from orchestrator.store import audit, insights
from orchestrator.store.fleet import parameters_of
from orchestrator.store.insights import RunDetail, TaskDetail

routes, actions = pages("/ui/tasks"), page_actions("/ui/tasks")
run_routes, run_actions = pages("/ui/runs"), page_actions("/ui/runs")

_ACT = "enqueue again"
"""In the audit log, of the task that the new one is like."""
_LONGEST = 100_000
"""Characters of a field of the form."""


class Again(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A task like another one. Arguments are JSON, which is read here so that a mistake leaves the form filled in."""

    named: Annotated[str, Meta(max_length=_LONGEST)] = ""
    """All arguments by the names of the task's parameters, if a worker has announced these; else args and kwargs."""
    args: Annotated[str, Meta(max_length=_LONGEST)] = ""
    kwargs: Annotated[str, Meta(max_length=_LONGEST)] = ""
    queue: str = ""
    """The queue of the other one, if none is given."""
    attempt: Annotated[int, Meta(ge=0, le=LARGEST)] | None = None
    """The last attempt of one that had not succeeded when the form was made."""
    since: datetime | None = None
    """When that was."""


class Call(msgspec.Struct):
    """The arguments of the task or run that the new one is like, as they are and as a page shows them."""

    given: Arguments
    shown: Arguments


@routes.get("/{id}/again", about=TASK, scope=Scope.OPERATE)
def ask_again(api: Api, id: UUID) -> Response:
    """Show a form with the arguments of a task."""
    task = found_task(api, id)
    try:
        shown = _call(api, task).shown
    except PayloadError as error:
        return page("again.html", 409, task=task, form=None, wrong=str(error), takes="", fields=None)
    return _form(api, task, Again(args=_pretty(shown.args), kwargs=_pretty(shown.kwargs), queue=task.queue), shown)


@actions.post("/{id}/again", about=TASK)
def enqueue_again(api: Api, id: UUID, body: Again, key_scope: KeyScope) -> Note | Response:
    """Enqueue a task with the name and options of another one, or show the form again with its mistake."""
    task = found_task(api, id)
    if moved := moved_on(api, task, body.attempt, is_retry=True) or _like(api, id, body.since):
        return _refused(partial(_form, api, task), body, 409, moved)
    known = api.read(parameters_of, task.name)
    try:
        args, kwargs = _given_by(_call(api, task), body, known or ())
        if known:
            check_call(known, args, kwargs)
        wanted = NewCall(name=task.name, args=args, kwargs=kwargs, queue=body.queue.strip() or task.queue)
        new = new_task(api, msgspec.structs.replace(wanted, priority=task.priority), key_scope)
        visitor().check_tasks(new)
        warnings = api.names.check([task.name])
    except InvalidTask as error:
        return _refused(partial(_form, api, task), body, 422, str(error))
    except Misfit as error:
        return _refused(partial(_form, api, task), body, 422, str(error) if body.named else f"{error.field}: {error}.")
    except Refused as error:
        return _refused(partial(_form, api, task), body, error.problem.status, error.problem.detail)
    options = msgspec.json.encode(task.options).decode() if task.options else None
    new = api.names.hiding(msgspec.structs.replace(new, options=options, lane=_lane(task, options), parent=id.bytes))
    made = UUID(bytes=api.backend.tasks.enqueue(new, key_scope.queues))
    connections = api.backend.connections
    with connections.changing("the line of the audit log was written") as connection:
        connections.record(connection, _ACT, "task", str(id), made=str(made))
    return Note(" ".join(["the task is enqueued: this is it", *warnings]).rstrip("."), to=f"/ui/tasks/{made}")


def _like(api: Api, id: UUID, since: datetime | None) -> str:
    """Say who has enqueued a task like an ended one since a form was made; nothing if nobody has."""
    known = None if since is None else api.read(audit.last_act, str(id), _ACT, since)
    return "" if known is None else f"A task like it was enqueued {known}, after this form was made. Enqueue one more?"


def _given_by(call: Call, body: Again, known: Sequence[Parameter]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments that a form gives. Changed ones fit the types that the form shows; raises Misfit."""
    given, shown = (by_name(known, one.args, one.kwargs) or {} for one in (call.given, call.shown))
    if body.named:
        typed = _merged("", given, shown, _read_json("named", body.named, dict))
        args, kwargs = as_call(known, typed, len(call.given.args))
    else:
        args, kwargs = _as_typed(call, body)
    changed = by_name(known, args, kwargs) or {}
    for one in known:
        is_changed = one.name in changed and changed[one.name] is not given.get(one.name, UNSET)
        if is_changed and (problem := misfit_of(one, changed[one.name])):
            raise Misfit("kwargs" if one.name in kwargs else "args", f"{one.name}: {problem}")
    return args, kwargs


def _as_typed(call: Call, body: Again) -> tuple[list[Any], dict[str, Any]]:
    numbered = (dict(enumerate(one)) for one in (call.given.args, call.shown.args, _read_json("args", body.args, list)))
    args = _merged("args: ", *numbered)
    kwargs = _merged("kwargs: ", call.given.kwargs, call.shown.kwargs, _read_json("kwargs", body.kwargs, dict))
    return [*args.values()], kwargs


def _takes(parameters: Sequence[Parameter] | None) -> str:
    """Return the parameters of a task as its code has them, with types and defaults; nothing if they are not known."""
    try:
        return str(signature_of(parameters)) if parameters is not None else ""
    except ValueError:
        return ""


def _form(
    api: Api, task: TaskDetail, form: Again, typed: Arguments | None = None, status: int = 200, wrong: str = ""
) -> Response:
    """Show the form: a field for each parameter that is known and for more arguments by name, or else two for JSON."""
    known = api.read(parameters_of, task.name)
    if form.named:
        form = msgspec.structs.replace(form, kwargs=form.named)  # if the parameters have changed since
    fields, more = _filled(known, typed)
    return page("again.html", status, task=task, form=form, wrong=wrong, takes=_takes(known), fields=fields, more=more)


def _filled(known: Sequence[Parameter] | None, typed: Arguments | None) -> tuple[list[Field] | None, str]:
    """Return the fields of parameters that are known, filled, and as JSON what else is given by name; or None."""
    values = None if known is None or typed is None else by_name(known, typed.args, typed.kwargs)
    if known is None or values is None:
        return None, ""
    fields = of_parameters(known, values)
    if not any(one.kind == "variadic keyword" for one in known):
        return fields, ""
    names = {one.name for one in fields}
    return fields, _pretty({name: value for name, value in values.items() if name not in names})


def _refused(
    show: Callable[[Again, Arguments | None, int, str], Response], form: Again, status: int, wrong: str
) -> Response:
    """Show the form again. The browser may keep this answer to a POST, without which its Back leads to an error."""
    typed = None
    if form.named:
        with suppress(Refused):
            typed = Arguments([], _read_json("named", form.named, dict))
    answer = show(form, typed, status, wrong)
    answer.headers["Cache-Control"] = "private, no-cache"
    return answer


def _lane(task: TaskDetail, options: str | None) -> str | None:
    """Return the lane of a task with the options and the concurrency key of another one; a run has keys of its own."""
    key = task.lane.partition("|")[2] if task.lane and task.run_id is None else ""
    return lane_name(task.name, key or None, parse_options(options))


def _call(api: Api, task: TaskDetail) -> Call:
    """Return the arguments of a task; raises PayloadError where they cannot be had here."""
    return _opened(f"task {task.id}", task.payload, api.redaction_of_task(task))


def _opened(what: str, payload: bytes, hidden: Redaction) -> Call:
    """Return the arguments that are stored for a task or run; raises PayloadError where they cannot be had here."""
    if len(payload) > _LONGEST or whole_reference(payload) is not None:
        raise PayloadError(f"The arguments of {what} are too large for a form: start it from a program.")
    args, kwargs, *_ = decode_call(payload) if payload else ([], {})
    shown, named = hidden.call_shown(args, kwargs)
    return Call(Arguments(args, kwargs), Arguments(as_shown(shown), as_shown(named)))


def _read_json(name: str, text: str, kind: type[Any]) -> Any:
    try:
        check_shape(text.encode())
        return msgspec.json.decode(text or ("[]" if kind is list else "{}"), type=kind)
    except (msgspec.MsgspecError, UnicodeError) as error:
        what = "a JSON list, such as [1, 2]" if kind is list else 'a JSON object, such as {"width": 200}'
        raise unfit(f"{name}: expected {what}: {error}") from error


def _merged(label: str, given: Mapping[Any, Any], shown: Mapping[Any, Any], typed: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return arguments, as they were where they are unchanged: hidden ones stay, and those of types that JSON lacks."""
    found = {}
    for place, value in typed.items():
        text = _sorted(value)
        if place in shown and _sorted(shown[place]) == text:
            found[place] = given[place]
        elif HIDDEN in text:
            raise unfit(
                f"{label}{place!r} is partly hidden. Leave all of it as it is, or give a value without {HIDDEN}."
            )
        elif NOT_JSON in text:
            raise unfit(
                f"{label}{place!r} holds what JSON cannot write, such as NaN or bytes. Leave all of it as it is, give "
                f"a value without {NOT_JSON}…), or enqueue the task from a program."
            )
        else:
            found[place] = value
    return found


def _pretty(value: Any) -> str:
    """Return a value as JSON for a field of a form."""
    return msgspec.json.format(msgspec.json.encode(value)).decode()


def _sorted(value: Any) -> str:
    return msgspec.json.encode(value, order="sorted").decode()


@run_routes.get("/{id}/again", about=RUN, scope=Scope.OPERATE)
def ask_run_again(api: Api, id: UUID) -> Response:
    """Show a form with the parameters of a run."""
    run = _found_run(api, id)
    try:
        shown = _call_of_run(api, run).shown
    except PayloadError as error:
        return page("again_run.html", 409, run=run, form=None, wrong=str(error), takes="", fields=None)
    return _form_of_run(api, run, Again(args=_pretty(shown.args), kwargs=_pretty(shown.kwargs)), shown)


@run_actions.post("/{id}/again", about=RUN)
def start_again(api: Api, id: UUID, body: Again) -> Note | Response:
    """Start a run of the newest version with the tags of another one, or show the form again with its mistake."""
    run = _found_run(api, id)
    if said := started_since(api, str(id), RERUN, body.since):
        return _refused(partial(_form_of_run, api, run), body, 409, said)
    try:
        new = _start_run(api, run, body)
    except (InvalidWorkflow, Misfit) as error:
        return _refused(partial(_form_of_run, api, run), body, 422, str(error))
    except Refused as error:
        return _refused(partial(_form_of_run, api, run), body, error.problem.status, error.problem.detail)
    return record(api, RERUN, "run", str(id), new)


def _start_run(api: Api, run: RunDetail, body: Again) -> UUID:
    name, tags = str(run.workflow), list(run.tags)
    known = api.read(parameters_of, name) if run.code else None
    if not run.code:  # which has no signature: all of it is by name
        body = Again(kwargs=body.named or body.kwargs)
    args, kwargs = _given_by(_call_of_run(api, run), body, known or ())
    if run.flow:
        return flow_routes.start_flow(api, name, flow_routes.NewFlowRun(params=kwargs, tags=tags), None).id
    if known:
        check_call(known, args, kwargs)
    given = workflow_routes.NewRunOf(args=args, params=kwargs, tags=tags)
    due = (run.fire_time or run.created_at).isoformat()  # as if it were started over
    return workflow_routes.start(api, name, given, None, visitor().key_scope, due)


def _found_run(api: Api, id: UUID) -> RunDetail:
    """Return a run that can be started again, as it is stored."""
    run = api.read(insights.show_run, id)
    if run is None:
        raise NotFound.by_id("run", str(id))
    if run.workflow is None or is_composed(run.workflow):
        raise refused(409, "It cannot be started again", f"Run {id} is not of a workflow.")
    return run


def _call_of_run(api: Api, run: RunDetail) -> Call:
    """Return what a run was started with; raises PayloadError where that cannot be had here."""
    hidden = api.redaction_of_run(run.id)
    if run.code:
        code = api.read(insights.show_code, run.id)
        return _opened(f"run {run.id}", b"" if code is None else code.payload, hidden)
    params = insights.readable_params(run.params)
    if isinstance(params, str):
        raise PayloadError(f"The parameters of run {run.id} cannot be read here: {params}")
    return Call(Arguments([], dict(params)), Arguments([], hidden.shown(dict(params))))


def _form_of_run(
    api: Api, run: RunDetail, form: Again, typed: Arguments | None, status: int = 200, wrong: str = ""
) -> Response:
    """Show the form, with a field for each parameter of the newest version that is known."""
    name = str(run.workflow)
    fields: list[Field] | None = None
    more, known = "", None
    if run.code:
        known = api.read(parameters_of, name)
        fields, more = _filled(known, typed)
    elif typed is not None:
        fields = of_params({} if run.flow else workflow_routes.find(api, name).definition.params, typed.kwargs)
        names = {one.name for one in fields}
        rest: dict[str, Any] = {key: value for key, value in typed.kwargs.items() if key not in names}
        more = _pretty(rest) if rest or run.flow else ""
    if form.named:
        form = msgspec.structs.replace(form, kwargs=form.named)
    shown = {"form": form, "wrong": wrong, "takes": _takes(known), "fields": fields, "more": more}
    return page("again_run.html", status, run=run, **shown)
