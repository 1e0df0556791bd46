"""Plain data, as sent in messages and stored in Postgres, with limits that every reader can handle."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import msgspec

from orchestrator.domain.dag.operators import fits

MAX_LEVELS = 200
"""The maximum nesting of data. A process with a small stack must be able to read what another one wrote."""

REFUSALS = (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError)
"""Errors that a serializer raises for values it cannot encode."""


_NESTS = frozenset((dict, list, tuple))
"""Types into which a decoder turns maps and arrays. An array that is a map key becomes a tuple."""


def is_too_deep(plain: Any) -> bool:
    """Return whether decoded data has more nesting levels than allowed."""
    containers = [plain] if type(plain) in _NESTS else []
    for _ in range(MAX_LEVELS - 1):
        inner: list[Any] = []
        for nest in containers:
            if type(nest) is dict:
                inner += [value for value in nest.values() if type(value) in _NESTS]
                inner += [key for key in nest if type(key) is tuple]
            else:
                inner += [value for value in nest if type(value) in _NESTS]
        if not inner:
            return False
        containers = inner
    return any(containers)


def unstorable(value: Any) -> str | None:
    """Return why a value would not survive a round trip through jsonb, or None if it would."""
    if type(value) is bool or (type(value) is int and fits(value)):
        return None
    try:
        plain = msgspec.to_builtins(value, str_keys=True)
        msgspec.json.encode(plain)
    except REFUSALS as error:
        return str(error)
    for depth, level in enumerate(_levels(plain)):
        if depth >= MAX_LEVELS:
            return f"it is nested more than {MAX_LEVELS} levels deep"
        for item in level:
            if isinstance(item, (int, float)) and not fits(item):
                return "it holds a number that is too large, infinite or none at all (NaN)"
            if isinstance(item, str) and "\0" in item:
                return "it holds a NUL character, which cannot be stored"
    return None


_POSSIBLY_LARGE = re.compile(rb"[0-9]e[0-9]")
_POSSIBLY_TOO_LARGE = re.compile(r"[0-9]{19}")
_INTEGER_LIKE = 1e16
"""msgspec writes floats from this size on without a decimal point, so jsonb reads them as integers."""


def stored_json(value: Any) -> str:
    """Return data as JSON for a jsonb column. Floats are written so that they are read back as floats."""
    text = msgspec.json.encode(value)
    if _POSSIBLY_LARGE.search(text):
        text = msgspec.json.encode(_with_points(msgspec.to_builtins(value, str_keys=True)))
    return text.decode()


def _with_points(plain: Any) -> Any:
    if isinstance(plain, float) and abs(plain) >= _INTEGER_LIKE:
        return msgspec.Raw(f"{Decimal(repr(plain)):f}.0".encode())
    if isinstance(plain, dict):
        return {key: _with_points(value) for key, value in plain.items()}
    return [_with_points(item) for item in plain] if isinstance(plain, (list, tuple)) else plain


def read_json(text: str) -> Any:
    """Return data read from a jsonb column. Integers outside 64 bits were written as floats, and become floats."""
    plain = msgspec.json.decode(text)
    return _without_giants(plain) if _POSSIBLY_TOO_LARGE.search(text) else plain


def _without_giants(plain: Any) -> Any:
    if isinstance(plain, int) and not fits(plain):
        return float(plain)
    if isinstance(plain, dict):
        return {key: _without_giants(value) for key, value in plain.items()}
    return [_without_giants(item) for item in plain] if isinstance(plain, list) else plain


def is_same(left: Any, right: Any) -> bool:
    """Return whether two decoded values are equal, types included: neither True nor 1.0 equals 1."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        remaining = {(type(key), key): value for key, value in right.items()}
        return len(left) == len(remaining) and all(
            (type(key), key) in remaining and is_same(value, remaining[type(key), key]) for key, value in left.items()
        )
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(is_same, left, right))
    return bool(left == right or (left != left and right != right))  # both are NaN


def _levels(plain: Any) -> Iterator[list[Any]]:
    """Yield keys and values of each nesting level, outermost first, up to one level beyond the limit."""
    level = [plain]
    for _ in range(MAX_LEVELS + 1):
        yield level
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item)
                inner.extend(item.values())
            elif isinstance(item, (list, tuple)):
                inner.extend(item)
        if not inner:
            return
        level = inner


def anchored(pattern: str) -> str:
    """Return a regex that matches only a whole text: msgspec searches, and `$` also matches before a final newline."""
    return rf"^(?:{pattern})(?!\n)$"
