"""Redaction: hide fields of arguments and results whose names mark them as secret.

A pattern is a name, or several names joined by dots, and matches every path that ends with it: `password` at any depth,
`card.*` for the direct fields of a `card`. `*` and `?` are wildcards; case does not matter. A positional argument is
named by its index: `@0`.

A program may pass a secret on under another name. So the values of secret fields are also hidden wherever else they
occur. If there are too many values to search, everything is hidden.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase, translate
from functools import lru_cache
from typing import Any

HIDDEN = "•••"
_MIN_LENGTH = 4
"""Characters of the shortest secret that is searched for in texts. Shorter ones occur in every other word."""
_MAX_FIELDS = 50_000
"""Fields of a value that are searched for secrets, at most."""
_MAX_SECRETS = 1_000
"""Secrets in one value, at most: each displayed text is searched for all of them."""
_EVERYTHING = ("",)
"""The secrets of a value that could not be searched: the empty text makes `scrub` hide every text."""
_PLAIN = frozenset({str, int, float, bool, bytes, type(None)})
"""Types of values without fields."""
_Path = tuple[str, ...]


class Unsearchable(ValueError):
    """A value has too many fields or secrets to find all of them."""


class Redaction:
    """Hides fields whose names match patterns, and given values under any name."""

    __slots__ = ("_patterns", "_values", "is_whole")

    def __init__(self, patterns: Iterable[str] = (), values: Iterable[str] = (), *, is_whole: bool = False) -> None:
        self._patterns = tuple(tuple(part.lower() for part in pattern.split(".")) for pattern in patterns)
        self._values = tuple(sorted({*values}, key=len, reverse=True))
        self.is_whole = is_whole
        """Hide every value and show only the names of fields."""

    def __bool__(self) -> bool:
        return bool(self._patterns or self._values or self.is_whole)

    def redacted(self, value: Any) -> Any:
        """Return plain data with secrets hidden."""
        return self._shown(value, ()) if self else value

    def named(self, name: str, value: Any) -> Any:
        """Return the plain data of a named field with secrets hidden."""
        return self._field(value, (name.lower(),)) if self else value

    def text(self, text: str) -> str:
        """Return a text with secrets hidden."""
        return self._leaf(text) if text else text

    def redacted_call(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of a call with secrets hidden."""
        if not self:
            return list(arguments), dict(keywords)
        hidden = [self._field(argument, (f"@{index}",)) for index, argument in enumerate(arguments)]
        return hidden, self._shown(dict(keywords), ())

    def secrets(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the secret texts of a call, longest first. If the call is too large to search, all texts are."""
        try:
            return tuple(sorted(self.secrets_in(by_name(arguments, keywords)), key=len, reverse=True))
        except Unsearchable:
            return _EVERYTHING

    def secrets_in(self, value: Any) -> set[str]:
        """Return the secret texts in plain data, to be hidden elsewhere. Raises Unsearchable."""
        found: set[str] = set()
        matchers: dict[_Path, re.Pattern[str]] = {}
        todo: list[tuple[Any, _Path | None]] = [(value, ())] if self._patterns else []  # path None: the value is secret
        budget = _MAX_FIELDS
        while todo:
            value, path = todo.pop()
            if isinstance(value, (list, tuple)):
                if path is None or not {*map(type, value)} <= _PLAIN:  # long lists mostly hold numbers or texts
                    budget = _deduct(budget, len(value))
                    todo += [(item, path) for item in value]
            elif isinstance(value, (dict, Mapping)):
                budget = _deduct(budget, len(value))
                if path is None:
                    todo += [(field, None) for field in value.values()]
                    continue
                if path not in matchers:
                    matchers[path] = self._names_in(path)
                is_secret = matchers[path].match
                for name, field in value.items():
                    if is_secret(text := str(name).lower()):
                        todo.append((field, None))
                    elif type(field) not in _PLAIN:
                        todo.append((field, (*path, text)))
            elif path is None:
                found.update(_forms(value))
                _deduct(_MAX_SECRETS, len(found))
        return found

    def _shown(self, value: Any, path: _Path) -> Any:
        if isinstance(value, Mapping):
            return {
                scrub(name, self._values) if isinstance(name, str) else name: self._field(
                    field, (*path, str(name).lower())
                )
                for name, field in value.items()
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
        """Return a pattern for the secret names directly below a path."""
        return _any_of(frozenset(pattern[-1] for pattern in self._patterns if _ends_with(path, pattern[:-1])))


def _ends_with(path: _Path, pattern: _Path) -> bool:
    return len(path) >= len(pattern) and all(
        fnmatchcase(name, part) for name, part in zip(path[len(path) - len(pattern) :], pattern, strict=True)
    )


@lru_cache(maxsize=1024)
def _any_of(names: frozenset[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, names)) or "(?!)")


def _deduct(budget: int, count: int) -> int:
    if budget < count:
        raise Unsearchable(f"It has more than {_MAX_FIELDS:,} fields, or {_MAX_SECRETS:,} secrets.")
    return budget - count


def by_name(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name. A positional argument is named by its index, such as `@0`."""
    return {f"@{index}": argument for index, argument in enumerate(arguments)} | dict(keywords)


def _forms(value: Any) -> Iterator[str]:
    """Yield the texts in which a secret value may recur."""
    if value is not None and not isinstance(value, bool):
        text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
        yield from (form for form in {text, repr(text)[1:-1]} if len(form) >= _MIN_LENGTH)


def scrub(text: str, secrets: Sequence[str]) -> str:
    """Return a text with secrets replaced. The empty secret hides the whole text."""
    for secret in secrets:
        if not secret:
            return HIDDEN if text else text
        text = text.replace(secret, HIDDEN)
    return text


def inheritable_patterns(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the patterns that also apply to other tasks: all except those for positional arguments."""
    return tuple(pattern for pattern in patterns if not pattern.startswith("@"))


def mentions(patterns: Iterable[str], expression: str) -> bool:
    """Return whether an expression may read a field that matches the patterns."""
    parts = {part for pattern in patterns for part in pattern.lower().split(".") if part.strip("*")}
    identifiers = re.findall(r"[\w-]+", expression.lower())
    return any(fnmatchcase(word, part) for word in identifiers for part in parts)


@lru_cache(maxsize=256)
def split_patterns(text: str) -> tuple[str, ...]:
    """Split the setting `redact` into patterns. Commas or blanks separate them."""
    return tuple(re.findall(r"[^\s,]+", text))


def placed(patterns: Iterable[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return the patterns that match a function's positional arguments: `token` becomes `@0`."""
    matches: list[str] = []
    for pattern in patterns:
        first, dot, rest = pattern.partition(".")
        matches += (
            f"@{index}{dot}{rest}" for index, name in enumerate(names) if fnmatchcase(name.lower(), first.lower())
        )
    return tuple(dict.fromkeys(matches))
