"""Forms to enqueue a task or start a run again, with the same or with changed arguments."""

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
from orchestrator.api.context import MAX_INT, Api
from orchestrator.api.dashboard.fields import Field, mismatch_of, of_parameters, of_params
from orchestrator.api.dashboard.pages.checked_actions import RERUN, change_of_task, record, started_message
from orchestrator.api.dashboard.rendering import Note, page, page_actions, pages, visitor
from orchestrator.api.key_scope import RUN, TASK
from orchestrator.api.problems import Refused, invalid, refused
from orchestrator.api.routes import flows as flow_routes
from orchestrator.api.routes import workflows as workflow_routes
from orchestrator.api.routes.enqueueing import NewCall, new_task
from orchestrator.api.routes.tasks import Arguments, stored_task
from orchestrator.domain.access import KeyScope, Scope
from orchestrator.domain.dag.composed import is_composed
from orchestrator.domain.limits.lane_limits import lane_name
from orchestrator.domain.redaction import HIDDEN, Redaction
from orchestrator.domain.tasks.parameters import Mismatch, Parameter, as_call, by_name, check_call, signature_of
from orchestrator.domain.tasks.task import parse_options
from orchestrator.errors import InvalidTask, InvalidWorkflow, NotFound, PayloadError
from orchestrator.references import whole_reference
from orchestrator.sdk.values.display import NOT_JSON, as_display_json
from orchestrator.sdk.values.payload import decode_call
from orchestrator.store import audit, insights
from orchestrator.store.fleet import parameters_of
from orchestrator.store.insights import RunDetail, TaskDetail

routes, actions = pages("/ui/tasks"), page_actions("/ui/tasks")
run_routes, run_actions = pages("/ui/runs"), page_actions("/ui/runs")

_ACT = "enqueue again"
"""The action in the audit log of the original task."""
_MAX_LENGTH = 100_000
"""Characters of a form field, at most."""


class Again(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A form to enqueue a task again. Arguments are JSON text, so that invalid input can be shown again."""

    named: Annotated[str, Meta(max_length=_MAX_LENGTH)] = ""
    """All arguments by parameter name, if a worker has announced the names; otherwise `args` and `kwargs` are used."""
    args: Annotated[str, Meta(max_length=_MAX_LENGTH)] = ""
    kwargs: Annotated[str, Meta(max_length=_MAX_LENGTH)] = ""
    queue: str = ""
    """The queue; if empty, that of the original task."""
    attempt: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    """The last attempt of an unsuccessful task when the form was rendered."""
    since: datetime | None = None
    """When the form was rendered."""


class Call(msgspec.Struct):
    """The arguments of the original task or run, as stored and as displayed."""

    stored: Arguments
    displayed: Arguments


@routes.get("/{id}/again", about=TASK, scope=Scope.OPERATE)
def ask_again(api: Api, id: UUID) -> Response:
    """Show a form with the arguments of a task."""
    task = stored_task(api, id)
    try:
        shown = _call(api, task).displayed
    except PayloadError as error:
        return page("repeat_task.html", 409, task=task, form=None, wrong=str(error), takes="", fields=None)
    return _form(api, task, Again(args=_pretty(shown.args), kwargs=_pretty(shown.kwargs), queue=task.queue), shown)


@actions.post("/{id}/again", about=TASK)
def enqueue_again(api: Api, id: UUID, body: Again, key_scope: KeyScope) -> Note | Response:
    """Enqueue a task with the name and options of an existing one, or show the form with the error."""
    task = stored_task(api, id)
    if conflict := change_of_task(api, task, body.attempt, is_retry=True) or _repeated_since(api, id, body.since):
        return _show_error(partial(_form, api, task), body, 409, conflict)
    known = api.read(parameters_of, task.name)
    try:
        args, kwargs = _form_arguments(_call(api, task), body, known or ())
        if known:
            check_call(known, args, kwargs)
        call = NewCall(name=task.name, args=args, kwargs=kwargs, queue=body.queue.strip() or task.queue)
        new = new_task(api, msgspec.structs.replace(call, priority=task.priority), key_scope)
        visitor().check_tasks(new)
        warnings = api.names.check([task.name])
    except InvalidTask as error:
        return _show_error(partial(_form, api, task), body, 422, str(error))
    except Mismatch as error:
        return _show_error(
            partial(_form, api, task), body, 422, str(error) if body.named else f"{error.field}: {error}."
        )
    except Refused as error:
        return _show_error(partial(_form, api, task), body, error.problem.status, error.problem.detail)
    options = msgspec.json.encode(task.options).decode() if task.options else None
    new = api.names.hiding(msgspec.structs.replace(new, options=options, lane=_lane(task, options), parent=id.bytes))
    new_id = UUID(bytes=api.backend.tasks.enqueue(new, key_scope.queues))
    connections = api.backend.connections
    with connections.changing("the audit entry was written") as connection:
        connections.record(connection, _ACT, "task", str(id), made=str(new_id))
    return Note(
        " ".join(["the task was enqueued: this is the new task", *warnings]).rstrip("."), to=f"/ui/tasks/{new_id}"
    )


def _repeated_since(api: Api, id: UUID, since: datetime | None) -> str:
    """Return a message if the task was enqueued again since the form was rendered; otherwise an empty string."""
    known = None if since is None else api.read(audit.last_act, str(id), _ACT, since)
    return (
        "" if known is None else f"The same task was enqueued {known}, after this form was loaded. Enqueue another one?"
    )


def _form_arguments(call: Call, body: Again, parameters: Sequence[Parameter]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments from a form. Changed values must match the displayed types; raises Mismatch."""
    stored, displayed = (by_name(parameters, one.args, one.kwargs) or {} for one in (call.stored, call.displayed))
    if body.named:
        typed = _merge("", stored, displayed, _read_json("named", body.named, dict))
        args, kwargs = as_call(parameters, typed, len(call.stored.args))
    else:
        args, kwargs = _typed(call, body)
    changed = by_name(parameters, args, kwargs) or {}
    for parameter in parameters:
        is_changed = parameter.name in changed and changed[parameter.name] is not stored.get(parameter.name, UNSET)
        if is_changed and (problem := mismatch_of(parameter, changed[parameter.name])):
            raise Mismatch("kwargs" if parameter.name in kwargs else "args", f"{parameter.name}: {problem}")
    return args, kwargs


def _typed(call: Call, body: Again) -> tuple[list[Any], dict[str, Any]]:
    numbered = (
        dict(enumerate(one)) for one in (call.stored.args, call.displayed.args, _read_json("args", body.args, list))
    )
    args = _merge("args: ", *numbered)
    kwargs = _merge("kwargs: ", call.stored.kwargs, call.displayed.kwargs, _read_json("kwargs", body.kwargs, dict))
    return [*args.values()], kwargs


def _signature(parameters: Sequence[Parameter] | None) -> str:
    """Return the signature of a task, with types and defaults; empty if unknown."""
    try:
        return str(signature_of(parameters)) if parameters is not None else ""
    except ValueError:
        return ""


def _form(
    api: Api, task: TaskDetail, form: Again, typed: Arguments | None = None, status: int = 200, wrong: str = ""
) -> Response:
    """Render the form: a field per known parameter and one for further named arguments, or two JSON fields."""
    known = api.read(parameters_of, task.name)
    if form.named:
        form = msgspec.structs.replace(form, kwargs=form.named)  # the parameters may have changed since
    fields, more = _filled_fields(known, typed)
    return page(
        "repeat_task.html", status, task=task, form=form, wrong=wrong, takes=_signature(known), fields=fields, more=more
    )


def _filled_fields(known: Sequence[Parameter] | None, typed: Arguments | None) -> tuple[list[Field] | None, str]:
    """Return filled fields of known parameters, and other named arguments as JSON; None if no parameters are known."""
    values = None if known is None or typed is None else by_name(known, typed.args, typed.kwargs)
    if known is None or values is None:
        return None, ""
    fields = of_parameters(known, values)
    if not any(item.kind == "variadic keyword" for item in known):
        return fields, ""
    names = {item.name for item in fields}
    return fields, _pretty({name: value for name, value in values.items() if name not in names})


def _show_error(
    show: Callable[[Again, Arguments | None, int, str], Response], form: Again, status: int, wrong: str
) -> Response:
    """Render the form with an error. The browser may cache this response to a POST, so that its Back button works."""
    typed = None
    if form.named:
        with suppress(Refused):
            typed = Arguments([], _read_json("named", form.named, dict))
    answer = show(form, typed, status, wrong)
    answer.headers["Cache-Control"] = "private, no-cache"
    return answer


def _lane(task: TaskDetail, options: str | None) -> str | None:
    """Return the lane of the new task; a task of a run does not pass on its concurrency key."""
    key = task.lane.partition("|")[2] if task.lane and task.run_id is None else ""
    return lane_name(task.name, key or None, parse_options(options))


def _call(api: Api, task: TaskDetail) -> Call:
    """Return the arguments of a task; raise PayloadError if they cannot be read here."""
    return _stored_call(f"task {task.id}", task.payload, api.redaction_of_task(task))


def _stored_call(what: str, payload: bytes, hidden: Redaction) -> Call:
    """Return the stored arguments of a task or run; raise PayloadError if they cannot be read here."""
    if len(payload) > _MAX_LENGTH or whole_reference(payload) is not None:
        raise PayloadError(f"The arguments of {what} are too large for a form: start it from code.")
    args, kwargs, *_ = decode_call(payload) if payload else ([], {})
    displayed, displayed_kwargs = hidden.redacted_call(args, kwargs)
    return Call(Arguments(args, kwargs), Arguments(as_display_json(displayed), as_display_json(displayed_kwargs)))


def _read_json(name: str, text: str, kind: type[Any]) -> Any:
    try:
        check_shape(text.encode())
        return msgspec.json.decode(text or ("[]" if kind is list else "{}"), type=kind)
    except (msgspec.MsgspecError, UnicodeError) as error:
        what = "a JSON list, such as [1, 2]" if kind is list else 'a JSON object, such as {"width": 200}'
        raise invalid(f"{name}: expected {what}: {error}") from error


def _merge(label: str, stored: Mapping[Any, Any], shown: Mapping[Any, Any], typed: Mapping[Any, Any]) -> dict[Any, Any]:
    """Merge typed arguments with the stored ones. An unchanged argument keeps its stored, unredacted value."""
    merged = {}
    for key, value in typed.items():
        text = _sorted(value)
        if key in shown and _sorted(shown[key]) == text:
            merged[key] = stored[key]
        elif HIDDEN in text:
            raise invalid(f"{label}{key!r} is partly hidden. Leave it unchanged, or enter a value without {HIDDEN}.")
        elif NOT_JSON in text:
            raise invalid(
                f"{label}{key!r} contains values that JSON cannot represent, such as NaN or bytes. Leave it unchanged, "
                f"enter a value without {NOT_JSON}…), or enqueue the task from code."
            )
        else:
            merged[key] = value
    return merged


def _pretty(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode()


def _sorted(value: Any) -> str:
    return msgspec.json.encode(value, order="sorted").decode()


@run_routes.get("/{id}/again", about=RUN, scope=Scope.OPERATE)
def ask_run_again(api: Api, id: UUID) -> Response:
    """Show a form with the parameters of a run."""
    run = _stored_run(api, id)
    try:
        shown = _call_of_run(api, run).displayed
    except PayloadError as error:
        return page("repeat_run.html", 409, run=run, form=None, wrong=str(error), takes="", fields=None)
    return _form_of_run(api, run, Again(args=_pretty(shown.args), kwargs=_pretty(shown.kwargs)), shown)


@run_actions.post("/{id}/again", about=RUN)
def start_again(api: Api, id: UUID, body: Again) -> Note | Response:
    """Start a run of the newest version with the tags of another one, or show the form with its mistake."""
    run = _stored_run(api, id)
    if conflict := started_message(api, str(id), RERUN, body.since):
        return _show_error(partial(_form_of_run, api, run), body, 409, conflict)
    try:
        new = _start_run(api, run, body)
    except (InvalidWorkflow, Mismatch) as error:
        return _show_error(partial(_form_of_run, api, run), body, 422, str(error))
    except Refused as error:
        return _show_error(partial(_form_of_run, api, run), body, error.problem.status, error.problem.detail)
    return record(api, RERUN, "run", str(id), new)


def _start_run(api: Api, run: RunDetail, body: Again) -> UUID:
    name, tags = str(run.workflow), list(run.tags)
    parameters = api.read(parameters_of, name) if run.code else None
    if not run.code:  # definitions and flows have only named parameters
        body = Again(kwargs=body.named or body.kwargs)
    args, kwargs = _form_arguments(_call_of_run(api, run), body, parameters or ())
    if run.flow:
        return flow_routes.start_flow(api, name, flow_routes.NewFlowRun(params=kwargs, tags=tags), None).id
    if parameters:
        check_call(parameters, args, kwargs)
    request = workflow_routes.NewRunOf(args=args, params=kwargs, tags=tags)
    due = (run.fire_time or run.created_at).isoformat()  # as for a rerun
    return workflow_routes.start(api, name, request, None, visitor().key_scope, due)


def _stored_run(api: Api, id: UUID) -> RunDetail:
    """Return the stored run; raise an error if it cannot be started again."""
    run = api.read(insights.show_run, id)
    if run is None:
        raise NotFound.by_id("run", str(id))
    if run.workflow is None or is_composed(run.workflow):
        raise refused(409, "The run cannot be started again", f"Run {id} is not a run of a workflow.")
    return run


def _call_of_run(api: Api, run: RunDetail) -> Call:
    """Return the arguments of a run; raise PayloadError if they cannot be read here."""
    hidden = api.redaction_of_run(run.id)
    if run.code:
        code = api.read(insights.show_code, run.id)
        return _stored_call(f"run {run.id}", b"" if code is None else code.payload, hidden)
    params = insights.readable_params(run.params)
    if isinstance(params, str):
        raise PayloadError(f"The parameters of run {run.id} cannot be read here: {params}")
    return Call(Arguments([], dict(params)), Arguments([], hidden.redacted(dict(params))))


def _form_of_run(
    api: Api, run: RunDetail, form: Again, typed: Arguments | None, status: int = 200, wrong: str = ""
) -> Response:
    """Render the form of a run, with a field per known parameter of the newest version."""
    name = str(run.workflow)
    fields: list[Field] | None = None
    more, parameters = "", None
    if run.code:
        parameters = api.read(parameters_of, name)
        fields, more = _filled_fields(parameters, typed)
    elif typed is not None:
        fields = of_params({} if run.flow else workflow_routes.find(api, name).definition.params, typed.kwargs)
        names = {field.name for field in fields}
        others: dict[str, Any] = {key: value for key, value in typed.kwargs.items() if key not in names}
        more = _pretty(others) if others or run.flow else ""
    if form.named:
        form = msgspec.structs.replace(form, kwargs=form.named)
    values = {"form": form, "wrong": wrong, "takes": _signature(parameters), "fields": fields, "more": more}
    return page("repeat_run.html", status, run=run, **values)
