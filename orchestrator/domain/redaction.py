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
from fnmatch import fnmatchcase, translate
from functools import lru_cache
from typing import Any

HIDDEN = "•••"
_SHORTEST = 4
"""Characters of a value that is looked for in texts: a shorter one stands in every other word."""
_MOST_SEARCHED = 50_000
"""Fields of a value that are searched for secrets."""
_MOST_SECRETS = 1_000
"""Secrets in one value: each text that is shown is searched for all of them."""
_EVERYTHING = ("",)
"""Stands for unknown secrets: `scrub` finds it in every text."""
_PLAIN = frozenset({str, int, float, bool, bytes, type(None)})
"""Types of values without fields."""
_Path = tuple[str, ...]


class Unsearchable(ValueError):
    """A value has too many fields, or too many secrets, to find them all."""


class Redaction:
    """Hidden fields by pattern, and hidden values, whatever their names."""

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
        """Return the texts that are secret in a call, the longest first; in one that has too much, every text is."""
        try:
            return tuple(sorted(self.secrets_in(by_name(arguments, keywords)), key=len, reverse=True))
        except Unsearchable:
            return _EVERYTHING

    def secrets_in(self, value: Any) -> set[str]:
        """Return the texts that are secret in plain data, to be looked for elsewhere; raises Unsearchable."""
        found: set[str] = set()
        known: dict[_Path, re.Pattern[str]] = {}
        todo: list[tuple[Any, _Path | None]] = [(value, ())] if self._patterns else []  # None: it is secret
        left = _MOST_SEARCHED
        while todo:
            value, path = todo.pop()
            if isinstance(value, (list, tuple)):
                if path is None or not {*map(type, value)} <= _PLAIN:  # a long list is most often of numbers, or texts
                    left = _less(left, len(value))
                    todo += [(item, path) for item in value]
            elif isinstance(value, (dict, Mapping)):
                left = _less(left, len(value))
                if path is None:
                    todo += [(held, None) for held in value.values()]
                    continue
                if path not in known:
                    known[path] = self._names_in(path)
                is_secret = known[path].match
                for name, held in value.items():
                    if is_secret(text := str(name).lower()):
                        todo.append((held, None))
                    elif type(held) not in _PLAIN:
                        todo.append((held, (*path, text)))
            elif path is None:
                found.update(_forms(value))
                _less(_MOST_SECRETS, len(found))
        return found

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

    def _is_secret(self, path: _Path) -> bool:
        return self._names_in(path[:-1]).match(path[-1]) is not None

    def _names_in(self, path: _Path) -> re.Pattern[str]:
        """Return which names are secret in what stands at a path."""
        return _any_of(frozenset(pattern[-1] for pattern in self._patterns if _ends_so(path, pattern[:-1])))


def _ends_so(path: _Path, pattern: _Path) -> bool:
    return len(path) >= len(pattern) and all(
        fnmatchcase(name, part) for name, part in zip(path[len(path) - len(pattern) :], pattern, strict=True)
    )


@lru_cache(maxsize=1024)
def _any_of(names: frozenset[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, names)) or "(?!)")


def _less(left: int, number: int) -> int:
    if left < number:
        raise Unsearchable(f"It has more than {_MOST_SEARCHED:,} fields, or {_MOST_SECRETS:,} secrets.")
    return left - number


def by_name(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name; one that is given without has its place for one."""
    return {f"@{place}": argument for place, argument in enumerate(arguments)} | dict(keywords)


def _forms(value: Any) -> Iterator[str]:
    """Yield what a secret looks like wherever it is repeated."""
    if value is not None and not isinstance(value, bool):
        text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
        yield from (form for form in {text, repr(text)[1:-1]} if len(form) >= _SHORTEST)


def scrub(text: str, secrets: Sequence[str]) -> str:
    """Return a text in which secrets are hidden; an empty one is in every text, and hides all of it."""
    for secret in secrets:
        if not secret:
            return HIDDEN if text else text
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
