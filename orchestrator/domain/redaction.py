"""What is not shown: fields of arguments and results whose names say that they are secret.

A pattern is a name, or names with dots between, and holds wherever a path ends so: `password` at any depth, `card.*`
for all that stands directly in a `card`. `*` and `?` are wildcards, and capitals do not matter. An argument without a
name has its place for one: `@0`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

HIDDEN = "•••"
_SHORTEST = 4
"""Characters of a value that is looked for in texts: a shorter one stands in every other word."""
_Path = tuple[str, ...]


class Redaction:
    """Patterns of what is not shown."""

    __slots__ = ("_patterns",)

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        self._patterns = tuple(tuple(part.lower() for part in pattern.split(".")) for pattern in patterns)

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def shown(self, value: Any) -> Any:
        """Return plain data with what is secret hidden."""
        return self._shown(value, ()) if self._patterns else value

    def call_shown(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of a call with what is secret hidden."""
        if not self._patterns:
            return list(arguments), dict(keywords)
        hidden = [self._field(argument, (f"@{place}",)) for place, argument in enumerate(arguments)]
        return hidden, self._shown(dict(keywords), ())

    def secrets(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the texts that are secret in a call, the longest first, to be looked for elsewhere."""
        if not self._patterns:
            return ()
        places = {f"@{place}": argument for place, argument in enumerate(arguments)}
        return tuple(sorted(set(self._find(places | dict(keywords), ())), key=len, reverse=True))

    def _shown(self, value: Any, path: _Path) -> Any:
        if isinstance(value, Mapping):
            return {name: self._field(held, (*path, str(name).lower())) for name, held in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._shown(item, path) for item in value]
        return value

    def _field(self, value: Any, path: _Path) -> Any:
        return HIDDEN if self._is_secret(path) and value is not None else self._shown(value, path)

    def _find(self, value: Any, path: _Path) -> Iterator[str]:
        if isinstance(value, Mapping):
            for name, held in value.items():
                inside = (*path, str(name).lower())
                yield from _texts(held) if self._is_secret(inside) else self._find(held, inside)
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from self._find(item, path)

    def _is_secret(self, path: _Path) -> bool:
        return any(_ends_so(path, pattern) for pattern in self._patterns)


def _ends_so(path: _Path, pattern: _Path) -> bool:
    return len(path) >= len(pattern) and all(
        fnmatchcase(name, part) for name, part in zip(path[-len(pattern) :], pattern, strict=True)
    )


def _texts(value: Any) -> Iterator[str]:
    """Yield what a secret looks like wherever it is repeated."""
    if isinstance(value, Mapping):
        for held in value.values():
            yield from _texts(held)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)
    elif value is not None and not isinstance(value, bool):
        text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
        for form in {text, repr(text)[1:-1]}:
            if len(form) >= _SHORTEST:
                yield form


def scrub(text: str, secrets: Sequence[str]) -> str:
    """Return a text in which secrets are hidden."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return text


@lru_cache(maxsize=256)
def words(text: str) -> tuple[str, ...]:
    """Return the patterns in a setting, which has commas or blanks between them."""
    return tuple(re.findall(r"[^\s,]+", text))


def placed(patterns: Iterable[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return what patterns mean for a function's arguments that are given without their names: `token` is `@0`."""
    found: list[str] = []
    for pattern in patterns:
        first, dot, rest = pattern.partition(".")
        found += (
            f"@{place}{dot}{rest}" for place, name in enumerate(names) if fnmatchcase(name.lower(), first.lower())
        )
    return tuple(dict.fromkeys(found))
