"""Tasks: lists, details and logs, and complete arguments and results, also from the payload store."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from itertools import chain
from typing import Annotated, Any
from uuid import UUID

import msgspec
from msgspec import Meta
from starlette.responses import Response, StreamingResponse

from orchestrator.api.context import MAX_INT, MAX_PAGE_SIZE, PAGE_SIZE, Api, Page, build_from, filter_fields
from orchestrator.api.endpoints import JSON, Routes
from orchestrator.api.key_scope import TASK, WITHIN, has_run
from orchestrator.api.redacting import redacted_attempts, redacted_error
from orchestrator.domain.access import KeyScope
from orchestrator.domain.plain import anchored
from orchestrator.domain.redaction import Redaction
from orchestrator.domain.states import TaskState
from orchestrator.errors import NotFound, OrchestratorError, PayloadError, WrongState
from orchestrator.payloads.objects import Reading
from orchestrator.payloads.stores import Store
from orchestrator.references import BYTES, ITEMS, Reference, whole_reference
from orchestrator.sdk.backend.logs import read_last
from orchestrator.sdk.tasks.logs import LogPage, TaskProgress
from orchestrator.sdk.values.display import as_json, call_of, stored_value
from orchestrator.sdk.values.payload import decode_call, decode_value
from orchestrator.sdk.waiting.steps import Steps
from orchestrator.store import insights
from orchestrator.store.insights import AttemptView, ErrorView, TaskDetail, TaskFilter, TaskView
from orchestrator.store.insights.tasks import TaskSort
from orchestrator.time_limits import TimeLimit

routes = Routes("tasks", "/api/v1/tasks")

_MAX_WAIT = 60
"""Seconds that a request may wait, at most: proxies in between rarely wait longer."""


class Stored(msgspec.Struct, frozen=True):
    """The location of a value that is too large for the response: it is in the payload store."""

    size: int
    """The stored size in bytes."""
    path: str
    """The path that returns the whole value."""


class TaskAnswer(msgspec.Struct, frozen=True):
    """A task with its details."""

    task: TaskView
    args: list[Any]
    kwargs: dict[str, Any]
    options: dict[str, Any]
    """Options that differ from the defaults."""
    result: Any
    error: ErrorView | None
    """The error of the last attempt, if the task failed."""
    attempts: list[AttemptView]
    """The attempts, oldest first."""
    progress: TaskProgress | None
    result_stored: Stored | None = None
    """The location of a result that is too large for this response; then `result` is null."""
    args_stored: Stored | None = None
    """The location of arguments that are too large for this response; then `args` and `kwargs` are empty."""
    parent: UUID | None = None
    """The task that enqueued this task while it ran, or whose callback this task is."""
    waits_for: str | None = None
    """Why the task waits: a limit and its holders, a paused queue, no worker, dependencies."""


class TaskQuery(filter_fields(TaskFilter, "within", "part")):  # type: ignore[misc]
    """Which tasks to list, and how many."""

    cursor: UUID | None = None
    """`next` of the previous page."""
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE_SIZE)] = PAGE_SIZE


@routes.get("", about=WITHIN)
def list_tasks(api: Api, query: TaskQuery, key_scope: KeyScope) -> Page[TaskView]:
    """List tasks, open and ended, newest first; those of a run oldest first; by their ends, latest first.

    With `since`, `until`, `error`, or only states of unsuccessful tasks, the filter is about the ends of tasks.
    """
    return list_page(api, query, key_scope)


def list_page(
    api: Api, query: TaskQuery, key_scope: KeyScope, *, oldest: bool = False, run_sort: TaskSort = "when"
) -> Page[TaskView]:
    """Return a page of tasks, also in reverse order."""
    task_filter = filter_within(api, query, key_scope)
    read = api.read_list if query.run is None else api.read  # a run's tasks must not lag behind the run
    return Page(
        *read(
            insights.list_tasks, task_filter, limit=query.limit, before=query.cursor, oldest=oldest, run_sort=run_sort
        )
    )


def filter_within(api: Api, query: TaskQuery, key_scope: KeyScope) -> TaskFilter:
    """Return the filter of a query within the key scope; a run in the key scope includes all its tasks."""
    is_own_run = query.run is not None and key_scope.is_bound and has_run(api, key_scope, query.run)
    return build_from(TaskFilter, query, within="" if is_own_run else key_scope.queues)


class WaitQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether to wait for the end."""

    wait: Annotated[float, Meta(ge=0, le=_MAX_WAIT)] = 0.0
    """Seconds to wait; the response is sent once the task or run has ended, or after this time."""


@routes.get("/{id}", about=TASK)
def show_task(api: Api, id: UUID, query: WaitQuery) -> TaskAnswer | Steps[TaskAnswer]:
    """Show a task with its details; with `wait`, once it has ended, or after this many seconds."""
    return _when_ended(api, id, query.wait) if query.wait else task_answer(api, id)


def _when_ended(api: Api, id: UUID, seconds: float) -> Steps[TaskAnswer]:
    """Wait for the end of a task, holding neither a thread nor a connection."""
    yield from api.backend.tasks.wait(id.bytes, TimeLimit(seconds))
    return task_answer(api, id)


def task_answer(api: Api, id: UUID, plain: Callable[[Any], Any] = as_json) -> TaskAnswer:
    """Return a task with its details; `plain` converts values."""
    return _answer(api, stored_task(api, id), _progress(api, id), plain)


def stored_task(api: Api, id: UUID) -> TaskDetail:
    """Return a stored task; raise NotFound if there is none."""
    found = api.backend.insights.show_task(id)
    if found is None:
        raise NotFound.by_id("task", str(id))
    return found


def _progress(api: Api, id: UUID) -> TaskProgress | None:
    """Return the progress of a task; None if Redis is down."""
    try:
        return api.backend.tasks.progress(id.bytes)
    except OrchestratorError:
        return None


def _answer(
    api: Api, task: TaskDetail, progress: TaskProgress | None, plain: Callable[[Any], Any] = as_json
) -> TaskAnswer:
    hidden = api.redaction_of_task(task)
    args_stored = stored_at(task.id, task.payload, "arguments")
    result_stored = stored_at(task.id, task.result, "result")
    arguments, keywords = ([], {}) if args_stored else hidden.redacted_call(*call_of(task.payload))
    return TaskAnswer(
        build_from(TaskView, task),
        plain(arguments),
        plain(keywords),
        dict(task.options),
        None if task.result is None or result_stored else plain(hidden.redacted(stored_value(task.result))),
        redacted_error(hidden, task.error),
        list(redacted_attempts(hidden, task.attempts)),
        progress and replace(progress, text=hidden.text(progress.text)),
        result_stored,
        args_stored,
        task.parent_id,
        task.waits_for,
    )


def stored_at(id: UUID, data: bytes | None, what: str) -> Stored | None:
    """Return the location of a value that is stored outside its task or run; None if it is inline."""
    reference = None if data is None else whole_reference(data)
    return None if reference is None else Stored(reference.size, f"/api/v1/tasks/{id}/{what}")


class LogEntry(msgspec.Struct, frozen=True):
    """A log line of a task."""

    at: datetime
    attempt: int
    level: str
    text: str
    source: str
    """`stdout`, `stderr`, the name of a logger, `dropped` where lines are missing, or empty for `ctx.log`."""
    task: UUID
    step: str
    """The name of the task or, for a step of a workflow, of the step, with the index in a fan-out."""


class Log(msgspec.Struct, frozen=True):
    """A page of the log of a task, or of all tasks of a run."""

    lines: list[LogEntry]
    cursor: str | None = None
    """The cursor of the next page; null if there are no more lines."""


class LogQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which lines to show: after a cursor, or the last ones."""

    attempt: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None
    """All attempts by default."""
    cursor: Annotated[str, Meta(pattern=anchored("[0-9]{1,19}-[0-9]{1,9}"))] = ""
    last: Annotated[int, Meta(ge=0, le=10_000)] = 0
    """The number of lines from the end, unless 0."""


@routes.get("/{id}/logs", about=TASK)
def task_log(api: Api, id: UUID, query: LogQuery) -> Log:
    """Show what a task printed and logged: a page, or the last lines."""
    api.backend.tasks.status(id.bytes)  # raises NotFound if there is no such task
    return log_of(api, id.bytes, query)


def log_of(api: Api, task: bytes, query: LogQuery) -> Log:
    if query.last:
        return log_answer(LogPage(read_last(api.backend.connections, task, query.last, query.attempt), ""))
    return log_answer(api.backend.tasks.log(task, query.cursor, attempt=query.attempt))


def log_answer(page: LogPage) -> Log:
    lines = [build_from(LogEntry, line, task=UUID(line.task)) for line in page.lines]
    return Log(lines, page.last if lines and page.last else None)


_MAX_SINGLE_VALUE = 16_000_000
"""Bytes of a value that is converted to JSON in one piece; lists and bytes are converted chunk by chunk."""


class Arguments(msgspec.Struct, frozen=True):
    """The arguments of a task."""

    args: list[Any]
    kwargs: dict[str, Any]


@routes.get("/{id}/result", about=TASK, is_expensive=True)
def task_result(api: Api, id: UUID) -> Response:
    """Return the result of a task or of a run of a workflow as code, as JSON of any size; bytes in base64."""
    task = stored_task(api, id)
    if task.status != TaskState.SUCCESS:
        raise WrongState(f"Task {id} is {task.status}: only a task that has succeeded has a result.")
    data, hidden = task.result or b"\xc0", api.redaction_of_task(task)
    stored = whole_reference(data)
    if stored is None or stored.item is not None or stored.form not in (BYTES, ITEMS):
        _check_size(id, stored)
        return Response(_json(hidden.redacted(decode_value(data))), media_type=JSON)
    parts = _parts(_store(api, id), stored, hidden)
    first = next(parts)  # raises before anything is sent if it cannot be read
    return StreamingResponse(chain([first], parts), media_type=JSON)


@routes.get("/{id}/arguments", about=TASK, is_expensive=True)
def task_arguments(api: Api, id: UUID) -> Arguments:
    """Return the arguments of a task or of a run of a workflow as code, also from the payload store."""
    task = stored_task(api, id)
    payload = task.payload or _run_payload(api, id)
    _check_size(id, whole_reference(payload))
    arguments, keywords, *_ = decode_call(payload) if payload else ([], {})
    args, kwargs = api.redaction_of_task(task).redacted_call(arguments, keywords)
    return Arguments(as_json(args), as_json(kwargs))


def _run_payload(api: Api, id: UUID) -> bytes:
    """Return the arguments of a run of a workflow as code: its turn task, which has the same id, has none."""
    code = api.backend.insights.show_code(id)
    return b"" if code is None else code.payload


def _store(api: Api, id: UUID) -> Store:
    payloads = api.backend.connections.payloads
    if payloads is None:
        raise PayloadError(
            f"A payload of task {id} is in a payload store, and this process has none. See the setting payload_store."
        )
    return payloads.store


def _check_size(id: UUID, stored: Reference | None) -> None:
    if stored is not None and stored.size > _MAX_SINGLE_VALUE:
        raise PayloadError(
            f"A payload of task {id} has {stored.size:,} bytes. Values other than lists and bytes are returned up to "
            f"{_MAX_SINGLE_VALUE:,} bytes. Read it with a Python client, or let the task return a list."
        )


def _parts(store: Store, stored: Reference, hidden: Redaction) -> Iterator[bytes]:
    """Yield a stored list, or stored bytes, as JSON, chunk by chunk."""
    with closing(Reading(store, stored)) as reading:
        yield from _list(reading, hidden) if stored.form == ITEMS else _text(reading)


def _list(reading: Reading, hidden: Redaction) -> Iterator[bytes]:
    before = b"["
    for chunk in reading.each():
        if items := _json(hidden.redacted(decode_value(chunk)))[1:-1]:
            yield before + items
            before = b","
    yield b"[]" if before == b"[" else b"]"


def _text(reading: Reading) -> Iterator[bytes]:
    before, remainder = b'"', b""
    for chunk in reading.each():
        data = remainder + chunk
        complete = len(data) - len(data) % 3
        yield before + b64encode(data[:complete])
        before, remainder = b"", data[complete:]
    yield before + b64encode(remainder) + b'"'


def _json(value: Any) -> bytes:
    return msgspec.json.encode(as_json(value))
