"""Converts composed signatures to native compositions, and their runs to Celery's results."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orchestrator.compat.celery import signals, states
from orchestrator.compat.celery.app import calls
from orchestrator.compat.celery.app.routes import Invocation
from orchestrator.compat.celery.exceptions import EncodeError, NotCovered
from orchestrator.compat.celery.request import MESSAGE
from orchestrator.compat.celery.results.many import GroupResult, ids_of_calls, of_run
from orchestrator.compat.celery.results.single import EagerResult
from orchestrator.compat.celery.signatures import maybe_signature
from orchestrator.compat.celery.tags import untagged
from orchestrator.compat.celery.utils import listed, uuid
from orchestrator.errors import PayloadError
from orchestrator.sdk.tasks.compositions import Call, Chain, Composition, Group

Part = Composition[Any]


def calls_in(sig: Any) -> Iterator[Any]:
    for child in _children(sig):
        yield from calls_in(child)
    if sig.subtask_type not in ("chain", "group", "chord", "chunks"):
        yield sig


def _children(sig: Any) -> list[Any]:
    if sig.subtask_type == "chord":
        return [*sig.tasks, *([sig.body] if sig.body is not None else [])]
    return list(sig.tasks) if sig.subtask_type in ("chain", "group", "chunks") else []


def start(sig: Any, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Start a composition; its options go to the same calls as in Celery."""
    app = sig.app
    app._configure()
    options = {**sig.options, **options}
    on_success, task_id = bool(options.pop("on_success", False)), options.pop("task_id", None)
    prepared = _prepared(sig.clone(), args, kwargs, options)
    if prepared is None:
        return GroupResult(task_id or uuid(), [], app=app)
    if not prepared.subtask_type or prepared.subtask_type in ("xmap", "xstarmap"):
        return prepared.apply_async(task_id=task_id, on_success=on_success or None)
    composition = compose(app, prepared, ())
    key = None if task_id is None else f"celery:{task_id}"
    try:
        run = composition.start(key=key, on_success=on_success)
    except PayloadError as error:
        raise EncodeError(str(error)) from error
    if signals.after_task_publish.receivers:
        for call, identifier in zip(composition._calls(), ids_of_calls(run, composition), strict=True):
            own = untagged(dict(call.kwargs))
            message = own.pop(MESSAGE, None) or {}
            calls.announce_stored(app, call.task, untagged(call.args), own, identifier, message)
    return of_run(app, run, composition, task_id)


def _prepared(sig: Any, args: Sequence[Any], kwargs: Mapping[str, Any], options: dict[str, Any]) -> Any:
    """Return a composition with the arguments and options of its start merged in; None if it is empty."""
    kind, own = sig.subtask_type, sig.options
    link, link_error = options.pop("link", None), options.pop("link_error", None)
    sig["options"] = {}
    if kind == "chunks":
        sig = sig.group()
        kind = "group"
    if kind == "group":
        if link:
            raise TypeError("Cannot add link to group: use a chord")
        tasks = [_bind(part, args, kwargs, options, link_error) for part in sig.tasks]
        sig.tasks = tasks
        return sig if tasks else None
    if kind == "chord":
        if sig.body is None:
            raise TypeError("chord has no body: chord(header)(body)")
        of_header = {name: value for name, value in options.items() if name not in _OF_BODY or name in own}
        of_header = {**_options_of_parts(sig.kwargs["header"]), **of_header}
        header = [_bind(part, args, kwargs, of_header, None) for part in sig.tasks]
        sig.tasks = header
        body = sig.body
        body.options.update(options)
        _link(body, link, link_error)
        return sig if header else body.clone(([],))
    tasks = [part.clone() for part in sig.tasks]
    if not tasks:
        return None
    tasks[0] = _bind(tasks[0], args, kwargs, options, None)
    _link(tasks[-1], link, None)
    for part in tasks:
        _link(part, None, link_error)
    sig.tasks = tasks
    return tasks[0] if len(tasks) == 1 and tasks[0].subtask_type is None else sig


_OF_BODY = ("countdown", "interval", "max_retries")
"""Options of a chord's start that its header does not get, as in Celery."""
_OF_WHOLE = ("link", "link_error", "task_id")


def _options_of_parts(sig: Any) -> dict[str, Any]:
    """Return the options of a composition that Celery passes on to its parts."""
    return {name: value for name, value in sig.options.items() if name not in _OF_WHOLE}


def _bind(part: Any, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any], error: Any) -> Any:
    """Return a part with the arguments prepended to its own, or to those of its first calls; and with the options."""
    part = part.group() if part.subtask_type == "chunks" else part.clone()
    if part.subtask_type not in ("chain", "group", "chord"):
        part = part.clone(args, kwargs, **options)
        _link(part, None, error)
        return part
    options = {**_options_of_parts(part), **options}
    part["options"] = {name: value for name, value in part.options.items() if name in _OF_WHOLE}
    if part.subtask_type == "chain":
        part.tasks = [*(_bind(first, args, kwargs, options, None) for first in part.tasks[:1]), *part.tasks[1:]]
        _link(part, None, error)
        return part
    if part.subtask_type == "chord":
        part.body = _bind(part.body, (), {}, options, None)
        options = {**_options_of_parts(part.kwargs["header"]), **options}
    parts = [_bind(inner, args, kwargs, options, error) for inner in part.tasks]
    part.tasks = parts
    return part


def _link(sig: Any, link: Any, link_error: Any) -> None:
    sig.extend_list_option("link", link)
    sig.extend_list_option("link_error", link_error)


def compose(app: Any, sig: Any, errbacks: Sequence[Any]) -> Part:
    """Return a native composition. `errbacks` are the error callbacks of the enclosing parts."""
    if sig.subtask_type in ("chain", "group", "chord", "chunks") and _options_of_parts(sig):
        sig = _bind(sig, (), {}, {}, None)
    kind, options = sig.subtask_type, sig.options
    errors = [*errbacks, *listed(options.get("link_error"))]
    links = listed(options.get("link"))
    if kind == "chunks":
        sig, kind = sig.group(), "group"
    if kind == "chain":
        tasks = [part.clone() for part in sig.tasks]
        for link in links:
            tasks[-1].link(link)
        return Chain([compose(app, part, errors) for part in tasks])
    if kind == "group":
        return Group([compose(app, part, errors) for part in _flat(sig.tasks)])
    if kind == "chord":
        body = sig.body.clone()
        for link in links:
            body.link(link)
        # If a task of the header fails, the body never runs: call the body's error callbacks instead.
        body_errors = [_as_chord_errback(error) for error in (*errors, *_errbacks(body))]
        header = Group([compose(app, part, body_errors) for part in _flat(sig.tasks)])
        return Chain([header, compose(app, body, errors)])
    return _call(app, sig, links, errors)


def _errbacks(body: Any) -> list[Any]:
    errbacks = listed(body.options.get("link_error"))
    return [*errbacks, *(error for child in _children(body)[:1] for error in _errbacks(child))]


def _as_chord_errback(errback: Any) -> Any:
    """Return an error callback that receives a ChordError."""
    return maybe_signature(errback).clone().set(of_chord=True)


def _flat(tasks: Sequence[Any]) -> Iterator[Any]:
    """Yield the parts of a group; nested groups are flattened, as in Celery."""
    for part in tasks:
        if part.subtask_type in ("group", "chunks"):
            errors = listed(part.options.get("link_error"))
            for inner in _flat(_bind(part, (), {}, {}, None).tasks):
                copy = inner.clone()
                _link(copy, None, errors)
                yield copy
        else:
            yield part


def _call(app: Any, sig: Any, links: Sequence[Any], errors: Sequence[Any]) -> Part:
    name, args, kwargs, options = sig["task"], sig.args, sig.kwargs, dict(sig.options)
    if options.pop("task_id", None) is not None:
        raise NotCovered(f"task_id of {name} in a chain, group or chord", "Pass the task_id to the whole composition.")
    for key in ("link", "link_error"):
        options.pop(key, None)
    task = app.tasks.get(name)
    native = app._by_name(name) if task is None else task._registered()
    if task is not None and task.has_own_apply_async:
        warnings.warn(
            f"Task {name}: its own apply_async is not called for parts of chains, groups and chords, which the leader "
            f"starts. To set headers of every call, connect the signal before_task_publish.",
            stacklevel=2,
        )
    message = calls.message_of(list(links), _distinct(errors), options)
    native_options = calls.native_options(Invocation(app, name, args, kwargs, options, task))
    calls.keep_priority(app, native_options, message)
    if signals.before_task_publish.receivers:
        calls.announce(app, native, args, kwargs, None, native_options, message)
    if (eta := native_options.pop("eta", None)) is not None:
        native_options["delay"] = max(0.0, (eta - app.now()).total_seconds())
    if not native._call_options.store_result or "store_result" in native_options:
        native_options["store_result"] = True  # the next part needs the result
    if native_options:
        native = native.options(**native_options)
    data, named = calls.as_data(task, args, kwargs, message)
    return Call(native, tuple(data), dict(named), immutable=bool(sig.immutable))


def _distinct(errors: Sequence[Any]) -> list[Any]:
    return [error for index, error in enumerate(errors) if error not in errors[:index]]


# -- right here


def apply(sig: Any, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Run a whole composition in this process."""
    kind = sig.subtask_type
    throw = {"throw": options["throw"]} if "throw" in options else {}
    errors = listed(sig.options.get("link_error"))
    if kind in ("group", "chunks"):
        parts = [_with_errors(step, errors) for step in _flat(sig.tasks)]
        return GroupResult(uuid(), [step.apply(args, kwargs, **throw) for step in parts], app=sig.app)
    parts = [sig.kwargs["header"], sig.body] if kind == "chord" else sig.tasks
    result: Any = None
    for step in parts:
        part = _with_errors(step, errors)
        arguments = args if result is None else (result.get(),)
        previous, result = result, part.apply(arguments, kwargs if result is None else None, **throw)
        result.parent = previous
        if isinstance(result, EagerResult) and result.state == states.FAILURE:
            break
    return result


def _with_errors(one: Any, errors: Sequence[Any]) -> Any:
    copy = one.clone()
    for error in errors:
        copy.link_error(error)
    return copy
