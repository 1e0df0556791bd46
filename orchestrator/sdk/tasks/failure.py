"""Errors as data, stored when a task or a workflow fails."""

from __future__ import annotations

import inspect
import linecache
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

import msgspec

from orchestrator.domain.plain import is_too_deep
from orchestrator.domain.redaction import Redaction, scrub
from orchestrator.domain.tasks.task import TaskError
from orchestrator.errors import OrchestratorError
from orchestrator.sdk.names import type_name
from orchestrator.sdk.values.payload import encode_other

_MESSAGE_LIMIT = 10_000
_TRACEBACK_LIMIT = 50_000
_DATA_LIMIT = 20_000
_MAX_DECORATOR_LINES = 20
"""Lines between the first decorator of a function and its `def`, at most."""
_SLOTS = (MemberDescriptorType, GetSetDescriptorType)
_SKIPPED_SLOT = "obj"
"""The attribute of an AttributeError with the object that lacks the attribute. It does not describe the failure."""
_encode = msgspec.json.Encoder(enc_hook=encode_other).encode


def describe(error: BaseException) -> TaskError:
    """Return an exception as data, with limited length and without characters that Postgres refuses."""
    kind = type(error)
    name = type_name(kind)
    try:
        message = str(error)
    except Exception as unprintable:  # noqa: BLE001  # a broken __str__ must not hide the failure itself
        message = f"(message unavailable: str() raised {type(unprintable).__name__})"
    first = error.__traceback__.tb_next if error.__traceback__ is not None else None  # not the frame that caught it
    try:
        text = "".join(traceback.TracebackException(kind, error, first, limit=-50).format())
    except Exception as unprintable:  # noqa: BLE001  # nor a broken cause or an endless exception group
        text = f"(traceback unavailable: formatting it raised {type(unprintable).__name__})"
    return TaskError(_clean(name, 500), _clean(message, _MESSAGE_LIMIT), _clean(text, _TRACEBACK_LIMIT), _data(error))


def at_function(error: TaskError, function: Callable[..., Any]) -> TaskError:
    """Replace the traceback of an error that this package raised about a call with the location of the function."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return error
    line = code.co_firstlineno  # the line of the first decorator
    lines = linecache.getlines(code.co_filename)[line - 1 : line + _MAX_DECORATOR_LINES]
    line += next((offset for offset, text in enumerate(lines) if text.lstrip().startswith(("def ", "async def "))), 0)
    frames = traceback.StackSummary.from_list([traceback.FrameSummary(code.co_filename, line, code.co_name)]).format()
    text = f"Traceback (most recent call last):\n{''.join(frames)}{error.kind}: {error.message}\n"
    return TaskError(error.kind, error.message, _clean(text, _TRACEBACK_LIMIT), error.data, error.phase)


def without_secrets(error: TaskError, patterns: Iterable[str], secrets: Sequence[str]) -> TaskError:
    """Return an error without the secret arguments, and without fields whose names match the patterns."""
    data = error.data
    if data:
        hidden = Redaction(patterns, secrets, is_whole="" in secrets)
        data = msgspec.json.encode(hidden.redacted(error.attributes)).decode()
    kind, message, traceback_ = (scrub(text, secrets) for text in (error.kind, error.message, error.traceback))
    return TaskError(kind, message, traceback_, data)


def _data(error: BaseException) -> str:
    """Return the attributes of an exception as JSON, except for private, too large and unserializable attributes."""
    encoded: dict[str, msgspec.Raw] = {}
    size = 0
    for name, value in _attributes(error).items():
        try:
            text = _encode(value)
            if size + len(text) > _DATA_LIMIT or is_too_deep(msgspec.json.decode(text)):
                continue
            encoded[str(name)] = msgspec.Raw(text)
            size += len(text) + len(name)
        except Exception:  # noqa: BLE001  # skip an attribute that cannot be serialized, for whatever reason
            continue
    return msgspec.json.encode(encoded).decode() if encoded else ""


def _attributes(error: BaseException) -> Mapping[str, Any]:
    if isinstance(error, OrchestratorError):
        return error.data
    values: dict[str, Any] = {}
    kind: Any = type(error)
    for name in _slots(kind):
        try:
            value = getattr(error, name)
        except Exception:  # noqa: BLE001  # a slot that was never set, say
            continue
        if value is not None:
            values[name] = value
    try:
        return values | {name: value for name, value in vars(error).items() if not name.startswith("_")}
    except Exception:  # noqa: BLE001  # a strange class, or one of slots only, must not hide the failure itself
        return values


@lru_cache(maxsize=1024)
def _slots(kind: Any) -> tuple[str, ...]:
    """Return the public attributes that a class stores outside of `__dict__`, such as `errno` of an OSError."""
    return tuple(
        name
        for base in reversed(kind.__mro__)
        if base not in (object, BaseException)
        for name, attribute in vars(base).items()
        if isinstance(attribute, _SLOTS) and not name.startswith("_") and name != _SKIPPED_SLOT
    )


def _clean(text: str, limit: int) -> str:
    text = text.encode("utf-8", "replace").decode().replace("\0", "\\0")
    return text if len(text) <= limit else f"{text[: limit // 2]}\n…\n{text[-limit // 2 :]}"
