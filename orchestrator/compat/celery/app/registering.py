"""Registers Celery tasks as native tasks."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from orchestrator.compat.celery.app import routes
from orchestrator.compat.celery.app.calls import aware_datetime
from orchestrator.compat.celery.app.execution import run_in_worker
from orchestrator.compat.celery.exceptions import INTERRUPTIONS
from orchestrator.compat.celery.request import MESSAGE
from orchestrator.sdk.tasks.task import Task as NativeTask


def register(task: Any) -> NativeTask[..., Any]:
    """Register a native task with the same name."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return run_in_worker(task, args, kwargs)

    function.__name__ = function.__qualname__ = type(task).__name__
    function.__module__ = str(type(task).__module__)
    function.__doc__ = task.__doc__
    function.bind = task.bind  # type: ignore[attr-defined]
    function._interruptions = INTERRUPTIONS  # type: ignore[attr-defined]
    signature = _signature(task)
    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__annotations__ = {
        p.name: p.annotation for p in signature.parameters.values() if p.annotation is not p.empty
    }
    native: NativeTask[..., Any] = task.app.orchestrator.task(name=task.name, **options_of(task))(function)
    return native


def options_of(task: Any) -> dict[str, Any]:
    app, conf = task.app, task.app.conf
    route = routes.find(routes.Invocation(app, task.name, task=task)) if app._is_routed_by_name else {}
    queue = task.queue or route.get("queue")
    hard = _first(task.time_limit, conf.task_time_limit)
    soft = _first(task.soft_time_limit, conf.task_soft_time_limit)
    rate = _first(task.rate_limit, conf.task_default_rate_limit)
    acks_late = _first(task.acks_late, conf.task_acks_late if conf.is_given("task_acks_late") else None)
    priority = _first(task.priority, route.get("priority"), conf.task_default_priority)
    options = {
        "queue": app._queue(queue or conf.task_default_queue),
        "priority": None if priority is None else app._priority(priority),
        "timeout": hard,
        "soft_timeout": soft if soft and not (hard and soft >= hard) else None,
        "rate": f"{rate}/s" if isinstance(rate, (int, float)) and rate else rate or None,
        "on_loss": "fail" if acks_late is False else None,  # at most once, as in Celery; not the default here
        "store_result": False if _first(task.ignore_result, conf.task_ignore_result) else None,
        "expires": aware_datetime(task.expires) if isinstance(task.expires, (datetime, str)) else task.expires,
    }
    return {name: value for name, value in options.items() if value is not None}


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _signature(task: Any) -> inspect.Signature:
    """Return the signature that callers see, with a parameter for the message."""
    own = task._function_signature
    hints = _hints(task)
    parameters = [
        p.replace(annotation=hints.get(p.name, p.empty)) for p in own.parameters.values() if p.name != MESSAGE
    ]
    message = inspect.Parameter(MESSAGE, inspect.Parameter.KEYWORD_ONLY, default=None)
    rest = [p for p in parameters if p.kind is p.VAR_KEYWORD]
    positional = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    if not task.typing:
        var_args = inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)
        var_kwargs = inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)
        return inspect.Signature([var_args, message, var_kwargs])
    return inspect.Signature([*positional, message, *rest])


def _hints(task: Any) -> dict[str, Any]:
    """Return the types for argument conversion: as in Celery, annotations count only with `pydantic`."""
    if not task.pydantic:
        return {}
    try:
        hints = typing.get_type_hints(inspect.unwrap(task.run))
    except (NameError, TypeError, AttributeError):
        return {}
    return hints


def checking(name: str, signature: inspect.Signature) -> Callable[[Sequence[Any], Mapping[str, Any]], None] | None:
    """Return a function that raises TypeError for a call that does not fit the signature; None if every call fits."""
    parameters = signature.parameters.values()
    if all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return None
    maximum = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    minimum = sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    is_plain = all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)

    def check(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if is_plain and not kwargs and minimum <= len(args) <= maximum:
            return
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}() {error}") from None

    return check
