"""Calls of tasks that only the workers have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from itertools import count
from typing import Any

from orchestrator.domain.tasks.starts import StartMany, as_task
from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import InvalidTask
from orchestrator.sdk.checks import check_name, shown
from orchestrator.sdk.ids import new_id, new_ids
from orchestrator.sdk.middleware import HookStack
from orchestrator.sdk.tasks.compositions import Arguments, arguments_of
from orchestrator.sdk.tasks.options import CallOptions, Placed, once, with_options
from orchestrator.sdk.tasks.task import Task
from orchestrator.sdk.values.payload import encode_call
from orchestrator.sdk.values.sealing import left_task, outgoing_task, store_of
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
    """Check a call as far as that goes without its function, and return it as data; `queue` is where none is given."""
    period = settings.idempotency_period
    key = options.get(_ONCE)
    if key is None or options.get("unique_key") is not None:
        chosen, placed = _placed(name, options, period)
    else:  # all but this is the same for many calls
        chosen, placed = _placed(name, {option: options[option] for option in options if option != _ONCE}, period)
        placed = placed._replace(unique=once(name, key, period))
    stays = placed.unique is not None and placed.unique.same_call
    task = NewTask(
        id=new_id(),
        name=name,
        queue=chosen.queue or queue,
        payload=encode_call(name, args, kwargs, settings.max_payload if stays else settings.largest_value),
        priority=chosen.priority,
        delay=chosen.delay_seconds,
        options=placed.options,
        lane=placed.lane,
        expires=chosen.expiry_seconds,
        unique=placed.unique,
        trace=current_trace(),
    )
    return outgoing_task(task, settings)


def _placed(name: str, options: Mapping[str, Any], period: float) -> tuple[CallOptions, Placed]:
    """Return the options of a call, checked, and where it is placed by them; what was checked lately is known."""
    given = tuple((option, type(value), value) for option, value in options.items())  # True is 1, but no priority
    try:
        return _known(name, given, period)
    except TypeError:  # a list, which cannot be looked up
        return _known.__wrapped__(name, given, period)


@lru_cache(maxsize=1024)
def _known(name: str, given: Iterable[tuple[str, type, Any]], period: float) -> tuple[CallOptions, Placed]:
    chosen = with_options(_DEFAULTS, {option: value for option, _, value in given})
    return chosen, chosen.placed(check_name("task", name), {}, period)


_DEFAULTS = CallOptions()
_ONCE = "idempotency_key"


def start_many(task: Task[..., Any], calls: Iterable[Arguments], name: str | None) -> bytes:
    """Start a run of many calls of a task, and return its id; inside a task, all of it travels in one message."""
    if task._client.middleware is not None and not task._is_hooked:
        with HookStack() as afterwards:
            return start_many(task._for_many(afterwards), calls, name)
    hand_over, runtime = task._enqueue_path(), task._client.runtime()
    run_id = new_id() if runtime is None else runtime.next_id()
    called = check_name("run", name or task.name)
    with sending("start", called, task.queue) as sent:
        sent.created(run_id)
        trace = current_trace()
        tasks = new_tasks(task, calls, trace, run_id)
        if hand_over is None:
            task._client.backend.runs.start(run_id, called, tasks)
        else:
            hand_over([as_task(run_id, StartMany(called, list(tasks)), trace)])
    return run_id


def new_tasks(
    task: Task[..., Any], calls: Iterable[Arguments], trace: str | None, run_id: bytes | None = None
) -> Iterator[NewTask]:
    """Check calls and yield them as data; those of a run are numbered.

    Nothing is written but arguments that are kept outside.
    """
    check_iterable(task, calls)
    return _checked(task, calls, trace, run_id)


def check_iterable(task: Task[..., Any], calls: object) -> None:
    """Refuse what is no number of calls."""
    if not isinstance(calls, Iterable):
        raise InvalidTask(
            f"Task {task.name!r}: expected a list of calls, or anything else to go through; found {shown(calls)}."
        )


def _checked(
    task: Task[..., Any], calls: Iterable[Arguments], trace: str | None, run_id: bytes | None
) -> Iterator[NewTask]:
    positions = count()
    rest = zip(positions, calls, strict=False)
    try:
        for position, call in rest:
            args, kwargs = arguments_of(task.name, position, call)
            one = task if task._afterwards is None else _hooked(task, task._afterwards, args, kwargs)
            first = one._new(args, kwargs, run_id, None if run_id is None else position, trace)
            first = outgoing_task(first, task._client.settings)
            yield first
            if _is_pattern(task, first):
                yield from _alike(task, first, rest)
    except InvalidTask as error:
        place = f"calls[{next(positions) - 1}]"
        if place in str(error):
            raise
        raise type(error)(f"{place}: {error}") from error


def _hooked(
    task: Task[..., Any], afterwards: ExitStack, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Task[..., Any]:
    """Call the hooks of one call; return the task as they want it."""
    assert task._client.middleware is not None
    call = task._as_call(args, kwargs)
    task._client.middleware.enter_enqueue(afterwards, call)
    return task._hooked(call)


def _is_pattern(task: Task[..., Any], new: NewTask) -> bool:
    """Say whether calls after this one differ from it in nothing but their arguments and ids."""
    return (
        task._placed is not None
        and task._afterwards is None
        and new.unique is None
        and task._call_options.executor_call is None
        and task._client.runtime() is None
        and vault_of(task._client.settings) is None
    )


def _alike(task: Task[..., Any], first: NewTask, calls: Iterable[tuple[int, Arguments]]) -> Iterator[NewTask]:
    """Check calls that differ from the first in nothing but their arguments, and yield them as data."""
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
        yield left_task(new, store) if store is not None and len(payload) > inline else new
