"""Enqueue one task or many."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import msgspec
from msgspec import UNSET, Meta, UnsetType

from orchestrator.api.bodies import MAX_BODY
from orchestrator.api.context import Api
from orchestrator.api.endpoints import Routes
from orchestrator.api.key_scope import WITHIN, check_queue, check_task_name
from orchestrator.api.problems import Refused, at, invalid
from orchestrator.domain.access import KeyScope, Scope
from orchestrator.domain.tasks.task import DuplicatePolicy, NewTask, UniqueKey
from orchestrator.errors import InvalidTask
from orchestrator.sdk.tasks.by_name import call_by_name
from orchestrator.sdk.tasks.options import DEFAULT_QUEUE, idempotency_key

routes = Routes("tasks", "/api/v1/tasks")

_EXAMPLE = {"name": "shop.tasks.resize", "args": ["a.png"], "kwargs": {"width": 200}, "queue": "images"}
_MAX_TASKS = 10_000
_MAX_KEYED_TASKS = 1_000
"""Tasks of a request with an idempotency key. Each takes a lock, of which Postgres has some thousands."""
_ONE_KEY = "unique_key and the header Idempotency-Key: give one of them, not both."


class NewCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task to enqueue: its name, arguments and options."""

    name: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    queue: str | UnsetType = UNSET
    """The task's queue; `default` if none is given."""
    priority: int | UnsetType = UNSET
    """From -100 to 100; higher runs first."""
    delay: float | UnsetType = UNSET
    """Seconds before the task may start."""
    eta: datetime | UnsetType = UNSET
    """The time, with its zone, before which the task may not start."""
    expires: float | datetime | UnsetType = UNSET
    """Seconds within which the task must start, or the time, with its zone; otherwise it fails as expired."""
    retries: int | UnsetType = UNSET
    """Retries of a failed attempt."""
    timeout: float | UnsetType = UNSET
    """Seconds that one attempt may run."""
    unique_key: str | UnsetType = UNSET
    """A key that only one task of this name may have at a time."""
    on_duplicate: DuplicatePolicy | UnsetType = UNSET
    """If another task has the key: `return` its id, `replace` its arguments while it waits, or `raise`."""
    idempotency_key: str | UnsetType = UNSET
    """The same key enqueues the task once, however often the request is sent; like the header Idempotency-Key."""
    concurrency_key: str | UnsetType = UNSET
    """The concurrency key: keys take turns."""
    store_result: bool | UnsetType = UNSET
    """Store the result."""
    redact: list[str] | UnsetType = UNSET
    """Names of arguments, and of fields in arguments and result, that are redacted everywhere; `@0` is the first
    positional argument."""
    headers: dict[str, str] | UnsetType = UNSET
    """Strings that the task and everything it starts can read: up to 4,096 bytes."""

    def options(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in self.__struct_fields__[3:]}
        return {name: value for name, value in given.items() if value is not UNSET}


class Calls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tasks to enqueue together, all or none."""

    tasks: Annotated[list[NewCall], Meta(max_length=_MAX_TASKS)]


class Enqueued(msgspec.Struct, frozen=True, omit_defaults=True):
    """A task that was enqueued."""

    id: UUID
    warning: str = ""
    """Set if no live worker has registered a task of this name."""


class EnqueuedMany(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tasks that were enqueued, in the order of the request."""

    ids: list[UUID]
    warnings: list[str] = []
    """One for each name that no live worker has registered; omitted if there is none."""


def new_task(api: Api, call: NewCall, key_scope: KeyScope, key: str | None = None) -> NewTask:
    """Build a task from a call; raise the error for the caller if the call is invalid."""
    options = call.options()
    if key is not None and options.setdefault("idempotency_key", key) != key:
        raise invalid("The header Idempotency-Key and the option idempotency_key differ: give one of them.")
    task = call_by_name(api.settings, call.name, call.args, call.kwargs, options=options, queue=DEFAULT_QUEUE)
    check_queue(key_scope, task.queue)
    check_task_name(key_scope, task.name)
    if task.unique is not None and task.unique.same_call:
        return _with_key(task, task.unique)
    return task


def _with_key(task: NewTask, unique: UniqueKey) -> NewTask:
    """Return a task whose key covers the whole request, options included."""
    return msgspec.structs.replace(task, unique=msgspec.structs.replace(unique, same_options=True))


def _enqueue_large(api: Api, body: NewCall, key: str | None, key_scope: KeyScope) -> Enqueued:
    task = new_task(api, body, key_scope, key)
    warnings = api.names.check([task.name])
    task = api.names.hiding(task)
    return Enqueued(UUID(bytes=api.backend.tasks.enqueue(task, key_scope.queues)), " ".join(warnings))


@routes.post("", about=WITHIN, scope=Scope.ENQUEUE, status=201, examples=[_EXAMPLE], call_large=_enqueue_large)
async def enqueue(api: Api, body: NewCall, key: str | None, key_scope: KeyScope) -> Enqueued:
    """Enqueue a task. It is durable once this is answered.

    The name of a workflow or flow is rejected. A name that no live worker has registered is stored, with a `warning`.
    The worker checks the arguments. A repeated request with the same `Idempotency-Key` returns the id of the first.
    With other arguments or options it is rejected.
    """
    task = new_task(api, body, key_scope, key)
    warnings = await api.names.acheck(task.name)
    task = api.names.hiding(task)
    return Enqueued(UUID(bytes=await api.backend.tasks.aenqueue(task, key_scope.queues)), " ".join(warnings))


@routes.post(
    "/bulk",
    about=WITHIN,
    scope=Scope.ENQUEUE,
    status=201,
    examples=[{"tasks": [_EXAMPLE, _EXAMPLE]}],
    max_body=MAX_BODY,
)
def enqueue_many(api: Api, body: Calls, key: str | None, key_scope: KeyScope) -> EnqueuedMany:
    """Enqueue many tasks, all or none.

    A repeated request with the same `Idempotency-Key` returns the ids of the first. With other tasks it is rejected. A
    request with a key has at most a thousand tasks. A task with its own `idempotency_key` uses that.
    """
    tasks = [_numbered(api, index, call, key_scope) for index, call in enumerate(body.tasks)]
    warnings = api.names.check(task.name for task in tasks)
    tasks = [api.names.hiding(task) for task in tasks]
    if key is None:
        created = api.backend.tasks.enqueue_many(tasks, key_scope.queues)
    else:
        created = _enqueue_once(api, tasks, key, key_scope)
    return EnqueuedMany([UUID(bytes=id) for id in created], warnings)


def _numbered(api: Api, index: int, call: NewCall, key_scope: KeyScope) -> NewTask:
    """Build one of many tasks; an error names its index."""
    try:
        return new_task(api, call, key_scope)
    except (InvalidTask, Refused) as error:
        raise at(f"#/tasks/{index}", error) from error


def _enqueue_once(api: Api, tasks: list[NewTask], key: str, key_scope: KeyScope) -> list[bytes]:
    """Enqueue tasks under one key.

    Each task's key derives from it, and not from its name, so that other names conflict.
    """
    if len(tasks) > _MAX_KEYED_TASKS:
        advice = f"found {len(tasks):,}. Split the request, and give each part its own key."
        raise invalid(f"#/tasks: expected at most {_MAX_KEYED_TASKS:,} with a key; {advice}")
    period = api.settings.idempotency_period
    keyed = []
    for index, task in enumerate(tasks):
        if task.unique is None:
            task = _with_key(task, idempotency_key("", f"{key}/{index}", period))
        elif not task.unique.same_call:
            raise invalid(f"#/tasks/{index}: {_ONE_KEY}")
        keyed.append(task)
    return api.backend.tasks.enqueue_once(
        keyed, idempotency_key("", f"{key}/{len(tasks)}", period).key, key_scope.queues
    )
