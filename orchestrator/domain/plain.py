"""Plain data: what travels in messages and is kept in Postgres, within bounds that every reader can bear."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import msgspec

from orchestrator.domain.dag.operators import fits

MOST_LEVELS = 200
"""How deeply data may be nested. What a shallow stack can still write, a deep one could no longer read."""

REFUSALS = (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError)
"""Errors of a serialiser for values that it cannot take."""


_NESTS = frozenset((dict, list, tuple))
"""Types that a decoder makes of maps and arrays; a tuple is one that is a key."""


def is_too_deep(plain: Any) -> bool:
    """Say whether data that was decoded has more levels than are allowed."""
    nests = [plain] if type(plain) in _NESTS else []
    for _ in range(MOST_LEVELS - 1):
        inner: list[Any] = []
        for nest in nests:
            if type(nest) is dict:
                inner += [value for value in nest.values() if type(value) in _NESTS]
                inner += [key for key in nest if type(key) is tuple]
            else:
                inner += [value for value in nest if type(value) in _NESTS]
        if not inner:
            return False
        nests = inner
    return any(nests)


def unstorable(value: Any) -> str | None:
    """Return why a value cannot be kept as JSON in Postgres, and read back as it was; None where it can."""
    if type(value) is bool or (type(value) is int and fits(value)):
        return None
    try:
        plain = msgspec.to_builtins(value, str_keys=True)
        msgspec.json.encode(plain)
    except REFUSALS as error:
        return str(error)
    for depth, level in enumerate(_levels(plain)):
        if depth >= MOST_LEVELS:
            return f"it is nested more than {MOST_LEVELS} levels deep"
        for item in level:
            if isinstance(item, (int, float)) and not fits(item):
                return "it holds a number that is too large, infinite or none at all (NaN)"
            if isinstance(item, str) and "\0" in item:
                return "it holds a NUL character, which cannot be stored"
    return None


_POSSIBLY_LARGE = re.compile(rb"[0-9]e[0-9]")
_POSSIBLY_TOO_LARGE = re.compile(r"[0-9]{19}")
_INTEGER_LIKE = 1e16
"""From here on, a float is written without a point, and jsonb takes it for a whole number."""


def stored_json(value: Any) -> str:
    """Return data as it is kept in a jsonb column, from which floats come back as floats."""
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
    """Return data of a jsonb column. A whole number that no message can carry was a float when it was written."""
    plain = msgspec.json.decode(text)
    return _without_giants(plain) if _POSSIBLY_TOO_LARGE.search(text) else plain


def _without_giants(plain: Any) -> Any:
    if isinstance(plain, int) and not fits(plain):
        return float(plain)
    if isinstance(plain, dict):
        return {key: _without_giants(value) for key, value in plain.items()}
    return [_without_giants(item) for item in plain] if isinstance(plain, list) else plain


def is_same(one: Any, other: Any) -> bool:
    """Say whether two pieces of decoded data are the same, types included: neither True nor 1.0 is 1."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        found = {(type(key), key): value for key, value in other.items()}
        return len(one) == len(found) and all(
            (type(key), key) in found and is_same(value, found[type(key), key]) for key, value in one.items()
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other or (one != one and other != other))  # two that are no numbers


def _levels(plain: Any) -> Iterator[list[Any]]:
    """Yield keys and values of each level, from the outermost in; never more than one level beyond those allowed."""
    level = [plain]
    for _ in range(MOST_LEVELS + 1):
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


def whole(pattern: str) -> str:
    """Return a pattern that only a whole text fits. msgspec searches, and `$` alone fits before a last line break."""
    return rf"^(?:{pattern})(?!\n)$"
