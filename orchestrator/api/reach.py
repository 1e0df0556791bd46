"""What a key that is for some queues and workflows only may have to do with: each route says what it is about.

    @routes.get("/{id}", about=TASK)

What is asked for by name is refused before anybody looks whether it is there; what is asked for by id is as good as
not there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from orchestrator.api.context import Api
from orchestrator.api.problems import Refused, refused
from orchestrator.domain.access import BUILT_IN, Reach
from orchestrator.domain.dag.definition import Definition, named_queues
from orchestrator.domain.flow.definition import Flow, named_flows
from orchestrator.domain.flow.definition import named_queues as flow_queues
from orchestrator.errors import NotFound
from orchestrator.sdk.acting import may_operate
from orchestrator.store import insights
from orchestrator.store.insights import Lineage, Relative


class OutOfReach(NotFound):
    """There is such a thing, and it is not for the key. Whoever asked hears that there is none."""


@dataclass(frozen=True)
class Subject:
    """What a route is about, and so whose it is."""

    name: str
    check: Callable[[Api, Reach, Mapping[str, Any]], None]
    """Refuses what was read from a request of somebody whose reach it is out of; not asked where all is in it."""


def _beside(what: str, name: str, prefix: str) -> Refused:
    own = f"for {what}s whose names begin with {prefix!r}" if prefix.isprintable() else f"for no {what}"
    return refused(403, "The key is for others", f"{what.capitalize()} {name!r:.140}: the key is {own}.")


def check_queue(reach: Reach, name: str) -> None:
    """Refuse a queue that is out of reach."""
    if not reach.has_queue(name):
        raise _beside("queue", name, reach.queues)


def check_workflow(reach: Reach, name: str) -> None:
    """Refuse a workflow that is out of reach."""
    if not reach.has_workflow(name):
        raise _beside("workflow", name, reach.workflows)


def check_task_name(reach: Reach, name: str) -> None:
    """Refuse a task that the key is not for, and what takes more than a key that may enqueue registered tasks."""
    if not reach.has_task(name):
        own = ", ".join(map(repr, reach.tasks))
        detail = f"Task {name!r:.140}: the key is for tasks whose names begin with {own}."
        raise refused(403, "The key is for others", detail)
    if may_operate.get():
        return
    if ":" in name:
        needs = "a function that is named by its module or file needs the scope operate. Register it as a task."
    elif name.startswith(BUILT_IN) and not reach.grants(name):
        needs = f"it needs the scope operate, or a key that names it: `keys create … --tasks {name}`."
    else:
        return
    raise refused(403, "The key may not do this", f"Task {name!r:.140}: {needs}")


def check_definition(reach: Reach, definition: Definition) -> None:
    """Refuse a definition that would reach out: by its name, its queues, or what it starts or follows."""
    _check_author(reach)
    check_workflow(reach, definition.name)
    for queue in sorted(named_queues(definition)):
        check_queue(reach, queue)
    if reach.is_bound and (event := next((trigger.event for trigger in definition.on if trigger.event), None)):
        detail = f"Event {event!r:.140}: events are for keys that are bound to nothing, and so is what they start."
        raise refused(403, "The key is for others", detail)
    named = [*(step.workflow for step in definition.steps), *(trigger.workflow for trigger in definition.on)]
    for workflow in named:
        check_workflow(reach, workflow or definition.name)


def check_flow(reach: Reach, name: str, flow: Flow) -> None:
    """Refuse a flow that would reach out: by its name, its queues, or the flows that it takes over."""
    _check_author(reach)
    for one in (name, *sorted(named_flows(flow))):
        check_workflow(reach, one)
    for queue in sorted(flow_queues(flow)):
        check_queue(reach, queue)


def _check_author(reach: Reach) -> None:
    if reach.tasks:
        detail = "The key is for some tasks only, and a definition may name any: use a key that is not bound to tasks."
        raise refused(403, "The key is for others", detail)


def lineage_within(reach: Reach, found: Lineage) -> Lineage:
    """Return what is in reach of what enqueued a task, and of what that enqueued."""
    parent = found.parent if found.parent is not None and is_within(reach, found.parent) else None
    return replace(found, parent=parent, children=[one for one in found.children if is_within(reach, one)])


def is_within(reach: Reach, one: Relative) -> bool:
    """Say whether a task or a run that something came of is in reach."""
    return reach.has_workflow(one.workflow) if one.kind == "run" else reach.has_queue(one.queue or "")


def _queue(_: Api, reach: Reach, given: Mapping[str, Any]) -> None:
    check_queue(reach, given["name"])


def _workflow(_: Api, reach: Reach, given: Mapping[str, Any]) -> None:
    check_workflow(reach, given["workflow"] if "workflow" in given else given["name"])


def _task(api: Api, reach: Reach, given: Mapping[str, Any]) -> None:
    check_tasks(api, reach, {given["id"]})


def check_tasks(api: Api, reach: Reach, tasks: Collection[UUID]) -> None:
    """Refuse tasks of which one is out of reach, or not there."""
    with api.reading() as connection:
        owners = insights.find_task_owners(connection, tasks)
    for task in tasks:
        found = owners.get(task)
        if found is None:
            raise NotFound.by_id("task", str(task))
        if not (reach.has_queue(found.queue) or (found.in_run and reach.has_workflow(found.workflow))):
            raise OutOfReach.by_id("task", str(task))


def has_run(api: Api, reach: Reach, run: Any) -> bool:
    """Say whether there is such a run, and it is in reach."""
    try:
        _run(api, reach, {"id": run})
    except NotFound:
        return False
    return True


def _run(api: Api, reach: Reach, given: Mapping[str, Any]) -> None:
    check_runs(api, reach, {given["id"]})


def check_runs(api: Api, reach: Reach, runs: Collection[UUID]) -> None:
    """Refuse runs of which one is out of reach, or not there."""
    with api.reading() as connection:
        owners = insights.find_run_owners(connection, runs)
    for run in runs:
        if run not in owners:
            raise NotFound.by_id("run", str(run))
        if not reach.has_workflow(owners[run].workflow):
            raise OutOfReach.by_id("run", str(run))


def _backfill(api: Api, reach: Reach, given: Mapping[str, Any]) -> None:
    if not reach.has_workflow(api.backend.schedules.show_backfill(given["number"]).workflow):
        raise OutOfReach(f"There is no backfill {given['number']}.")


def _whole(_: Api, __: Reach, ___: Mapping[str, Any]) -> None:
    detail = "This is about the whole system, and the key is for some queues or workflows only."
    raise refused(403, "The key is for others", detail)


def _nothing(_: Api, __: Reach, ___: Mapping[str, Any]) -> None:
    """Let everybody in."""


QUEUE = Subject("queue", _queue)
"""The queue in the path."""
WORKFLOW = Subject("workflow", _workflow)
"""The workflow in the path."""
TASK = Subject("task", _task)
"""The task in the path: its queue, or the workflow of its run."""
RUN = Subject("run", _run)
"""The run in the path: its workflow."""
BACKFILL = Subject("backfill", _backfill)
"""The backfill in the path: its workflow."""
WITHIN = Subject("within", _nothing)
"""The function is given the `reach`, and keeps to it: lists, and what is named in a body."""
WHOLE = Subject("whole", _whole)
"""The system as a whole: for nobody who is bound to a part."""
NOTHING = Subject("nothing", _nothing)
"""Nothing that is anybody's."""
