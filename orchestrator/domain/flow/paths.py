"""Paths into the data of a run: `$params.order.lines[0].price`, `$shared.total`, `$input`.

A path without a root belongs to the shared state. A missing value is null.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

from orchestrator.errors import ExpressionError

ROOTS = ("params", "shared", "input")
_ROOT = re.compile(r"\$(\w*)")
_PART = re.compile(r"(?:^|\.)([^.\[\]]+)|\[(\d{1,9})\]")
_MAX_LENGTH = 1_000


class Path(NamedTuple):
    """A root, and the keys and indexes below it."""

    root: str
    parts: tuple[str | int, ...]

    @property
    def key(self) -> str:
        """The path as text without its root. A signal for this path has it as its key."""
        return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.parts).lstrip(".")


class Names(NamedTuple):
    """The data that paths refer to."""

    params: Any
    shared: Any
    input: Any = None


@lru_cache(maxsize=4_096)
def parse(text: str, root: str = "shared") -> Path:
    """Parse a path, or raise ExpressionError. Cached, because all runs use the same paths."""
    if len(text) > _MAX_LENGTH:
        raise ExpressionError(f"A path has at most {_MAX_LENGTH:,} characters; found {len(text):,}.")
    rest = text
    root_match = _ROOT.match(text)
    if root_match is not None:
        root, rest = root_match[1], text[root_match.end() :]
        if root not in ROOTS:
            raise ExpressionError(f"Path {text!r} begins with none of $params, $shared and $input.")
        if rest and rest[0] not in ".[":
            raise ExpressionError(f"Path {text!r} cannot be read after ${root}: expected `.name` or `[0]`.")
    parts: list[str | int] = []
    offset = 0
    if rest == "." or rest.startswith(".."):
        raise ExpressionError(f"Path {text!r} cannot be read at {rest[:40]!r}: expected `.name` or `[0]`.")
    rest = rest.removeprefix(".")
    while offset < len(rest):
        part = _PART.match(rest, offset)
        if part is None or (offset and part[1] is not None and rest[offset] != "."):
            raise ExpressionError(f"Path {text!r} cannot be read at {rest[offset:][:40]!r}: expected `.name` or `[0]`.")
        parts.append(part[1] if part[1] is not None else int(part[2]))
        offset = part.end()
    if root_match is None and not parts:
        raise ExpressionError(f"Path {text!r} is empty: expected something like `$shared.name`.")
    return Path(root, tuple(parts))


def look_up(value: Any, parts: tuple[str | int, ...]) -> Any:
    """Return the value at a path below `value`, or None."""
    for part in parts:
        if isinstance(part, int):
            if not isinstance(value, list) or part >= len(value):
                return None
            value = value[part]
        else:
            if not isinstance(value, dict):
                return None
            value = value.get(part)
    return value


def resolve(path: Path, names: Names) -> Any:
    return look_up(getattr(names, path.root), path.parts)


def find(text: str, names: Names) -> Any:
    """Return the value at a path."""
    return resolve(parse(text), names)


def part_of(value: Any, text: str) -> Any:
    """Return the part of a value at a path within it."""
    return look_up(value, parse(text).parts) if text else value


def write(shared: dict[str, Any], text: str, value: Any) -> None:
    """Write a value to the shared state, or raise ExpressionError if it cannot be written there.

    `a.b` is the key `b` of the mapping `a`, which is created if missing. `a[1]` is an existing item of the list `a`.
    """
    first, *rest = parse(text).parts or ("",)
    if isinstance(first, int):
        raise ExpressionError(f"Path {text!r} cannot be written: the shared state is a mapping, which has no items.")
    shared[first] = _written(shared.get(first), tuple(rest), value, Path("shared", (first,)), text)


def _written(container: Any, rest: tuple[str | int, ...], value: Any, above: Path, text: str) -> Any:
    """Return a copy of `held` with the value in it. It is copied because parameters or other results may share it."""
    if not rest:
        return value
    part, below = rest[0], rest[1:]
    path = Path(above.root, (*above.parts, part))
    if isinstance(part, int):
        if not isinstance(container, list):
            raise ExpressionError(f"Path {text!r} cannot be written: {above.key!r} is {_kind(container)}, and no list.")
        if part >= len(container):
            raise ExpressionError(f"Path {text!r} cannot be written: {above.key!r} has {len(container):,} items.")
        return [*container[:part], _written(container[part], below, value, path, text), *container[part + 1 :]]
    if container is not None and not isinstance(container, dict):
        raise ExpressionError(f"Path {text!r} cannot be written: {above.key!r} is {_kind(container)}, and no mapping.")
    mapping = {} if container is None else container
    return {**mapping, part: _written(mapping.get(part), below, value, path, text)}


def _kind(value: Any) -> str:
    if value is None:
        return "not there"
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list", dict: "a mapping"}
    return kinds.get(type(value), type(value).__name__)
