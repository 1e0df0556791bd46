"""Many calls of one task as data: what they share is looked up with the first of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import InvalidTask
from orchestrator.sdk.checks import shown
from orchestrator.sdk.ids import new_ids
from orchestrator.sdk.tasks.context import current_runtime
from orchestrator.sdk.tasks.task import Task
from orchestrator.sdk.values.payload import encode_call
from orchestrator.sdk.values.sealing import left_task, outgoing_task
from orchestrator.sdk.values.stores import store_of
from orchestrator.sealing import vault_of

Call = tuple[Any, ...] | list[Any] | Mapping[str, Any]
"""The arguments of one call: all by place, or all by name."""


def new_tasks(
    task: Task[..., Any], calls: Iterable[Call], trace: str | None, run_id: bytes | None = None
) -> Iterator[NewTask]:
    """Check calls and yield them as data; those of a run are numbered.

    Nothing is written but arguments that are kept outside.
    """
    if not isinstance(calls, Iterable):
        raise InvalidTask(
            f"Task {task.name!r}: expected a list of calls, or anything else to go through; found {shown(calls)}."
        )
    rest = enumerate(calls)
    for position, call in rest:
        args, kwargs = _arguments(task, position, call)
        one = task if task._afterwards is None else _hooked(task, task._afterwards, args, kwargs)
        first = one._new(args, kwargs, run_id, None if run_id is None else position, trace)
        first = outgoing_task(first, task._client.settings)
        yield first
        if _is_pattern(task, first):
            yield from _alike(task, first, rest)


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
        and current_runtime() is None
        and vault_of(task._client.settings) is None
    )


def _alike(task: Task[..., Any], first: NewTask, calls: Iterable[tuple[int, Call]]) -> Iterator[NewTask]:
    """Check calls that differ from the first in nothing but their arguments, and yield them as data."""
    signature, settings = task._signature, task._client.settings
    check, check_types = signature.check, signature.check_types
    inline, largest, store = settings.inline_payload, settings.largest_value, store_of(settings)
    name, queue, run_id = first.name, first.queue, first.run_id
    shared = (first.lane, first.expires, None, first.callbacks, first.trace)
    for (position, call), identifier in zip(calls, new_ids(), strict=False):
        args, kwargs = _arguments(task, position, call)
        check(args, kwargs)
        payload = encode_call(name, args, kwargs, largest)
        check_types(args, kwargs, payload)
        new = NewTask(
            identifier, name, queue, payload, first.priority, first.delay, first.options, run_id,
            None if run_id is None else position, None, *shared,
        )  # fmt: skip
        yield left_task(new, store) if store is not None and len(payload) > inline else new


def _arguments(task: Task[..., Any], position: int, call: Call) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if type(call) is tuple:
        return call, _NONE
    if isinstance(call, Mapping):
        return (), call
    if isinstance(call, Sequence) and not isinstance(call, _TEXTS):  # such as a row of a query
        return tuple(call), _NONE
    raise InvalidTask(
        f"Task {task.name!r}, calls[{position}]: expected the arguments of one call, as a tuple or as a mapping of "
        f"named ones; found {shown(call)}. A call with a single argument is a tuple of one: (value,)."
    )


_NONE: Mapping[str, Any] = {}
_TEXTS = (str, bytes, bytearray, memoryview)
"""Sequences that are meant as one value."""
