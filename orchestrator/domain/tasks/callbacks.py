"""Tasks that follow when another ends: what was asked for, and what it becomes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from orchestrator.domain.ids import derived_id, to_text
from orchestrator.domain.tasks.headers import inheriting
from orchestrator.domain.tasks.task import NewTask, TaskError
from orchestrator.sealing import as_data, is_sealed_text

_NO_RESULT = b"\xc0"


class Callback(msgspec.Struct, frozen=True, omit_defaults=True):
    """A task to be created; its only argument is the result, or the failure."""

    name: str
    queue: str
    priority: int = 0
    delay: float = 0.0
    options: str | None = None
    lane: str | None = None
    expires: float | None = None
    callbacks: str | None = None
    """Its own callbacks, as JSON."""


class Callbacks(msgspec.Struct, frozen=True, omit_defaults=True):
    """Callbacks of a task, stored with it as JSON."""

    task: str
    """The name of the task that they follow."""
    success: tuple[Callback, ...] = ()
    failure: tuple[Callback, ...] = ()


class TaskFailure(msgspec.Struct, frozen=True):
    """The argument of an `on_failure` task."""

    task_id: str
    """The id of the task that failed."""
    task: str
    """The name of the task that failed."""
    kind: str
    """The type of its error."""
    message: str
    """The text of its error."""
    traceback: str = ""
    """Where it was raised."""
    data: dict[str, Any] = {}
    """The exception's attributes."""


def after_success(
    task: bytes,
    attempt: int,
    callbacks: Callbacks,
    result: bytes | None,
    trace: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Iterable[NewTask]:
    """Return the tasks that follow a success. They belong to the span that the task came of, and have its headers."""
    payload = b"\x92\x91" + (result or _NO_RESULT) + b"\x80"  # [[result], {}]
    return _tasks(task, attempt, "success", callbacks.success, payload, trace, headers)


def after_end(
    task: bytes,
    attempt: int,
    callbacks: Callbacks,
    error: TaskError | None,
    trace: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Iterable[NewTask]:
    """Return the tasks that follow a failure."""
    what = error or TaskError("", "")
    failure: Any = TaskFailure(to_text(task), callbacks.task, what.kind, what.message, what.traceback, what.attributes)
    if is_sealed_text(what.message):  # only its worker opens it
        texts = {"message": what.message, "traceback": what.traceback, "data": what.data}
        parts = {name: msgspec.Raw(as_data(text)) for name, text in texts.items() if is_sealed_text(text)}
        failure = msgspec.structs.asdict(failure) | parts
    payload = msgspec.msgpack.encode(((failure,), {}))
    return _tasks(task, attempt, "failure", callbacks.failure, payload, trace, headers)


def _tasks(
    task: bytes,
    attempt: int,
    when: str,
    callbacks: Iterable[Callback],
    payload: bytes,
    trace: str | None,
    headers: Mapping[str, str] | None,
) -> Iterable[NewTask]:
    for place, callback in enumerate(callbacks):
        fields = msgspec.structs.asdict(callback)
        if headers:
            fields["options"] = inheriting(callback.options, headers)
        identifier = derived_id(task, attempt, when, place)
        yield NewTask(id=identifier, payload=payload, trace=trace, parent=task, **fields)
