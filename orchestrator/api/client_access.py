"""Applies the rules that the Python client's calls declare, for keys that are bound to some queues and workflows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any
from uuid import UUID

import msgspec

from orchestrator.api.context import Api
from orchestrator.api.reach import (
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
from orchestrator.domain.access import Reach
from orchestrator.domain.tasks.callbacks import Callback, Callbacks
from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import NotFound
from orchestrator.sdk.calls.declaring import About, Kind, Rules


def subject(name: str, about: About | None) -> Subject:
    """Return the check that a call's rules ask for."""
    if not about:
        return WITHIN if about is None else WHOLE
    checks = [(_CHECKS[kind], attrgetter(*arguments.split())) for kind, arguments in about.items()]

    def check_body(api: Api, reach: Reach, given: Mapping[str, Any]) -> None:
        for check, value in checks:
            check(api, reach, value(given["body"]))

    return Subject(name, check_body)


def narrow(rules: Rules, api: Api, reach: Reach, given: dict[str, Any]) -> None:
    """Confine the arguments of a call to the queues and workflows of a bound key."""
    for argument, kind in rules.within.items():
        name, _, field = argument.partition(".")
        is_of_queues = given["kind"] == "task" if kind is Kind.TASK_OR_RUN else kind is not Kind.WORKFLOW
        prefix = reach.queues if is_of_queues else reach.workflows
        if kind is Kind.TASK and given[name].run is not None and has_run(api, reach, given[name].run):
            prefix = ""
        given[name] = dataclasses.replace(given[name], **{field: prefix}) if field else prefix


def keep(rules: Rules, reach: Reach, found: Any) -> Any:
    """Return the part of a result that a bound key may see."""
    for kind, field in rules.keeps.items():
        if kind is Kind.LINEAGE:
            return lineage_within(reach, found)
        has = reach.has_queue if kind is Kind.QUEUE else reach.has_workflow
        if isinstance(found, dict):
            return {name: one for name, one in found.items() if has(name)}
        return [one for one in found if has(getattr(one, field) if field else one)]
    return found if rules.bound_result is None else rules.bound_result


def check_names(reach: Reach, body: Any) -> None:
    """Refuse tasks, and those that follow them, whose names the caller may not enqueue."""
    task, tasks = getattr(body, "task", None), getattr(body, "tasks", None)
    given = [task] if isinstance(task, NewTask) else [one for one in tasks or () if isinstance(one, NewTask)]
    for name in sorted({one.name for one in with_followers(given)}):
        check_task_name(reach, name)


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


def _check_new_tasks(_: Api, reach: Reach, tasks: Any) -> None:
    for queue in sorted({one.queue for one in with_followers(tasks if isinstance(tasks, list) else [tasks])}):
        check_queue(reach, queue)


def _check_task_or_run(api: Api, reach: Reach, target: bytes) -> None:
    if not has_run(api, reach, UUID(bytes=target)):
        check_tasks(api, reach, _ids(target))


def _check_schedule(api: Api, reach: Reach, key: str) -> None:
    try:
        workflow = api.backend.schedules.find(key).workflow
    except NotFound:
        workflow = key
    check_workflow(reach, workflow)


def _ids(value: Any) -> set[UUID]:
    """Return the ids that stand in an argument, or in some."""
    if isinstance(value, (list, tuple)):
        return {identifier for one in value for identifier in _ids(one)}
    return {value if isinstance(value, UUID) else UUID(bytes=value)}


_CHECKS: Mapping[Kind, Callable[[Api, Reach, Any], None]] = {
    Kind.TASK: lambda api, reach, tasks: check_tasks(api, reach, found) if (found := _ids(tasks)) else None,
    Kind.RUN: lambda api, reach, runs: check_runs(api, reach, found) if (found := _ids(runs)) else None,
    Kind.TASK_OR_RUN: _check_task_or_run,
    Kind.QUEUE: lambda _, reach, name: None if name is None else check_queue(reach, name),
    Kind.WORKFLOW: lambda _, reach, name: check_workflow(reach, name),
    Kind.SCHEDULE: _check_schedule,
    Kind.BACKFILL: lambda api, reach, number: BACKFILL.check(api, reach, {"number": number}),
    Kind.NEW_TASKS: _check_new_tasks,
    Kind.DEFINITION: lambda _, reach, definition: check_definition(reach, definition),
    Kind.FLOW: lambda _, reach, flow: check_flow(reach, *flow),
}
