"""Errors as data: what a task or a workflow leaves behind when it fails."""

from __future__ import annotations

import traceback

from orchestrator.domain.task import TaskError
from orchestrator.sdk.names import type_name

_MESSAGE_LIMIT = 10_000
_TRACEBACK_LIMIT = 50_000


def describe(error: BaseException) -> TaskError:
    """Return an error as data, within limits, and with no character that the stores refuse."""
    kind = type(error)
    name = type_name(kind)
    try:
        message = str(error)
    except Exception as unprintable:  # noqa: BLE001  # a broken __str__ must not hide the failure itself
        message = f"(its text could not be had: {type(unprintable).__name__})"
    first = error.__traceback__.tb_next if error.__traceback__ is not None else None  # not the frame that caught it
    try:
        text = "".join(traceback.TracebackException(kind, error, first, limit=-50).format())
    except Exception as unprintable:  # noqa: BLE001  # nor must a broken cause, or a group of groups without end
        text = f"(its traceback could not be had: {type(unprintable).__name__})"
    return TaskError(_clean(name, 500), _clean(message, _MESSAGE_LIMIT), _clean(text, _TRACEBACK_LIMIT))


def _clean(text: str, limit: int) -> str:
    text = text.encode("utf-8", "replace").decode().replace("\0", "\\0")
    return text if len(text) <= limit else f"{text[: limit // 2]}\n…\n{text[-limit // 2 :]}"
