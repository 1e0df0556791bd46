"""Which calls of the Python client a key may make that is for some queues and workflows only.

What a call is about stands in its body. One that nothing is said of here is about the whole system.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from uuid import UUID

import msgspec

from orchestrator.api.client_lists import is_list
from orchestrator.api.context import Api
from orchestrator.api.reach import (
    BACKFILL,
    RUN,
    TASK,
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
)
from orchestrator.domain.access import Reach
from orchestrator.domain.tasks.callbacks import Callback, Callbacks
from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import NotFound

Check = Callable[[Api, Reach, Any], None]

KEEPS_WITHIN = frozenset({("tasks", "enqueue"), ("tasks", "enqueue_many"), ("tasks", "retry_failed")})
"""Calls that are told within which queues to stay."""


def about(part: str, name: str) -> Subject:
    """Return whose the subject of a call is."""
    if is_list(part, name):
        return WITHIN
    check = _ABOUT.get((part, name))
    return WHOLE if check is None else _in_body(f"{part} {name}", check)


def _in_body(name: str, check: Check) -> Subject:
    def look(api: Api, reach: Reach, given: Mapping[str, Any]) -> None:
        check(api, reach, given["body"])

    return Subject(name, look)


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


def _enqueue(_: Api, reach: Reach, body: Any) -> None:
    for queue in sorted({one.queue for one in with_followers([body.task])}):
        check_queue(reach, queue)


def _enqueue_many(_: Api, reach: Reach, body: Any) -> None:
    for queue in sorted({one.queue for one in with_followers(body.tasks)}):
        check_queue(reach, queue)


def _filtered(_: Api, reach: Reach, body: Any) -> None:
    if body.wanted.queue is not None:
        check_queue(reach, body.wanted.queue)


def _task(api: Api, reach: Reach, body: Any) -> None:
    TASK.check(api, reach, {"id": UUID(bytes=body.task)})


def _target(api: Api, reach: Reach, body: Any) -> None:
    if not has_run(api, reach, UUID(bytes=body.target)):
        TASK.check(api, reach, {"id": UUID(bytes=body.target)})


def _run(api: Api, reach: Reach, body: Any) -> None:
    RUN.check(api, reach, {"id": UUID(bytes=body.run)})


def _start_code(_: Api, reach: Reach, body: Any) -> None:
    check_workflow(reach, body.started.workflow)
    check_queue(reach, body.started.queue)


def _reached(api: Api, reach: Reach, body: Any) -> None:
    RUN.check(api, reach, {"id": UUID(bytes=body.sent.run)})


def _workflow(_: Api, reach: Reach, body: Any) -> None:
    check_workflow(reach, body.workflow)


def _named_workflow(_: Api, reach: Reach, body: Any) -> None:
    check_workflow(reach, body.name)


def _definition(_: Api, reach: Reach, body: Any) -> None:
    check_definition(reach, body.definition)


def _flow(_: Api, reach: Reach, body: Any) -> None:
    check_flow(reach, body.name, body.graph)


def _named_queue(_: Api, reach: Reach, body: Any) -> None:
    check_queue(reach, body.name)


def _schedule(api: Api, reach: Reach, body: Any) -> None:
    try:
        workflow = api.backend.schedules.find(body.key).workflow
    except NotFound:
        workflow = body.key
    check_workflow(reach, workflow)


def _set_code(_: Api, reach: Reach, body: Any) -> None:
    check_workflow(reach, body.workflow)
    check_queue(reach, body.target.queue)


def _backfill(api: Api, reach: Reach, body: Any) -> None:
    BACKFILL.check(api, reach, {"number": body.number})


def _view_task(api: Api, reach: Reach, body: Any) -> None:
    TASK.check(api, reach, {"id": body.task})


def _view_run(api: Api, reach: Reach, body: Any) -> None:
    RUN.check(api, reach, {"id": body.run})


def _waits(api: Api, reach: Reach, body: Any) -> None:
    if body.tasks:
        check_tasks(api, reach, {UUID(bytes=task) for task in body.tasks})
    if body.runs or body.code:
        check_runs(api, reach, {UUID(bytes=run) for run in (*body.runs, *body.code)})


WAITS = _in_body("waits", _waits)
_ABOUT: Mapping[tuple[str, str], Check] = {
    ("tasks", "enqueue"): _enqueue,
    ("tasks", "enqueue_many"): _enqueue_many,
    ("tasks", "retry_failed"): _filtered,
    **dict.fromkeys(
        [("tasks", name) for name in ("cancel", "retry", "status", "progress", "log", "overdue", "payload_part")], _task
    ),
    ("tasks", "obstacles"): _target,
    **dict.fromkeys([("runs", name) for name in ("rerun", "cancel", "retry", "progress", "log")], _run),
    **dict.fromkeys([("runs", name) for name in ("ends_after", "encoded_outputs")], _run),
    ("code", "start"): _start_code,
    ("code", "find"): _workflow,
    ("code", "reached"): _reached,
    **dict.fromkeys([("code", name) for name in ("signal", "resolve", "reject", "query", "update")], _run),
    **dict.fromkeys([("code", name) for name in ("cancel", "terminate", "reset", "status", "overdue")], _run),
    ("code", "history"): _run,
    ("workflows", "apply"): _definition,
    **dict.fromkeys([("workflows", name) for name in ("delete", "latest", "read", "start")], _named_workflow),
    **dict.fromkeys([("flows", name) for name in ("latest", "read", "start")], _named_workflow),
    ("flows", "publish"): _flow,
    **dict.fromkeys([("flows", name) for name in ("signal", "decide", "show", "shared", "visited", "node_runs")], _run),
    **dict.fromkeys([("queues", name) for name in ("pause", "limit", "retain", "purge")], _named_queue),
    **dict.fromkeys([("queues", name) for name in ("open_tasks", "delayed")], _named_queue),
    ("schedules", "set"): _workflow,
    ("schedules", "set_code"): _set_code,
    **dict.fromkeys([("schedules", name) for name in ("find", "upcoming", "pause", "resume", "delete")], _schedule),
    **dict.fromkeys([("schedules", name) for name in ("trigger", "backfill", "preview_backfill")], _schedule),
    **dict.fromkeys([("schedules", name) for name in ("show_backfill", "cancel_backfill")], _backfill),
    **dict.fromkeys([("insights", name) for name in ("show_task", "lineage")], _view_task),
    **dict.fromkeys([("insights", name) for name in ("show_run", "list_steps", "show_code")], _view_run),
    ("insights", "definition_of_run"): _view_run,
}
