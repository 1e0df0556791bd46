"""Plain data: what travels in messages and is kept in Postgres, within bounds that every reader can bear."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from orchestrator.domain.operators import fits

MOST_LEVELS = 200
"""How deeply data may be nested. What a shallow stack can still write, a deep one could no longer read."""

REFUSALS = (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError)
"""What a serialiser raises for values that it cannot take."""


_NESTS = frozenset((dict, list, tuple))
"""What a decoder makes of maps and arrays; a tuple is one that is a key."""


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
