"""Signatures that are put together, as a composition of ours; and what its run comes to, as Celery's results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orchestrator.compat.celery import signals, states
from orchestrator.compat.celery.app import calls
from orchestrator.compat.celery.app.routes import Invocation
from orchestrator.compat.celery.exceptions import EncodeError, NotCovered
from orchestrator.compat.celery.results.many import GroupResult, of_run
from orchestrator.compat.celery.results.single import EagerResult
from orchestrator.compat.celery.signatures import maybe_signature
from orchestrator.compat.celery.utils import listed, uuid
from orchestrator.errors import PayloadError
from orchestrator.sdk.tasks.compositions import Call, Chain, Composition, Group

Part = Composition[Any]


def calls_in(sig: Any) -> Iterator[Any]:
    for one in _children(sig):
        yield from calls_in(one)
    if sig.subtask_type not in ("chain", "group", "chord", "chunks"):
        yield sig


def _children(sig: Any) -> list[Any]:
    if sig.subtask_type == "chord":
        return [*sig.tasks, *([sig.body] if sig.body is not None else [])]
    return list(sig.tasks) if sig.subtask_type in ("chain", "group", "chunks") else []


def start(sig: Any, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Start a composition; its options go to the calls that Celery gives them to."""
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
    return of_run(app, run, composition, task_id)


def _prepared(sig: Any, args: Sequence[Any], kwargs: Mapping[str, Any], options: dict[str, Any]) -> Any:
    """Return a composition with the arguments and options of its start; None if there is nothing in it."""
    kind = sig.subtask_type
    link, link_error = options.pop("link", None), options.pop("link_error", None)
    sig["options"] = {}
    if kind == "chunks":
        sig = sig.group()
        kind = "group"
    if kind == "group":
        if link:
            raise TypeError("Cannot add link to group: use a chord")
        tasks = [_given(one, args, kwargs, options, link_error) for one in sig.tasks]
        sig.tasks = tasks
        return sig if tasks else None
    if kind == "chord":
        if sig.body is None:
            raise TypeError("chord has no body: chord(header)(body)")
        header = [_given(one, args, kwargs, {}, None) for one in sig.tasks]
        sig.tasks = header
        body = sig.body
        body.options.update(options)
        _link(body, link, link_error)
        return sig if header else body.clone(([],))
    tasks = [one.clone() for one in sig.tasks]
    if not tasks:
        return None
    tasks[0] = _given(tasks[0], args, kwargs, options, None)
    _link(tasks[-1], link, None)
    for one in tasks:
        _link(one, None, link_error)
    sig.tasks = tasks
    return tasks[0] if len(tasks) == 1 and tasks[0].subtask_type is None else sig


def _given(one: Any, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any], error: Any) -> Any:
    """Return a part with arguments in front of its own, wherever these belong inside of it."""
    one = one.clone()
    if one.subtask_type in ("group", "chord"):
        inner = [_given(part, args, kwargs, options, error) for part in one.tasks]
        one.tasks = inner
    elif one.subtask_type == "chain" and one.tasks:
        one.tasks = [_given(one.tasks[0], args, kwargs, options, None), *one.tasks[1:]]
        _link(one, None, error)
    elif one.subtask_type is None:
        one = one.clone(args, kwargs, **options)
        _link(one, None, error)
    return one


def _link(sig: Any, link: Any, link_error: Any) -> None:
    sig.extend_list_option("link", link)
    sig.extend_list_option("link_error", link_error)


def compose(app: Any, sig: Any, errbacks: Sequence[Any]) -> Part:
    """Return a composition of ours; `errbacks` are those of what stands around it."""
    kind = sig.subtask_type
    options = sig.options
    errors = [*errbacks, *listed(options.get("link_error"))]
    links = listed(options.get("link"))
    if kind == "chunks":
        sig, kind = sig.group(), "group"
    if kind == "chain":
        tasks = [one.clone() for one in sig.tasks]
        for link in links:
            tasks[-1].link(link)
        return Chain([compose(app, one, errors) for one in tasks])
    if kind == "group":
        return Group([compose(app, one, errors) for one in _flat(sig.tasks)])
    if kind == "chord":
        body = sig.body.clone()
        for link in links:
            body.link(link)
        # Where a task of the header fails, the body is not run: its error callbacks are called in its place.
        of_body = [_of_chord(error) for error in (*errors, *_errbacks(body))]
        header = Group([compose(app, one, of_body) for one in _flat(sig.tasks)])
        return Chain([header, compose(app, body, errors)])
    return _call(app, sig, links, errors)


def _errbacks(body: Any) -> list[Any]:
    found = listed(body.options.get("link_error"))
    return [*found, *(error for one in _children(body)[:1] for error in _errbacks(one))]


def _of_chord(errback: Any) -> Any:
    """Return an error callback that is to be given a ChordError."""
    return maybe_signature(errback).clone().set(of_chord=True)


def _flat(tasks: Sequence[Any]) -> Iterator[Any]:
    """Yield the parts of a group; those of a group within it are its own, as in Celery."""
    for one in tasks:
        if one.subtask_type in ("group", "chunks"):
            errors = listed(one.options.get("link_error"))
            for inner in _flat(one.tasks):
                copied = inner.clone()
                _link(copied, None, errors)
                yield copied
        else:
            yield one


def _call(app: Any, sig: Any, links: Sequence[Any], errors: Sequence[Any]) -> Part:
    name, args, kwargs, options = sig["task"], sig.args, sig.kwargs, dict(sig.options)
    if options.pop("task_id", None) is not None:
        raise NotCovered(f"task_id of {name} in a chain, group or chord", "Give the whole of it a task_id.")
    for key in ("link", "link_error"):
        options.pop(key, None)
    known = app.tasks.get(name)
    native = app._by_name(name) if known is None else known._registered()
    message = calls.message_of(list(links), _distinct(errors), options)
    chosen = calls.native_options(Invocation(app, name, args, kwargs, options, known))
    calls.keep_priority(app, chosen, message)
    if signals.before_task_publish.receivers:
        calls.announce(app, native, args, kwargs, None, chosen, message)
    if (eta := chosen.pop("eta", None)) is not None:
        chosen["delay"] = max(0.0, (eta - app.now()).total_seconds())
    if not native._call_options.store_result or "store_result" in chosen:
        chosen["store_result"] = True  # what follows is given the result
    if chosen:
        native = native.options(**chosen)
    data, named = calls.as_data(known, args, kwargs, message)
    return Call(native, tuple(data), dict(named), immutable=bool(sig.immutable))


def _distinct(errors: Sequence[Any]) -> list[Any]:
    return [one for place, one in enumerate(errors) if one not in errors[:place]]


# -- right here


def apply(sig: Any, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Run all of a composition in this process."""
    kind = sig.subtask_type
    throw = {"throw": options["throw"]} if "throw" in options else {}
    errors = listed(sig.options.get("link_error"))
    if kind in ("group", "chunks"):
        parts = [_with_errors(one, errors) for one in _flat(sig.tasks)]
        return GroupResult(uuid(), [one.apply(args, kwargs, **throw) for one in parts], app=sig.app)
    parts = [sig.kwargs["header"], sig.body] if kind == "chord" else sig.tasks
    result: Any = None
    for one in parts:
        part = _with_errors(one, errors)
        given = args if result is None else (result.get(),)
        previous, result = result, part.apply(given, kwargs if result is None else None, **throw)
        result.parent = previous
        if isinstance(result, EagerResult) and result.state == states.FAILURE:
            break
    return result


def _with_errors(one: Any, errors: Sequence[Any]) -> Any:
    copied = one.clone()
    for error in errors:
        copied.link_error(error)
    return copied
