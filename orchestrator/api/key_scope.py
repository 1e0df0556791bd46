"""Checks requests of bound keys, which are limited to some queues and workflows. Each route declares its subject:

    @routes.get("/{id}", about=TASK)

A name outside the key scope is rejected without a lookup. An id outside the key scope gets the same 404 as an id that
does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any
from uuid import UUID

import msgspec

from orchestrator.api.context import Api
from orchestrator.api.problems import Refused, refused
from orchestrator.domain.access import BUILT_IN, KeyScope
from orchestrator.domain.dag.definition import Definition, named_queues
from orchestrator.domain.flow.definition import Flow, named_flows
from orchestrator.domain.flow.definition import named_queues as flow_queues
from orchestrator.domain.tasks.callbacks import Callback, Callbacks
from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import NotFound
from orchestrator.sdk.acting import may_operate
from orchestrator.sdk.calls.declaring import About, Kind
from orchestrator.store import insights
from orchestrator.store.insights import Lineage, Relative


class OutOfKeyScope(NotFound):
    """The object exists but is outside the key scope. The response is the same 404 as for a missing object."""


@dataclass(frozen=True)
class Subject:
    """The subject of a route: what its request reads or changes."""

    name: str
    check: Callable[[Api, KeyScope, Mapping[str, Any]], None]
    """Raises if a request is outside the caller's key scope. Called only for bound keys."""


def _out_of_scope(what: str, name: str, prefix: str) -> Refused:
    own = (
        f"limited to {what}s whose names begin with {prefix!r}" if prefix.isprintable() else f"not valid for any {what}"
    )
    return refused(
        403, "The request is outside the key's scope", f"{what.capitalize()} {name!r:.140}: the key is {own}."
    )


def check_queue(key_scope: KeyScope, name: str) -> None:
    if not key_scope.has_queue(name):
        raise _out_of_scope("queue", name, key_scope.queues)


def check_workflow(key_scope: KeyScope, name: str) -> None:
    if not key_scope.has_workflow(name):
        raise _out_of_scope("workflow", name, key_scope.workflows)


def check_task_name(key_scope: KeyScope, name: str) -> None:
    """Reject a task name outside the key scope, and names that need more than a key for registered tasks."""
    if not key_scope.has_task(name):
        own = ", ".join(map(repr, key_scope.tasks))
        detail = f"Task {name!r:.140}: the key is limited to tasks whose names begin with {own}."
        raise refused(403, "The key is for others", detail)
    if may_operate.get():
        return
    if ":" in name:
        needs = "calling a function by its module or file requires the scope operate. Register it as a task."
    elif name.startswith(BUILT_IN) and not key_scope.grants(name):
        needs = f"it requires the scope operate, or a key that names it: `keys create … --tasks {name}`."
    else:
        return
    raise refused(403, "The key does not allow this", f"Task {name!r:.140}: {needs}")


def check_definition(key_scope: KeyScope, definition: Definition) -> None:
    """Reject a definition outside the key scope: by its name, its queues, or workflows that it starts or follows."""
    _check_author(key_scope)
    check_workflow(key_scope, definition.name)
    for queue in sorted(named_queues(definition)):
        check_queue(key_scope, queue)
    if key_scope.is_bound and (event := next((trigger.event for trigger in definition.on if trigger.event), None)):
        detail = f"Event {event!r:.140}: a key that is limited to queues, workflows or tasks may not use events."
        raise refused(403, "The key is for others", detail)
    named = [*(step.workflow for step in definition.steps), *(trigger.workflow for trigger in definition.on)]
    for workflow in named:
        check_workflow(key_scope, workflow or definition.name)


def check_flow(key_scope: KeyScope, name: str, flow: Flow) -> None:
    """Reject a flow outside the key scope: by its name, its queues, or flows that it includes."""
    _check_author(key_scope)
    for workflow in (name, *sorted(named_flows(flow))):
        check_workflow(key_scope, workflow)
    for queue in sorted(flow_queues(flow)):
        check_queue(key_scope, queue)


def _check_author(key_scope: KeyScope) -> None:
    if key_scope.tasks:
        detail = "The key is limited to some tasks, and a definition may name any task: use a key without this limit."
        raise refused(403, "The key is for others", detail)


def lineage_within(key_scope: KeyScope, lineage: Lineage) -> Lineage:
    """Return the part of a task's lineage that is within the key scope."""
    parent = lineage.parent if lineage.parent is not None and is_within(key_scope, lineage.parent) else None
    return replace(lineage, parent=parent, children=[one for one in lineage.children if is_within(key_scope, one)])


def is_within(key_scope: KeyScope, item: Relative) -> bool:
    """Return whether a related task or run is within the key scope."""
    return key_scope.has_workflow(item.workflow) if item.kind == "run" else key_scope.has_queue(item.queue or "")


def check_tasks(api: Api, key_scope: KeyScope, tasks: Collection[UUID]) -> None:
    """Reject the request if any of the tasks does not exist or is outside the key scope."""
    owners = api.read(insights.find_task_owners, tasks)
    for task in tasks:
        owner = owners.get(task)
        if owner is None:
            raise NotFound.by_id("task", str(task))
        by_queue = key_scope.has_queue(owner.queue) and not owner.is_turn
        if not (by_queue or (owner.in_run and key_scope.has_workflow(owner.workflow))):
            raise OutOfKeyScope.by_id("task", str(task))


def has_run(api: Api, key_scope: KeyScope, run: UUID) -> bool:
    try:
        check_runs(api, key_scope, {run})
    except NotFound:
        return False
    return True


def check_runs(api: Api, key_scope: KeyScope, runs: Collection[UUID]) -> None:
    """Reject the request if any of the runs does not exist or is outside the key scope."""
    owners = api.read(insights.find_run_owners, runs)
    for run in runs:
        if run not in owners:
            raise NotFound.by_id("run", str(run))
        if not key_scope.has_workflow(owners[run].workflow):
            raise OutOfKeyScope.by_id("run", str(run))


def with_followers(tasks: Iterable[NewTask | Callback]) -> Iterator[NewTask | Callback]:
    """Yield tasks and, recursively, their callbacks."""
    for task in tasks:
        yield task
        if task.callbacks is not None:
            try:
                followers = msgspec.json.decode(task.callbacks, type=Callbacks)
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                continue  # a later check rejects it
            yield from with_followers((*followers.success, *followers.failure))


def _check_new_tasks(_: Api, key_scope: KeyScope, tasks: Any) -> None:
    for queue in sorted({task.queue for task in with_followers(tasks if isinstance(tasks, list) else [tasks])}):
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


def _check_backfill(api: Api, key_scope: KeyScope, number: int) -> None:
    if not key_scope.has_workflow(api.backend.schedules.show_backfill(number).workflow):
        raise OutOfKeyScope(f"There is no backfill {number}.")


def _ids(value: Any) -> set[UUID]:
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
    Kind.BACKFILL: _check_backfill,
    Kind.NEW_TASKS: _check_new_tasks,
    Kind.DEFINITION: lambda _, key_scope, definition: check_definition(key_scope, definition),
    Kind.FLOW: lambda _, key_scope, flow: check_flow(key_scope, *flow),
}


def subject(name: str, about: About | None, part: str = "body") -> Subject:
    """Return the subject of a route whose subject is in its body, or in another part of the request."""
    if not about:
        return WITHIN if about is None else WHOLE
    checks = [(_CHECKS[kind], attrgetter(*arguments.split())) for kind, arguments in about.items()]

    def check(api: Api, key_scope: KeyScope, request: Mapping[str, Any]) -> None:
        for check_value, value in checks:
            check_value(api, key_scope, value(request[part]))

    return Subject(name, check)


def _in_path(kind: Kind, *names: str) -> Subject:
    """Return the subject of a route whose subject is in its path, under the first of these names."""

    def check(api: Api, key_scope: KeyScope, request: Mapping[str, Any]) -> None:
        _CHECKS[kind](api, key_scope, next(request[name] for name in names if name in request))

    return Subject(str(kind), check)


def _refuse(_: Api, __: KeyScope, ___: Mapping[str, Any]) -> None:
    detail = "This concerns the whole system, and the key is limited to some queues, workflows or tasks."
    raise refused(403, "The key is for others", detail)


def _admit(_: Api, __: KeyScope, ___: Mapping[str, Any]) -> None:
    """Accept every key."""


QUEUE = _in_path(Kind.QUEUE, "name")
WORKFLOW = _in_path(Kind.WORKFLOW, "workflow", "name")
TASK = _in_path(Kind.TASK, "id")
"""Checked by the task's queue, or the workflow of its run."""
RUN = _in_path(Kind.RUN, "id")
"""Checked by the run's workflow."""
BACKFILL = _in_path(Kind.BACKFILL, "number")
"""Checked by the backfill's workflow."""
WITHIN = Subject("within", _admit)
"""The function receives the `key_scope`, and filters its results or checks names in the body itself."""
WHOLE = Subject("whole", _refuse)
"""The whole system: not for bound keys."""
NOTHING = Subject("nothing", _admit)
"""Nothing that a key scope could exclude."""
