"""Applies the rules that the Python client's calls declare, for keys that are bound to some queues and workflows.

A key with the scope `enqueue` brings no executors: their options can be any command, image or function. They are left
out of its tasks. A task that is declared with an executor is done by it nevertheless: the worker that knows the task
has its declaration, and the leader writes that into the row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from orchestrator.api.context import Api
from orchestrator.api.key_scope import check_task_name, has_run, lineage_within, with_followers
from orchestrator.domain.access import KeyScope, Scope
from orchestrator.domain.tasks.callbacks import Callback, Callbacks
from orchestrator.domain.tasks.task import DEFAULT_OPTIONS, NewTask, TaskOptions
from orchestrator.sdk.calls.declaring import Kind, Rules


def narrow(rules: Rules, api: Api, key_scope: KeyScope, given: dict[str, Any]) -> None:
    """Confine the arguments of a call to the queues and workflows of a bound key."""
    for argument, kind in rules.within.items():
        name, _, field = argument.partition(".")
        is_of_queues = given["kind"] == "task" if kind is Kind.TASK_OR_RUN else kind is not Kind.WORKFLOW
        prefix = key_scope.queues if is_of_queues else key_scope.workflows
        if kind is Kind.TASK and given[name].run is not None and has_run(api, key_scope, given[name].run):
            prefix = ""  # all tasks of a run are for a key that the run is for
        given[name] = dataclasses.replace(given[name], **{field: prefix}) if field else prefix


def keep(rules: Rules, key_scope: KeyScope, found: Any) -> Any:
    """Return the part of a result that a bound key may see."""
    for kind, field in rules.keeps.items():
        if kind is Kind.LINEAGE:
            return lineage_within(key_scope, found)
        has = key_scope.has_queue if kind is Kind.QUEUE else key_scope.has_workflow
        if isinstance(found, dict):
            return {name: one for name, one in found.items() if has(name)}
        return [one for one in found if has(getattr(one, field) if field else one)]
    return found if rules.bound_result is None else rules.bound_result


def check_names(key_scope: KeyScope, body: Any) -> None:
    """Refuse tasks, and those that follow them, whose names the caller may not enqueue."""
    task, tasks = getattr(body, "task", None), getattr(body, "tasks", None)
    given = [task] if isinstance(task, NewTask) else [one for one in tasks or () if isinstance(one, NewTask)]
    for name in sorted({one.name for one in with_followers(given)}):
        check_task_name(key_scope, name)


NEEDED = Scope.OPERATE
"""Which is what applying a workflow takes."""

T = TypeVar("T", NewTask, Callback)
_UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)
"""Errors of a body that cannot be read."""


def without_executors(body: Any) -> Any:
    """Return the body of a call of the Python client without the executors of its tasks, and of what follows them."""
    changed: dict[str, Any] = {}
    task, tasks = getattr(body, "task", None), getattr(body, "tasks", None)
    if isinstance(task, NewTask):
        changed["task"] = _without(task)
    if isinstance(tasks, list):
        changed["tasks"] = [_without(one) if isinstance(one, NewTask) else one for one in tasks]
    return msgspec.structs.replace(body, **changed) if changed else body


def _without(task: T) -> T:
    options, callbacks = _changed(task.options, _plain_options), _changed(task.callbacks, _plain_callbacks)
    if (options, callbacks) == (task.options, task.callbacks):
        return task
    return msgspec.structs.replace(task, options=options, callbacks=callbacks)


def _changed(text: str | None, change: Callable[[str], str | None]) -> str | None:
    try:
        return None if text is None else change(text)
    except _UNREADABLE:
        return text  # it is refused for that


def _plain_options(text: str) -> str | None:
    options = msgspec.json.decode(text, type=TaskOptions)
    if options.executor is None:
        return text
    plain = msgspec.structs.replace(options, executor=None)
    return None if plain == DEFAULT_OPTIONS else msgspec.json.encode(plain).decode()


def _plain_callbacks(text: str) -> str:
    known = msgspec.json.decode(text, type=Callbacks)
    success, failure = tuple(map(_without, known.success)), tuple(map(_without, known.failure))
    if (success, failure) == (known.success, known.failure):
        return text
    return msgspec.json.encode(msgspec.structs.replace(known, success=success, failure=failure)).decode()
