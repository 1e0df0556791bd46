"""Enqueue a task like another one, with the same or with changed arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from uuid import UUID

import msgspec
from msgspec import Meta
from starlette.responses import Response

from orchestrator.api.bodies import check_shape
from orchestrator.api.context import Api
from orchestrator.api.dashboard.rendering import Note, page, page_actions, pages, visitor
from orchestrator.api.key_scope import TASK
from orchestrator.api.problems import Refused, unfit
from orchestrator.api.routes.enqueueing import NewCall, new_task
from orchestrator.api.routes.tasks import Arguments, found_task
from orchestrator.domain.access import KeyScope, Scope
from orchestrator.domain.limits.names import lane_name
from orchestrator.domain.redaction import HIDDEN
from orchestrator.domain.tasks.parameters import Misfit, Parameter, check_call, signature_of
from orchestrator.domain.tasks.task import parse_options
from orchestrator.errors import InvalidTask, PayloadError
from orchestrator.references import whole_reference
from orchestrator.sdk.values.display import NOT_JSON, as_shown
from orchestrator.sdk.values.payload import decode_call
from orchestrator.store.fleet import parameters_of
from orchestrator.store.insights import TaskDetail

routes, actions = pages("/ui/tasks"), page_actions("/ui/tasks")

_LONGEST = 100_000
"""Characters of a field of the form."""


class Again(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A task like another one. Arguments are JSON, which is read here so that a mistake leaves the form filled in."""

    args: Annotated[str, Meta(max_length=_LONGEST)] = ""
    kwargs: Annotated[str, Meta(max_length=_LONGEST)] = ""
    queue: str = ""
    """The queue of the other one, if none is given."""


class _Call(msgspec.Struct):
    """The arguments of the task that the new one is like, as they are and as a page shows them."""

    given: Arguments
    shown: Arguments


@routes.get("/{id}/again", about=TASK, scope=Scope.OPERATE)
def ask_again(api: Api, id: UUID) -> Response:
    """Show a form with the arguments of a task."""
    task = found_task(api, id)
    try:
        shown = _call(api, task).shown
    except PayloadError as error:
        return page("again.html", 409, task=task, form=None, wrong=str(error), takes="")
    args, kwargs = (msgspec.json.format(msgspec.json.encode(part)).decode() for part in (shown.args, shown.kwargs))
    return page(
        "again.html",
        task=task,
        form=Again(args, kwargs, task.queue),
        wrong="",
        takes=takes(api.read(parameters_of, task.name)),
    )


@actions.post("/{id}/again", about=TASK)
def enqueue_again(api: Api, id: UUID, body: Again, key_scope: KeyScope) -> Note | Response:
    """Enqueue a task with the name and options of another one, or show the form again with its mistake."""
    task = found_task(api, id)
    try:
        call = _call(api, task)
        args = _merged("args", call, dict(enumerate(_read("args", body.args, list))))
        kwargs = _merged("kwargs", call, _read("kwargs", body.kwargs, dict))
        if known := api.read(parameters_of, task.name):
            check_call(known, [*args.values()], kwargs)
        wanted = NewCall(name=task.name, args=[*args.values()], kwargs=kwargs, queue=body.queue.strip() or task.queue)
        new = new_task(api, msgspec.structs.replace(wanted, priority=task.priority), key_scope)
        visitor().check_tasks(new)
        warnings = api.names.check([task.name])
    except InvalidTask as error:
        return _refused(api, task, body, 422, str(error))
    except Misfit as error:
        return _refused(api, task, body, 422, f"{error.field}: {error}.")
    except Refused as error:
        return _refused(api, task, body, error.problem.status, error.problem.detail)
    options = msgspec.json.encode(task.options).decode() if task.options else None
    new = api.names.hiding(msgspec.structs.replace(new, options=options, lane=_lane(task, options), parent=id.bytes))
    made = UUID(bytes=api.backend.tasks.enqueue(new, key_scope.queues))
    return Note(" ".join(["the task is enqueued: this is it", *warnings]).rstrip("."), to=f"/ui/tasks/{made}")


def takes(parameters: Sequence[Parameter] | None) -> str:
    """Return the parameters of a task as its code has them, with types and defaults; nothing if they are not known."""
    try:
        return str(signature_of(parameters)) if parameters is not None else ""
    except ValueError:
        return ""


def _refused(api: Api, task: TaskDetail, form: Again, status: int, wrong: str) -> Response:
    """Show the form again. The browser may keep this answer to a POST, without which its Back leads to an error."""
    known = takes(api.read(parameters_of, task.name))
    answer = page("again.html", status, task=task, form=form, wrong=wrong, takes=known)
    answer.headers["Cache-Control"] = "private, no-cache"
    return answer


def _lane(task: TaskDetail, options: str | None) -> str | None:
    """Return the lane of a task with the options and the concurrency key of another one; a run has keys of its own."""
    key = task.lane.partition("|")[2] if task.lane and task.run_id is None else ""
    return lane_name(task.name, key or None, parse_options(options))


def _call(api: Api, task: TaskDetail) -> _Call:
    """Return the arguments of a task; raises PayloadError where they cannot be had here."""
    if len(task.payload) > _LONGEST or whole_reference(task.payload) is not None:
        raise PayloadError(f"The arguments of task {task.id} are too large for a form: enqueue it from a program.")
    args, kwargs, *_ = decode_call(task.payload) if task.payload else ([], {})
    shown, named = api.redaction_of_task(task).call_shown(args, kwargs)
    return _Call(Arguments(args, kwargs), Arguments(as_shown(shown), as_shown(named)))


def _read(name: str, text: str, kind: type[Any]) -> Any:
    try:
        check_shape(text.encode())
        return msgspec.json.decode(text or ("[]" if kind is list else "{}"), type=kind)
    except (msgspec.MsgspecError, UnicodeError) as error:
        what = "a JSON list, such as [1, 2]" if kind is list else 'a JSON object, such as {"width": 200}'
        raise unfit(f"{name}: expected {what}: {error}") from error


def _merged(name: str, call: _Call, typed: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return arguments, as they were where they are unchanged: hidden ones stay, and those of types that JSON lacks."""
    given, shown = (_by_place(getattr(one, name)) for one in (call.given, call.shown))
    found = {}
    for place, value in typed.items():
        text = _sorted(value)
        if place in shown and _sorted(shown[place]) == text:
            found[place] = given[place]
        elif HIDDEN in text:
            raise unfit(
                f"{name}: {place!r} is partly hidden. Leave all of it as it is, or give a value without {HIDDEN}."
            )
        elif NOT_JSON in text:
            raise unfit(
                f"{name}: {place!r} holds what JSON cannot write, such as NaN or bytes. Leave all of it as it is, give "
                f"a value without {NOT_JSON}…), or enqueue the task from a program."
            )
        else:
            found[place] = value
    return found


def _by_place(values: Sequence[Any] | Mapping[str, Any]) -> dict[Any, Any]:
    return dict(values) if isinstance(values, Mapping) else dict(enumerate(values))


def _sorted(value: Any) -> str:
    return msgspec.json.encode(value, order="sorted").decode()
