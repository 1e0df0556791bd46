"""Rows of the database, as the checks read and show them."""

from __future__ import annotations

from typing import Any

import msgspec


def value_of(result: Any) -> Any:
    """Return the value of a result as it is stored."""
    return msgspec.msgpack.decode(bytes(result)) if result is not None else None


def token_of(result: Any) -> Any:
    """Return what a success left in its result, by which it can be told which execution it came from."""
    value = value_of(result)
    return value["token"] if isinstance(value, dict) else value


def shown(row: dict[str, Any]) -> str:
    """Return a row as a person reads it."""
    return ", ".join(f"{name} {value}" for name, value in row.items() if value is not None and name != "payload")
