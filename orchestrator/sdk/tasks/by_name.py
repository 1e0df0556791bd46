"""Enqueues by task name, without the function, and enqueues of many calls at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from itertools import count
from typing import Any

from orchestrator.domain.tasks.starts import StartMany, as_task
from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import InvalidTask
from orchestrator.sdk.checks import check_name, for_message
from orchestrator.sdk.ids import new_id, new_ids
from orchestrator.sdk.middleware import HookStack
from orchestrator.sdk.tasks.compositions import Arguments, arguments_of
from orchestrator.sdk.tasks.options import CallOptions, Placed, idempotency_key, with_options
from orchestrator.sdk.tasks.task import Task
from orchestrator.sdk.values.payload import encode_call
from orchestrator.sdk.values.sealing import outgoing_task, store_of, task_with_stored_arguments
from orchestrator.sealing import vault_of
from orchestrator.settings import Settings
from orchestrator.trace_context import current_trace
from orchestrator.tracing.entry import sending


def call_by_name(
    settings: Settings,
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    options: Mapping[str, Any],
    queue: str,
) -> NewTask:
    """Check a call without its function, as far as possible, and return the new task. `queue` is the default queue."""
    period = settings.idempotency_period
    key = options.get(_ONCE)
    if key is None or options.get("unique_key") is not None:
        chosen, placed = _cached_options(name, options, period)
    else:  # the other options are the same for many calls, so they are cached without the idempotency key
        chosen, placed = _cached_options(
            name, {option: options[option] for option in options if option != _ONCE}, period
        )
        placed = placed._replace(unique=idempotency_key(name, key, period))
    is_inline = placed.unique is not None and placed.unique.same_call
    limit = settings.max_payload if is_inline else settings.largest_value
    task = NewTask(
        id=new_id(),
        name=name,
        queue=chosen.queue or queue,
        payload=encode_call(name, args, kwargs, limit, is_compared=is_inline),
        priority=chosen.priority,
        delay=chosen.delay_seconds,
        options=placed.options,
        lane=placed.lane,
        expires=chosen.expiry_seconds,
        unique=placed.unique,
        trace=current_trace(),
    )
    return outgoing_task(task, settings)


def _cached_options(name: str, options: Mapping[str, Any], period: float) -> tuple[CallOptions, Placed]:
    """Return the checked options of a call, and its lane and key. Recently checked options are cached."""
    items = tuple((option, type(value), value) for option, value in options.items())  # True is 1, but no priority
    try:
        return _checked_options(name, items, period)
    except TypeError:  # a list, which cannot be a cache key
        return _checked_options.__wrapped__(name, items, period)


@lru_cache(maxsize=1024)
def _checked_options(name: str, items: Iterable[tuple[str, type, Any]], period: float) -> tuple[CallOptions, Placed]:
    chosen = with_options(_DEFAULTS, {option: value for option, _, value in items})
    return chosen, chosen.placed(check_name("task", name), {}, period)


_DEFAULTS = CallOptions()
_ONCE = "idempotency_key"


def start_many(task: Task[..., Any], calls: Iterable[Arguments], name: str | None) -> bytes:
    """Start a run of many calls of a task and return its id. Inside a task, all calls travel in one message."""
    if task._client.middleware is not None and not task._is_hooked:
        with HookStack() as hook_stack:
            return start_many(task._for_many(hook_stack), calls, name)
    submit, runtime = task._enqueue_path(), task._client.runtime()
    run_id = new_id() if runtime is None else runtime.next_id()
    run_name = check_name("run", name or task.name)
    with sending("start", run_name, task.queue) as sent:
        sent.created(run_id)
        trace = current_trace()
        tasks = new_tasks(task, calls, trace, run_id)
        if submit is None:
            task._client.backend.runs.start(run_id, run_name, tasks)
        else:
            submit([as_task(run_id, StartMany(run_name, list(tasks)), trace)])
    return run_id


def new_tasks(
    task: Task[..., Any], calls: Iterable[Arguments], trace: str | None, run_id: bytes | None = None
) -> Iterator[NewTask]:
    """Check calls and yield the new tasks; tasks of a run are numbered.

    Large arguments are written to the payload store; nothing else is written.
    """
    check_iterable(task, calls)
    return _checked(task, calls, trace, run_id)


def check_iterable(task: Task[..., Any], calls: object) -> None:
    """Refuse calls that cannot be iterated over."""
    if not isinstance(calls, Iterable):
        raise InvalidTask(
            f"Task {task.name!r}: expected a list of calls, or anything else to go through; found {for_message(calls)}."
        )


def _checked(
    task: Task[..., Any], calls: Iterable[Arguments], trace: str | None, run_id: bytes | None
) -> Iterator[NewTask]:
    positions = count()
    rest = zip(positions, calls, strict=False)
    try:
        for position, call in rest:
            args, kwargs = arguments_of(task.name, position, call)
            hooked_task = task if task._hook_stack is None else _hooked(task, task._hook_stack, args, kwargs)
            first = hooked_task._new(args, kwargs, run_id, None if run_id is None else position, trace)
            first = outgoing_task(first, task._client.settings)
            yield first
            if _is_uniform(task, first):
                yield from _similar_tasks(task, first, rest)
    except InvalidTask as error:
        label = f"calls[{next(positions) - 1}]"
        if label in str(error):
            raise
        raise type(error)(f"{label}: {error}") from error


def _hooked(
    task: Task[..., Any], hook_stack: ExitStack, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Task[..., Any]:
    """Call the hooks of one call, and return the task with the options and headers that they set."""
    assert task._client.middleware is not None
    call = task._as_call(args, kwargs)
    task._client.middleware.enter_enqueue(hook_stack, call)
    return task._hooked(call)


def _is_uniform(task: Task[..., Any], new: NewTask) -> bool:
    """Return whether all later calls differ from this task in arguments and ids only."""
    return (
        task._placed is not None
        and task._hook_stack is None
        and new.unique is None
        and task._call_options.executor_call is None
        and task._client.runtime() is None
        and vault_of(task._client.settings) is None
    )


def _similar_tasks(task: Task[..., Any], first: NewTask, calls: Iterable[tuple[int, Arguments]]) -> Iterator[NewTask]:
    """Check calls that differ from the first in their arguments only, and yield the new tasks."""
    signature, settings = task._signature, task._client.settings
    check, check_types = signature.check, signature.check_types
    inline, largest, store = settings.inline_payload, settings.largest_value, store_of(settings)
    name, queue, run_id = first.name, first.queue, first.run_id
    shared = (first.lane, first.expires, None, first.callbacks, first.trace)
    for (position, call), identifier in zip(calls, new_ids(), strict=False):
        args, kwargs = arguments_of(task.name, position, call)
        check(args, kwargs)
        payload = encode_call(name, args, kwargs, largest)
        check_types(args, kwargs, payload)
        new = NewTask(
            identifier, name, queue, payload, first.priority, first.delay, first.options, run_id,
            None if run_id is None else position, None, *shared,
        )  # fmt: skip
        yield task_with_stored_arguments(new, store) if store is not None and len(payload) > inline else new
