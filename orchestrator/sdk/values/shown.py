"""Stored arguments and results as plain data, for people and programs that only look."""

from __future__ import annotations

from typing import Any

import msgspec

from orchestrator.sdk.values.payload import decode_value
from orchestrator.sealing import CALL, Sealed, open_data


def call_of(payload: bytes) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a task, whoever made it; a turn of a workflow as code has none.

    Tasks of steps, hooks and schedules carry where they belong beside their arguments.
    """
    if not payload:
        return [], {}
    try:
        payload = open_data(payload, CALL)
    except Sealed as error:
        return [str(error)], {}
    match stored_value(payload):
        case [list(arguments), dict(keywords), *_]:
            return arguments, keywords
        case damaged:
            return [damaged], {}


def stored_value(data: bytes) -> Any:
    """Return the value that is stored, or the bytes themselves where they are none, or why they cannot be opened."""
    try:
        return decode_value(data)
    except Sealed as error:
        return str(error)
    except ValueError:
        return data


def as_json(plain: Any) -> Any:
    """Return plain data as it can stand in a JSON document, whatever it is."""
    try:
        return msgspec.to_builtins(plain, str_keys=True)
    except (TypeError, ValueError):
        return repr(plain)
