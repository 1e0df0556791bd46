"""Executors that a client brings with its tasks: only of those who may apply workflows, where they could be named too.

Who may enqueue may have done what some worker knows, and nothing else. Options of an executor can be any command, image
or function, so those of others are left out. A task that is declared with an executor is done by it nevertheless: the
worker that knows the task has its declaration, and the leader writes that into the row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from orchestrator.domain.access import Scope
from orchestrator.domain.tasks.callbacks import Callback, Callbacks
from orchestrator.domain.tasks.task import DEFAULT_OPTIONS, NewTask, TaskOptions

NEEDED = Scope.OPERATE
"""Which is what applying a workflow takes."""

T = TypeVar("T", NewTask, Callback)
_UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)
"""What is wrong with a text that the checks of calls refuse."""


def without_executors(body: Any) -> Any:
    """Return the body of a call of the Python client without the executors of its tasks, and of what follows them."""
    changed: dict[str, Any] = {}
    task, tasks = getattr(body, "task", None), getattr(body, "tasks", None)
    if isinstance(task, NewTask):
        changed["task"] = _without(task)
    if isinstance(tasks, list):
        changed["tasks"] = [_without(one) if isinstance(one, NewTask) else one for one in tasks]
    return msgspec.structs.replace(body, **changed) if changed else body


def _without(task: T) -> T:
    options, callbacks = _changed(task.options, _plain_options), _changed(task.callbacks, _plain_callbacks)
    if (options, callbacks) == (task.options, task.callbacks):
        return task
    return msgspec.structs.replace(task, options=options, callbacks=callbacks)


def _changed(text: str | None, change: Callable[[str], str | None]) -> str | None:
    try:
        return None if text is None else change(text)
    except _UNREADABLE:
        return text  # it is refused for that


def _plain_options(text: str) -> str | None:
    options = msgspec.json.decode(text, type=TaskOptions)
    if options.executor is None:
        return text
    plain = msgspec.structs.replace(options, executor=None)
    return None if plain == DEFAULT_OPTIONS else msgspec.json.encode(plain).decode()


def _plain_callbacks(text: str) -> str:
    known = msgspec.json.decode(text, type=Callbacks)
    success, failure = tuple(map(_without, known.success)), tuple(map(_without, known.failure))
    if (success, failure) == (known.success, known.failure):
        return text
    return msgspec.json.encode(msgspec.structs.replace(known, success=success, failure=failure)).decode()
