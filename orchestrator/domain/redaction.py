"""What is not shown: fields of arguments and results whose names say that they are secret.

A pattern is a name, or names with dots between, and holds wherever a path ends so: `password` at any depth, `card.*`
for all that stands directly in a `card`. `*` and `?` are wildcards, and capitals do not matter. An argument without a
name has its place for one: `@0`.

A secret that is handed on may get another name. So values that are known to be secret are hidden wherever they stand;
and where not all of them can be known, everything is.
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
    """What is not shown: fields that patterns name, and values, whatever they are called."""

    __slots__ = ("_patterns", "_values", "is_whole")

    def __init__(self, patterns: Iterable[str] = (), values: Iterable[str] = (), *, is_whole: bool = False) -> None:
        self._patterns = tuple(tuple(part.lower() for part in pattern.split(".")) for pattern in patterns)
        self._values = tuple(sorted({*values}, key=len, reverse=True))
        self.is_whole = is_whole
        """Every value is hidden, and only the names of fields are shown."""

    def __bool__(self) -> bool:
        return bool(self._patterns or self._values or self.is_whole)

    def shown(self, value: Any) -> Any:
        """Return plain data with what is secret hidden."""
        return self._shown(value, ()) if self else value

    def named(self, name: str, value: Any) -> Any:
        """Return plain data that stands under a name, with what is secret hidden."""
        return self._field(value, (name.lower(),)) if self else value

    def text(self, text: str) -> str:
        """Return a text with what is secret hidden."""
        return self._leaf(text) if text else text

    def call_shown(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of a call with what is secret hidden."""
        if not self:
            return list(arguments), dict(keywords)
        hidden = [self._field(argument, (f"@{place}",)) for place, argument in enumerate(arguments)]
        return hidden, self._shown(dict(keywords), ())

    def secrets(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the texts that are secret in a call, the longest first, to be looked for elsewhere."""
        if not self._patterns:
            return ()
        places = {f"@{place}": argument for place, argument in enumerate(arguments)}
        return tuple(sorted(set(self._find(places | dict(keywords), ())), key=len, reverse=True))

    def secrets_in(self, value: Any) -> Iterator[str]:
        """Yield the texts that are secret in plain data."""
        return self._find(value, ())

    def _shown(self, value: Any, path: _Path) -> Any:
        if isinstance(value, Mapping):
            return {
                scrub(name, self._values) if isinstance(name, str) else name: self._field(
                    held, (*path, str(name).lower())
                )
                for name, held in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self._shown(item, path) for item in value]
        return self._leaf(value)

    def _leaf(self, value: Any) -> Any:
        if value is None or not (self._values or self.is_whole):
            return value
        if isinstance(value, str) and not self.is_whole:
            return scrub(value, self._values)
        if isinstance(value, bytes) and not self.is_whole:
            return HIDDEN if any(secret.encode() in value for secret in self._values) else value
        return HIDDEN if self.is_whole or str(value) in self._values else value

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


def handed_on(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the patterns that hold for others, too: not those of arguments without names, which others do not have."""
    return tuple(pattern for pattern in patterns if not pattern.startswith("@"))


def mentions(patterns: Iterable[str], expression: str) -> bool:
    """Say whether an expression may ask for a field that patterns name."""
    parts = {part for pattern in patterns for part in pattern.lower().split(".") if part.strip("*")}
    found = re.findall(r"[\w-]+", expression.lower())
    return any(fnmatchcase(word, part) for word in found for part in parts)


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
