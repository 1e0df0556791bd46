"""Stored arguments and results as plain data, for display."""

from __future__ import annotations

from math import isfinite, isnan
from typing import Any

import msgspec

from orchestrator.references import whole_reference
from orchestrator.sdk.values.payload import decode_shown
from orchestrator.sealing import CALL, CODE, Sealed, described, open_data

_MAX_BYTES = 60
"""Bytes of a binary value that a page displays, at most."""


def call_of(payload: bytes) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of any task. A turn of a workflow as code has none.

    Tasks of steps, hooks and schedules also carry their origin, which is left out.
    """
    match _decoded_call(payload):
        case [list(arguments), dict(keywords), *_]:
            return arguments, keywords
        case damaged:
            return [damaged], {}


def origin_of(payload: bytes) -> dict[str, Any]:
    """Return the origin of a task of a workflow: its workflow, step, index and count. Other tasks have none."""
    match _decoded_call(payload):
        case [list(), dict(), dict(origin), *_]:
            return origin
    return {}


def _decoded_call(payload: bytes) -> Any:
    if not payload:
        return [[], {}]
    if (stored := whole_reference(payload)) is not None:
        return [[str(stored)], {}]
    try:
        return stored_value(open_data(payload, CALL))
    except Sealed as error:
        return [[_placeholder(error)], {}]


def stored_value(data: bytes) -> Any:
    """Decode a stored value. Return a placeholder for a sealed value, and bytes that cannot be decoded as they are."""
    try:
        return decode_shown(data)
    except Sealed as error:
        return _placeholder(error)
    except ValueError:
        return data


def _placeholder(error: Sealed) -> str:
    return f"(sealed with key {error.key})" if error.is_missing else str(error)


def as_json(plain: Any) -> Any:
    """Return plain data as JSON data; other values as text."""
    try:
        return msgspec.to_builtins(plain, str_keys=True, enc_hook=described_value)
    except (TypeError, ValueError):
        return repr(plain)


NOT_JSON = "(not JSON: "
"""The prefix of texts in place of values that JSON does not support."""


def as_display_json(plain: Any) -> Any:
    """Return plain data as JSON data for people, with texts in place of NaN, infinities and bytes."""
    try:
        data = msgspec.to_builtins(plain, str_keys=True, enc_hook=described_value, builtin_types=(bytes,))
    except (TypeError, ValueError):
        return repr(plain)
    return _with_placeholders(data)


def _with_placeholders(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_placeholders(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_placeholders(item) for item in value]
    if isinstance(value, bytes):
        return f"{NOT_JSON}{len(value):,} bytes, {value[:_MAX_BYTES]!r}{'…' if len(value) > _MAX_BYTES else ''})"
    if isinstance(value, float) and not isfinite(value):
        return f"{NOT_JSON}{'NaN' if isnan(value) else 'Infinity' if value > 0 else '-Infinity'})"
    return value


def described_value(value: Any) -> str:
    """Return the placeholder of a nested sealed value."""
    if isinstance(value, msgspec.msgpack.Ext) and value.code == CODE:
        return described(bytes(value.data))
    raise TypeError(f"Values of type {type(value).__name__} are not data.")
