"""Stored arguments and results as plain data, for people and programs that only look."""

from __future__ import annotations

from math import isfinite, isnan
from typing import Any

import msgspec

from orchestrator.references import whole_reference
from orchestrator.sdk.values.payload import decode_shown
from orchestrator.sealing import CALL, CODE, Sealed, described, open_data

_MOST_BYTES = 60
"""Of bytes, as far as a page shows them."""


def call_of(payload: bytes) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of any task; a turn of a workflow as code has none.

    Tasks of steps, hooks and schedules carry where they belong beside their arguments.
    """
    match _carried(payload):
        case [list(arguments), dict(keywords), *_]:
            return arguments, keywords
        case damaged:
            return [damaged], {}


def origin_of(payload: bytes) -> dict[str, Any]:
    """Return where a task of a workflow belongs, as it carries it: workflow, step, index and count; else nothing."""
    match _carried(payload):
        case [list(), dict(), dict(origin), *_]:
            return origin
    return {}


def _carried(payload: bytes) -> Any:
    if not payload:
        return [[], {}]
    if (stored := whole_reference(payload)) is not None:
        return [[str(stored)], {}]
    try:
        return stored_value(open_data(payload, CALL))
    except Sealed as error:
        return [[_told(error)], {}]


def stored_value(data: bytes) -> Any:
    """Return the value that is stored, or the bytes themselves where they are none, or with which key it is sealed."""
    try:
        return decode_shown(data)
    except Sealed as error:
        return _told(error)
    except ValueError:
        return data


def _told(error: Sealed) -> str:
    """Return what stands in the place of a value that cannot be opened."""
    return f"(sealed with key {error.key})" if error.is_missing else str(error)


def as_json(plain: Any) -> Any:
    """Return plain data as it can stand in a JSON document, whatever it is."""
    try:
        return msgspec.to_builtins(plain, str_keys=True, enc_hook=described_value)
    except (TypeError, ValueError):
        return repr(plain)


NOT_JSON = "(not JSON: "
"""How a text begins that stands for a value on a page."""


def as_shown(plain: Any) -> Any:
    """Return plain data as JSON for people: texts stand for NaN, infinities and bytes, which JSON lacks."""
    try:
        found = msgspec.to_builtins(plain, str_keys=True, enc_hook=described_value, builtin_types=(bytes,))
    except (TypeError, ValueError):
        return repr(plain)
    return _in_words(found)


def _in_words(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _in_words(held) for name, held in value.items()}
    if isinstance(value, list):
        return [_in_words(held) for held in value]
    if isinstance(value, bytes):
        return f"{NOT_JSON}{len(value):,} bytes, {value[:_MOST_BYTES]!r}{'…' if len(value) > _MOST_BYTES else ''})"
    if isinstance(value, float) and not isfinite(value):
        return f"{NOT_JSON}{'NaN' if isnan(value) else 'Infinity' if value > 0 else '-Infinity'})"
    return value


def described_value(value: Any) -> str:
    """Return what stands for a sealed value among others that this process has no key for."""
    if isinstance(value, msgspec.msgpack.Ext) and value.code == CODE:
        return described(bytes(value.data))
    raise NotImplementedError
