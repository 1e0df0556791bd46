"""Rows of the database, decoded and formatted for the checks."""

from __future__ import annotations

from typing import Any

import msgspec


def value_of(result: Any) -> Any:
    return msgspec.msgpack.decode(bytes(result)) if result is not None else None


def token_of(result: Any) -> Any:
    """Return the token in a result, which identifies its execution."""
    value = value_of(result)
    return value["token"] if isinstance(value, dict) else value


def shown(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in row.items() if value is not None and name != "payload")
