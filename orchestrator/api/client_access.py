"""Applies the rules that the Python client's calls declare, for keys that are bound to some queues and workflows.

A key with the scope `enqueue` brings no executors: their options can be any command, image or function. They are left
out of its tasks. A task that is declared with an executor is done by it nevertheless: the worker that knows the task
has its declaration, and the leader writes that into the row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, TypeVar
from uuid import UUID

import msgspec

from orchestrator.api.context import Api
from orchestrator.api.key_scope import (
    BACKFILL,
    WHOLE,
    WITHIN,
    Subject,
    check_definition,
    check_flow,
    check_queue,
    check_runs,
    check_task_name,
    check_tasks,
    check_workflow,
    has_run,
    lineage_within,
)
from orchestrator.domain.access import KeyScope, Scope
from orchestrator.domain.tasks.callbacks import Callback, Callbacks
from orchestrator.domain.tasks.task import DEFAULT_OPTIONS, NewTask, TaskOptions
from orchestrator.errors import NotFound
from orchestrator.sdk.calls.declaring import About, Kind, Rules


def subject(name: str, about: About | None) -> Subject:
    """Return the check that a call's rules ask for."""
    if not about:
        return WITHIN if about is None else WHOLE
    checks = [(_CHECKS[kind], attrgetter(*arguments.split())) for kind, arguments in about.items()]

    def check_body(api: Api, key_scope: KeyScope, given: Mapping[str, Any]) -> None:
        for check, value in checks:
            check(api, key_scope, value(given["body"]))

    return Subject(name, check_body)


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


def with_followers(tasks: Iterable[NewTask | Callback]) -> Iterator[NewTask | Callback]:
    """Yield tasks, and those that follow them."""
    for task in tasks:
        yield task
        if task.callbacks is not None:
            try:
                followers = msgspec.json.decode(task.callbacks, type=Callbacks)
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                continue  # it is refused for that
            yield from with_followers((*followers.success, *followers.failure))


def _check_new_tasks(_: Api, key_scope: KeyScope, tasks: Any) -> None:
    for queue in sorted({one.queue for one in with_followers(tasks if isinstance(tasks, list) else [tasks])}):
        check_queue(key_scope, queue)


def _check_task_or_run(api: Api, key_scope: KeyScope, target: bytes) -> None:
    if not has_run(api, key_scope, UUID(bytes=target)):
        check_tasks(api, key_scope, _ids(target))


def _check_schedule(api: Api, key_scope: KeyScope, key: str) -> None:
    try:
        workflow = api.backend.schedules.find(key).workflow
    except NotFound:
        workflow = key
    check_workflow(key_scope, workflow)


def _ids(value: Any) -> set[UUID]:
    """Return the ids that stand in an argument, or in some."""
    if isinstance(value, (list, tuple)):
        return {identifier for one in value for identifier in _ids(one)}
    return {value if isinstance(value, UUID) else UUID(bytes=value)}


_CHECKS: Mapping[Kind, Callable[[Api, KeyScope, Any], None]] = {
    Kind.TASK: lambda api, key_scope, tasks: check_tasks(api, key_scope, found) if (found := _ids(tasks)) else None,
    Kind.RUN: lambda api, key_scope, runs: check_runs(api, key_scope, found) if (found := _ids(runs)) else None,
    Kind.TASK_OR_RUN: _check_task_or_run,
    Kind.QUEUE: lambda _, key_scope, name: None if name is None else check_queue(key_scope, name),
    Kind.WORKFLOW: lambda _, key_scope, name: check_workflow(key_scope, name),
    Kind.SCHEDULE: _check_schedule,
    Kind.BACKFILL: lambda api, key_scope, number: BACKFILL.check(api, key_scope, {"number": number}),
    Kind.NEW_TASKS: _check_new_tasks,
    Kind.DEFINITION: lambda _, key_scope, definition: check_definition(key_scope, definition),
    Kind.FLOW: lambda _, key_scope, flow: check_flow(key_scope, *flow),
}


NEEDED = Scope.OPERATE
"""Which is what applying a workflow takes."""

T = TypeVar("T", NewTask, Callback)
_UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)
"""What is wrong with a text that the checks of calls refuse."""


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
