"""Callbacks: tasks to create when another task ends."""

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
    """A task to create. Its only argument is the result or the failure."""

    name: str
    queue: str
    priority: int = 0
    delay: float = 0.0
    options: str | None = None
    lane: str | None = None
    expires: float | None = None
    callbacks: str | None = None
    """The callback's own callbacks, as JSON."""


class Callbacks(msgspec.Struct, frozen=True, omit_defaults=True):
    """The callbacks of a task, stored with it as JSON."""

    task: str
    """The name of the task whose end triggers them."""
    success: tuple[Callback, ...] = ()
    failure: tuple[Callback, ...] = ()


class TaskFailure(msgspec.Struct, frozen=True):
    """The argument of an `on_failure` task."""

    task_id: str
    """The id of the failed task."""
    task: str
    """The name of the failed task."""
    kind: str
    """The type of the exception."""
    message: str
    """The message of the exception."""
    traceback: str = ""
    """The traceback of the exception."""
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
    """Return the tasks to create after a success, with the trace and the headers of the ended task."""
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
    """Return the tasks to create after a failure."""
    failed = error or TaskError("", "")
    failure: Any = TaskFailure(
        to_text(task), callbacks.task, failed.kind, failed.message, failed.traceback, failed.attributes
    )
    if is_sealed_text(failed.message):  # only a worker decrypts it
        texts = {"message": failed.message, "traceback": failed.traceback, "data": failed.data}
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
    for index, callback in enumerate(callbacks):
        fields = msgspec.structs.asdict(callback)
        if headers:
            fields["options"] = inheriting(callback.options, headers)
        identifier = derived_id(task, attempt, when, index)
        yield NewTask(id=identifier, payload=payload, trace=trace, parent=task, **fields)
