"""Tasks: listed and shown, with their logs, and with whole arguments and results, also from the payload store."""

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

from orchestrator.api.context import LARGEST, LARGEST_PAGE, PAGE, Api, Page, filter_fields, made_from
from orchestrator.api.endpoints import JSON, Routes
from orchestrator.api.key_scope import TASK, WITHIN, has_run
from orchestrator.api.redacting import attempts_shown, error_shown
from orchestrator.domain.access import KeyScope
from orchestrator.domain.plain import whole
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

_LONGEST_WAIT = 60
"""Seconds for which one may ask to wait: proxies in between do not wait much longer."""


class Stored(msgspec.Struct, frozen=True):
    """A value that is too large to be shown with its task or run: it stands in the payload store."""

    size: int
    """Bytes, as it is stored."""
    path: str
    """Where it is answered as a whole."""


class TaskAnswer(msgspec.Struct, frozen=True):
    """All that is known of one task."""

    task: TaskView
    args: list[Any]
    kwargs: dict[str, Any]
    options: dict[str, Any]
    """Options that differ from the defaults."""
    result: Any
    """Its result."""
    error: ErrorView | None
    """How it failed."""
    attempts: list[AttemptView]
    """Its attempts, oldest first."""
    progress: TaskProgress | None
    """How far it says it has come."""
    result_stored: Stored | None = None
    """Where the result is, if it is too large for this answer; then `result` is null."""
    args_stored: Stored | None = None
    """Where the arguments are, if they are too large for this answer; then `args` and `kwargs` are empty."""
    parent: UUID | None = None
    """The task that enqueued it while it ran, or that it follows."""
    waits_for: str | None = None
    """Why it waits: a limit and its holders, a paused queue, no worker, dependencies."""


class TaskQuery(filter_fields(TaskFilter, "within", "part")):  # type: ignore[misc]
    """Which tasks to list, and how many."""

    cursor: UUID | None = None
    """`next` of the page before."""
    limit: Annotated[int, Meta(ge=1, le=LARGEST_PAGE)] = PAGE


@routes.get("", about=WITHIN)
def list_tasks(api: Api, query: TaskQuery, key_scope: KeyScope) -> Page[TaskView]:
    """List tasks, open and ended, newest first; those of a run from the first; by their ends, the last first.

    With `since`, `until`, `error`, or only states of tasks that did not succeed, it is about the ends of tasks.
    """
    return list_page(api, query, key_scope)


def list_page(
    api: Api, query: TaskQuery, key_scope: KeyScope, *, oldest: bool = False, run_sort: TaskSort = "when"
) -> Page[TaskView]:
    """Return a page of tasks, also from the other end."""
    wanted = filter_within(api, query, key_scope)
    read = api.read_list if query.run is None else api.read  # those of a run are shown beside it, which does not lag
    return Page(
        *read(insights.list_tasks, wanted, limit=query.limit, before=query.cursor, oldest=oldest, run_sort=run_sort)
    )


def filter_within(api: Api, query: TaskQuery, key_scope: KeyScope) -> TaskFilter:
    """Return which tasks a query means of those in the key scope: of a run in it, all."""
    is_own_run = query.run is not None and key_scope.is_bound and has_run(api, key_scope, query.run)
    return made_from(TaskFilter, query, within="" if is_own_run else key_scope.queues)


class WaitQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether to wait for the end."""

    wait: Annotated[float, Meta(ge=0, le=_LONGEST_WAIT)] = 0.0
    """Seconds; it is answered when the task or run has ended, or after so many."""


@routes.get("/{id}", about=TASK)
def show_task(api: Api, id: UUID, query: WaitQuery) -> TaskAnswer | Steps[TaskAnswer]:
    """Show all that is known of one task; with `wait`, as soon as it has ended, or after so many seconds."""
    return _when_ended(api, id, query.wait) if query.wait else shown_task(api, id)


def _when_ended(api: Api, id: UUID, seconds: float) -> Steps[TaskAnswer]:
    """Wait for the end of a task, without a thread or a connection."""
    yield from api.backend.tasks.wait(id.bytes, TimeLimit(seconds))
    return shown_task(api, id)


def shown_task(api: Api, id: UUID, plain: Callable[[Any], Any] = as_json) -> TaskAnswer:
    """Return all that is known of one task, with values as `plain` makes them."""
    return _answer(api, found_task(api, id), _progress(api, id), plain)


def found_task(api: Api, id: UUID) -> TaskDetail:
    """Return a task as it is stored, or say that there is none."""
    found = api.backend.insights.show_task(id)
    if found is None:
        raise NotFound.by_id("task", str(id))
    return found


def _progress(api: Api, id: UUID) -> TaskProgress | None:
    """Return how far a task says it has come; where Redis is away, nothing."""
    try:
        return api.backend.tasks.progress(id.bytes)
    except OrchestratorError:
        return None


def _answer(
    api: Api, task: TaskDetail, progress: TaskProgress | None, plain: Callable[[Any], Any] = as_json
) -> TaskAnswer:
    hidden = api.redaction_of_task(task)
    given = stored_at(task.id, task.payload, "arguments")
    returned = stored_at(task.id, task.result, "result")
    arguments, keywords = ([], {}) if given else hidden.call_shown(*call_of(task.payload))
    return TaskAnswer(
        made_from(TaskView, task),
        plain(arguments),
        plain(keywords),
        dict(task.options),
        None if task.result is None or returned else plain(hidden.shown(stored_value(task.result))),
        error_shown(hidden, task.error),
        list(attempts_shown(hidden, task.attempts)),
        progress and replace(progress, text=hidden.text(progress.text)),
        returned,
        given,
        task.parent_id,
        task.waits_for,
    )


def stored_at(id: UUID, data: bytes | None, what: str) -> Stored | None:
    """Return where a value of a task, or a run of code, is that a reference stands for; None if it is here."""
    reference = None if data is None else whole_reference(data)
    return None if reference is None else Stored(reference.size, f"/api/v1/tasks/{id}/{what}")


class LogEntry(msgspec.Struct, frozen=True):
    """One line that a task said."""

    at: datetime
    attempt: int
    level: str
    text: str
    source: str
    """`stdout`, `stderr`, the name of a logger, or `dropped` where lines are missing; nothing for `ctx.log`."""
    task: UUID
    step: str
    """The name of the task; of a step of a workflow, that of the step, with its place in a fan-out."""


class Log(msgspec.Struct, frozen=True):
    """Some of what a task said, or the tasks of a run."""

    lines: list[LogEntry]
    cursor: str | None = None
    """There may be more after these: what comes after this cursor."""


class LogQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which lines to show: from a place on, or the last ones."""

    attempt: Annotated[int, Meta(ge=1, le=LARGEST)] | None = None
    """Of all attempts, if none is given."""
    cursor: Annotated[str, Meta(pattern=whole("[0-9]{1,19}-[0-9]{1,9}"))] = ""
    last: Annotated[int, Meta(ge=0, le=10_000)] = 0
    """So many lines from the end, if it is not 0."""


@routes.get("/{id}/logs", about=TASK)
def task_log(api: Api, id: UUID, query: LogQuery) -> Log:
    """Show what a task said, printed and logged: a page of it, or its last lines."""
    api.backend.tasks.status(id.bytes)  # there is such a task
    return log_of(api, id.bytes, query)


def log_of(api: Api, task: bytes, query: LogQuery) -> Log:
    if query.last:
        return shown_log(LogPage(read_last(api.backend.connections, task, query.last, query.attempt), ""))
    return shown_log(api.backend.tasks.log(task, query.cursor, attempt=query.attempt))


def shown_log(page: LogPage) -> Log:
    lines = [made_from(LogEntry, line, task=UUID(line.task)) for line in page.lines]
    return Log(lines, page.last if lines and page.last else None)


_LARGEST_WHOLE = 16_000_000
"""Bytes of a value that is made JSON of in one piece; lists and bytes are read chunk by chunk."""


class Arguments(msgspec.Struct, frozen=True):
    """The arguments of a task."""

    args: list[Any]
    kwargs: dict[str, Any]


@routes.get("/{id}/result", about=TASK, is_expensive=True)
def task_result(api: Api, id: UUID) -> Response:
    """Return the value that a task, or a run of code, has returned, as JSON, however large; bytes in base 64."""
    task = found_task(api, id)
    if task.status != TaskState.SUCCESS:
        raise WrongState(f"Task {id} is {task.status}: only a task that has succeeded has a result.")
    data, hidden = task.result or b"\xc0", api.redaction_of_task(task)
    stored = whole_reference(data)
    if stored is None or stored.item is not None or stored.form not in (BYTES, ITEMS):
        _check_size(id, stored)
        return Response(_json(hidden.shown(decode_value(data))), media_type=JSON)
    parts = _parts(_store(api, id), stored, hidden)
    first = next(parts)  # what cannot be read is refused before anything is sent
    return StreamingResponse(chain([first], parts), media_type=JSON)


@routes.get("/{id}/arguments", about=TASK, is_expensive=True)
def task_arguments(api: Api, id: UUID) -> Arguments:
    """Return the arguments that a task, or a run of code, was given, also where they are in the payload store."""
    task = found_task(api, id)
    payload = task.payload or _of_run(api, id)
    _check_size(id, whole_reference(payload))
    arguments, keywords, *_ = decode_call(payload) if payload else ([], {})
    shown, named = api.redaction_of_task(task).call_shown(arguments, keywords)
    return Arguments(as_json(shown), as_json(named))


def _of_run(api: Api, id: UUID) -> bytes:
    """Return what a run of code was given: its turn task, which has its id, is given nothing of its own."""
    code = api.backend.insights.show_code(id)
    return b"" if code is None else code.payload


def _store(api: Api, id: UUID) -> Store:
    payloads = api.backend.connections.payloads
    if payloads is None:
        raise PayloadError(
            f"A payload of task {id} is stored outside, and this process has no payload store. See the setting "
            f"payload_store."
        )
    return payloads.store


def _check_size(id: UUID, stored: Reference | None) -> None:
    if stored is not None and stored.size > _LARGEST_WHOLE:
        raise PayloadError(
            f"A payload of task {id} has {stored.size:,} bytes, and one that is no list and no bytes is answered up to "
            f"{_LARGEST_WHOLE:,}. Read it with a Python client, or let the task return a list."
        )


def _parts(store: Store, stored: Reference, hidden: Redaction) -> Iterator[bytes]:
    """Yield a stored list, or stored bytes, as JSON, chunk by chunk."""
    with closing(Reading(store, stored)) as reading:
        yield from _list(reading, hidden) if stored.form == ITEMS else _text(reading)


def _list(reading: Reading, hidden: Redaction) -> Iterator[bytes]:
    before = b"["
    for chunk in reading.each():
        if items := _json(hidden.shown(decode_value(chunk)))[1:-1]:
            yield before + items
            before = b","
    yield b"[]" if before == b"[" else b"]"


def _text(reading: Reading) -> Iterator[bytes]:
    before, left = b'"', b""
    for chunk in reading.each():
        data = left + chunk
        whole = len(data) - len(data) % 3
        yield before + b64encode(data[:whole])
        before, left = b"", data[whole:]
    yield before + b64encode(left) + b'"'


def _json(value: Any) -> bytes:
    return msgspec.json.encode(as_json(value))
