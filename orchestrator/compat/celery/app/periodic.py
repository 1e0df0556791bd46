"""`beat_schedule` and `add_periodic_task`, as native schedules."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.compat.celery.app import calls
from orchestrator.compat.celery.app.routes import Invocation
from orchestrator.compat.celery.exceptions import NotCovered
from orchestrator.compat.celery.request import MESSAGE
from orchestrator.compat.celery.schedules import crontab, maybe_schedule
from orchestrator.compat.celery.tags import tagged

_MAX_NAME_LENGTH = 100


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One scheduled call."""

    task: str
    schedule: Any
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any]
    options: Mapping[str, Any]


def add(
    app: Any,
    schedule: Any,
    sig: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    name: str | None,
    options: Mapping[str, Any],
) -> str:
    """Register a call of `add_periodic_task`; return the name of its schedule."""
    sig = app.signature(sig) if isinstance(sig, dict) else sig.s()
    if sig.subtask_type:
        raise NotCovered(
            f"a periodic {sig.subtask_type}", "Let the periodic task be one that starts the chain, group or chord."
        )
    merged = sig.clone(args, kwargs)
    name = name or repr(sig)
    app._entries[name] = Entry(
        task=sig["task"], schedule=schedule, args=merged.args, kwargs=merged.kwargs, options={**sig.options, **options}
    )
    if app._is_finalized:
        declare(app)
    return name


def declare(app: Any) -> None:
    """Declare all schedules; `orchestrator celery beat` and `orchestrator schedules apply` store them."""
    entries = dict(app._entries)
    for name, entry_ in (app.conf.beat_schedule or {}).items():
        entries[name] = Entry(
            task=entry_["task"],
            schedule=entry_["schedule"],
            args=entry_.get("args") or (),
            kwargs=entry_.get("kwargs") or {},
            options=entry_.get("options") or {},
        )
    for name, entry in entries.items():
        _declare(app, name, entry)


def _declare(app: Any, name: str, entry: Entry) -> None:
    task = app._tasks.get(entry.task)
    native = app._by_name(entry.task) if task is None else task._registered()
    options = calls.native_options(Invocation(app, entry.task, entry.args, entry.kwargs, entry.options, task))
    options.pop("eta", None)
    if options:
        native = native.options(**options)
    when = maybe_schedule(entry.schedule)
    times: Any = {**when.times(), "overlap": "allow"}  # as in Celery, whose beat does not look at the last call
    if isinstance(when, crontab) and app.conf.timezone is not None:
        times["timezone"] = str(app.conf.timezone)
    told = {name: entry.options.get(name) for name in ("headers", "priority", "time_limit", "soft_time_limit")}
    message = {**calls.message_of(None, None, told), **({"args": list(entry.args)} if entry.args else {})}
    params = dict(entry.kwargs)
    if entry.args and task is not None:
        params = _named(task, entry, params)
        message.pop("args", None) if MESSAGE not in params else None
    if message:
        params = {**params, MESSAGE: {**params.get(MESSAGE, {}), **message}}
    if task is None or not task.pydantic:
        params = tagged(params)
    app.orchestrator.schedules._declare(_label(name), params, times)(native)


def _named(task: Any, entry: Entry, params: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a schedule by name; those for `*args` go into the message."""
    bound = task._function_signature.bind_partial(*entry.args, **entry.kwargs)
    kinds = task._function_signature.parameters
    if any(kinds[name].kind in (kinds[name].VAR_POSITIONAL, kinds[name].POSITIONAL_ONLY) for name in bound.arguments):
        return {**params, MESSAGE: {"args": list(entry.args)}}
    by_name = dict(bound.arguments)
    rest = next((name for name in by_name if kinds[name].kind is kinds[name].VAR_KEYWORD), None)
    return {**by_name, **(by_name.pop(rest) if rest else {})}


def _label(name: str) -> str:
    return re.sub(r"[^\w.:/-]+", "-", name)[:_MAX_NAME_LENGTH].strip("-") or "schedule"
