"""Tasks: enqueued, listed, shown, cancelled, tried again."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import msgspec
from msgspec import UNSET, Meta, UnsetType

from orchestrator.api.context import LARGEST, LARGEST_PAGE, PAGE, Api, Asked, Page
from orchestrator.api.endpoints import Routes
from orchestrator.api.problems import Refused, at, refused
from orchestrator.api.reach import TASK, WITHIN, check_queue, has_run, lineage_within
from orchestrator.domain.access import Reach, Scope
from orchestrator.domain.patterns import whole
from orchestrator.domain.states import TaskState
from orchestrator.domain.tasks.task import DuplicatePolicy, NewTask, UniqueKey
from orchestrator.errors import InvalidTask, NotFound, OrchestratorError
from orchestrator.references import whole_reference
from orchestrator.sdk.backend.logs import read_last
from orchestrator.sdk.tasks.by_name import call_by_name
from orchestrator.sdk.tasks.logs import LogPage
from orchestrator.sdk.tasks.options import DEFAULT_QUEUE, once
from orchestrator.sdk.tasks.progress import TaskProgress
from orchestrator.sdk.values.shown import as_json, call_of, stored_value
from orchestrator.sdk.waiting.steps import Steps
from orchestrator.store import insights
from orchestrator.store.insights import AttemptView, ErrorView, Lineage, TaskDetail, TaskFilter, TaskView
from orchestrator.store.tasks import redrive
from orchestrator.store.tasks.redrive import FailedFilter

routes = Routes("tasks", "/api/v1/tasks")

Limit = Annotated[int, Meta(ge=1, le=LARGEST_PAGE)]
_EXAMPLE = {"name": "shop.tasks.resize", "args": ["a.png"], "kwargs": {"width": 200}, "queue": "images"}
_LONGEST_WAIT = 60
"""Seconds for which one may ask to wait: proxies in between do not wait much longer."""
_MOST_AT_ONCE = 10_000
_MOST_UNDER_A_KEY = 1_000
"""Each locks a key of its own, and Postgres has room for some thousands of locks."""
_ONE_KEY = "unique_key and the header Idempotency-Key: give one of them, not both."


class NewCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task to enqueue: its name, its arguments, and how it is to run."""

    name: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    queue: str | UnsetType = UNSET
    """The queue it waits in; `default` if none is given."""
    priority: int | UnsetType = UNSET
    """From -100 to 100; higher goes first."""
    delay: float | UnsetType = UNSET
    """Seconds before it may start."""
    eta: datetime | UnsetType = UNSET
    """The time, with its zone, before which it may not start."""
    expires: float | UnsetType = UNSET
    """Seconds within which it must have started; otherwise it fails as expired."""
    retries: int | UnsetType = UNSET
    """How often a failed attempt is tried again."""
    timeout: float | UnsetType = UNSET
    """Seconds that one attempt may run."""
    unique_key: str | UnsetType = UNSET
    """A key that only one such task may have at a time."""
    on_duplicate: DuplicatePolicy | UnsetType = UNSET
    """If another has the key: `return` that one's id, `replace` its arguments while it waits, or `raise`."""
    idempotency_key: str | UnsetType = UNSET
    """The same key enqueues the task once, however often it is tried. The header Idempotency-Key says the same."""
    concurrency_key: str | UnsetType = UNSET
    """Whom it is for: keys take turns."""
    store_result: bool | UnsetType = UNSET
    """Keep what it returns."""
    redact: list[str] | UnsetType = UNSET
    """Names of arguments, and of fields in these and in the result, that nobody is shown; `@0` is the first argument
    without a name."""

    def options(self) -> dict[str, Any]:
        """Return the options that are given."""
        given = {name: getattr(self, name) for name in self.__struct_fields__[3:]}
        return {name: value for name, value in given.items() if value is not UNSET}


class Calls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tasks to enqueue together, all or none."""

    tasks: Annotated[list[NewCall], Meta(max_length=_MOST_AT_ONCE)]


class Enqueued(msgspec.Struct, frozen=True):
    """A task that is stored, and will run."""

    id: UUID


class EnqueuedMany(msgspec.Struct, frozen=True):
    """Tasks that are stored, in the order in which they were given."""

    ids: list[UUID]


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
    """What differs from the default options."""
    result: Any
    """What it returned."""
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


class TaskQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which tasks to list."""

    status: tuple[TaskState, ...] = ()
    """Any of these states; may be repeated."""
    queue: str | None = None
    name: str | None = None
    run: UUID | None = None
    since: datetime | None = None
    """Ended at this time or later."""
    until: datetime | None = None
    """Ended before this time."""
    error: str | None = None
    """Part of the error's type or message, in any case."""
    limit: Limit = PAGE
    cursor: UUID | None = None
    """`next` of the page before."""


def new_task(api: Api, call: NewCall, reach: Reach, key: str | None = None) -> NewTask:
    """Return a task as it is stored; raises what a caller should know."""
    given = call.options()
    if key is not None and given.setdefault("idempotency_key", key) != key:
        raise refused(422, "The request does not fit", "Idempotency-Key and idempotency_key differ.")
    task = call_by_name(api.settings, call.name, call.args, call.kwargs, options=given, queue=DEFAULT_QUEUE)
    check_queue(reach, task.queue)
    if task.unique is not None and task.unique.same_call:
        return _with_key(task, task.unique)
    return task


def _with_key(task: NewTask, unique: UniqueKey) -> NewTask:
    """Return a task under a key that belongs to the whole request, options and all."""
    return msgspec.structs.replace(task, unique=msgspec.structs.replace(unique, same_options=True))


@routes.post("", about=WITHIN, scope=Scope.ENQUEUE, status=201, examples=[_EXAMPLE])
async def enqueue(api: Api, body: NewCall, key: str | None, reach: Reach) -> Enqueued:
    """Enqueue a task. It is durable when this is answered.

    Whether its arguments fit is for the worker to say, who knows it. A repeated request with the same
    `Idempotency-Key` gives the id of the first, and one with other arguments or options is refused.
    """
    return Enqueued(UUID(bytes=await api.backend.tasks.aenqueue(new_task(api, body, reach, key), reach.queues)))


@routes.post("/bulk", about=WITHIN, scope=Scope.ENQUEUE, status=201, examples=[{"tasks": [_EXAMPLE, _EXAMPLE]}])
def enqueue_many(api: Api, body: Calls, key: str | None, reach: Reach) -> EnqueuedMany:
    """Enqueue many tasks, all or none.

    A repeated request with the same `Idempotency-Key` gives the ids of the first, and other tasks under it are refused.
    Then there may be a thousand of them. A task with an `idempotency_key` of its own goes by that.
    """
    tasks = [_numbered(api, index, call, reach) for index, call in enumerate(body.tasks)]
    if key is None:
        created = api.backend.tasks.enqueue_many(tasks, reach.queues)
    else:
        created = _enqueue_once(api, tasks, key, reach)
    return EnqueuedMany([UUID(bytes=id) for id in created])


def _numbered(api: Api, index: int, call: NewCall, reach: Reach) -> NewTask:
    """Return one of many tasks; what is wrong with it says which."""
    try:
        return new_task(api, call, reach)
    except (InvalidTask, Refused) as error:
        raise at(f"#/tasks/{index}", error) from error


def _enqueue_once(api: Api, tasks: list[NewTask], key: str, reach: Reach) -> list[bytes]:
    """Enqueue tasks under one key, of which each has a part: it is no name's own, so that other names meet it, too."""
    if len(tasks) > _MOST_UNDER_A_KEY:
        found = f"found {len(tasks):,}. Send them in parts, each with a key of its own."
        raise refused(
            422, "The request does not fit", f"#/tasks: expected at most {_MOST_UNDER_A_KEY:,} with a key; {found}"
        )
    period = api.settings.idempotency_period
    keyed = []
    for index, task in enumerate(tasks):
        if task.unique is None:
            task = _with_key(task, once("", f"{key}/{index}", period))
        elif not task.unique.same_call:
            raise refused(422, "The request does not fit", f"#/tasks/{index}: {_ONE_KEY}")
        keyed.append(task)
    return api.backend.tasks.enqueue_once(keyed, once("", f"{key}/{len(tasks)}", period).key, reach.queues)


@routes.get("", about=WITHIN)
def list_tasks(api: Api, query: TaskQuery, reach: Reach) -> Page[TaskView]:
    """List tasks, open and ended, newest first; those of a run from the first; by their ends, the last first.

    With `since`, `until`, `error`, or only states of tasks that did not succeed, it is about the ends of tasks.
    """
    is_own_run = query.run is not None and reach.is_bound and has_run(api, reach, query.run)
    wanted = TaskFilter(
        statuses=query.status,
        queue=query.queue,
        name=query.name,
        run=query.run,
        since=query.since,
        until=query.until,
        error=query.error,
        within="" if is_own_run else reach.queues,
    )
    with api.reading() as connection:
        return Page(*insights.page_of_tasks(connection, wanted, limit=query.limit, before=query.cursor))


class WaitQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether to wait for the end."""

    wait: Annotated[float, Meta(ge=0, le=_LONGEST_WAIT)] = 0.0
    """Seconds; it is answered when the task has ended, or after so many."""


@routes.get("/{id}", about=TASK)
def show_task(api: Api, id: UUID, query: WaitQuery) -> TaskAnswer | Steps[TaskAnswer]:
    """Show all that is known of one task; with `wait`, as soon as it has ended, or after so many seconds."""
    return _when_ended(api, id, query.wait) if query.wait else shown_task(api, id)


def _when_ended(api: Api, id: UUID, seconds: float) -> Steps[TaskAnswer]:
    """Wait for the end of a task: nobody holds a thread or a connection meanwhile."""
    yield from api.backend.tasks.wait(id.bytes, seconds)
    return shown_task(api, id)


def shown_task(api: Api, id: UUID) -> TaskAnswer:
    """Return all that is known of one task."""
    with api.reading() as connection:
        found = insights.show_task(connection, id)
    if found is None:
        raise NotFound.by_id("task", str(id))
    return _answer(api, found, _progress(api, id))


def _progress(api: Api, id: UUID) -> TaskProgress | None:
    """Return how far a task says it has come; where Redis is away, nothing."""
    try:
        return api.backend.tasks.progress(id.bytes)
    except OrchestratorError:
        return None


def _answer(api: Api, task: TaskDetail, progress: TaskProgress | None) -> TaskAnswer:
    hidden = api.redaction_of(task.options)
    given = stored_at(task.id, task.payload, "arguments")
    returned = stored_at(task.id, task.result, "result")
    arguments, keywords = ([], {}) if given else hidden.call_shown(*call_of(task.payload))
    view = TaskView(**{name: getattr(task, name) for name in TaskView.__dataclass_fields__})
    return TaskAnswer(
        view,
        as_json(arguments),
        as_json(keywords),
        dict(task.options),
        None if task.result is None or returned else as_json(hidden.shown(stored_value(task.result))),
        task.error,
        list(task.attempts),
        progress,
        returned,
        given,
        task.parent_id,
    )


def stored_at(id: UUID, data: bytes | None, what: str) -> Stored | None:
    """Return where a value of a task, or a run of code, is that a reference stands for; None if it is here."""
    reference = None if data is None else whole_reference(data)
    return None if reference is None else Stored(reference.size, f"/api/v1/tasks/{id}/{what}")


@routes.get("/{id}/lineage", about=TASK)
def task_lineage(api: Api, id: UUID, reach: Reach) -> Lineage:
    """Show what enqueued a task, and what it enqueued: the first of it, by each of its last attempts."""
    return lineage_within(reach, api.backend.insights.lineage(id))


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
    """There may be more after these: what comes after this place."""


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
    """Return some of what a task said."""
    if query.last:
        return shown_log(LogPage(read_last(api.backend.connections, task, query.last, query.attempt), ""))
    return shown_log(api.backend.tasks.log(task, query.cursor, attempt=query.attempt))


def shown_log(page: LogPage) -> Log:
    """Return lines as they are answered."""
    lines = [
        LogEntry(line.at, line.attempt, line.level, line.text, line.source, UUID(line.task), line.step)
        for line in page.lines
    ]
    return Log(lines, page.last if lines and page.last else None)


@routes.post("/{id}/cancel", about=TASK, status=202)
def cancel_task(api: Api, id: UUID) -> Asked:
    """Cancel a task, wherever it stands; one that runs is interrupted."""
    api.backend.tasks.cancel(id.bytes)
    return Asked(id, "cancel")


@routes.post("/{id}/retry", about=TASK, status=202)
def retry_task(api: Api, id: UUID) -> Asked:
    """Open a failed or skipped task again, with all its tries."""
    api.backend.tasks.retry(id.bytes)
    return Asked(id, "retry")


class Redrive(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which failed tasks are opened again; what is not given does not matter."""

    queue: str | None = None
    name: str | None = None
    error: str | None = None
    """Part of the error's type or message."""
    kind: str | None = None
    """The error's type, and nothing else."""
    since: datetime | None = None
    until: datetime | None = None
    dry_run: bool = False
    """Only say which."""


class FailureGroup(msgspec.Struct, frozen=True):
    """Failed tasks of one name with one kind of error."""

    name: str
    queue: str
    kind: str
    example: str
    """The message of the last of them."""
    tasks: int


class Redriven(msgspec.Struct, frozen=True):
    """Failed tasks that match."""

    tasks: int
    groups: list[FailureGroup]
    asked: bool
    """Whether they are opened again, or this was only a look."""


@routes.post(
    "/retry", about=WITHIN, status=202, examples=[{"queue": "mail", "error": "ConnectionError", "dry_run": True}]
)
def retry_failed(api: Api, body: Redrive, reach: Reach) -> Redriven:
    """Open failed tasks again by the thousand: those of a queue, a name, an error or a time."""
    given = {name: getattr(body, name) for name in ("queue", "name", "error", "since", "until", "kind")}
    wanted = FailedFilter(**given)
    if wanted == FailedFilter():
        raise refused(422, "The request does not fit", "Say which: queue, name, error, kind, since or until.")
    with api.reading() as connection:
        groups = redrive.preview(connection, wanted, reach.queues)
    asked = not body.dry_run and bool(groups)
    if asked:
        api.backend.tasks.retry_failed(wanted, reach.queues)
    found = [FailureGroup(*group) for group in groups]
    return Redriven(sum(group.tasks for group in groups), found, asked)
