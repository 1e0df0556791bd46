"""Paths into the data of a run: `$params.order.lines[0].price`, `$shared.total`, `$input`.

Without a root, a path is one of the shared state. What does not stand there is null.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

from orchestrator.errors import ExpressionError

ROOTS = ("params", "shared", "input")
_ROOT = re.compile(r"\$(\w*)")
_PART = re.compile(r"(?:^|\.)([^.\[\]]+)|\[(\d{1,9})\]")
_LONGEST = 1_000


class Path(NamedTuple):
    """A root, and the way from there."""

    root: str
    parts: tuple[str | int, ...]

    @property
    def key(self) -> str:
        """Return the way as text, without its root: what a signal is called that is looked for here."""
        return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.parts).lstrip(".")


class Names(NamedTuple):
    """The data that paths lead into."""

    params: Any
    shared: Any
    input: Any = None


@lru_cache(maxsize=4_096)
def parse(text: str, root: str = "shared") -> Path:
    """Return a path, or say what is wrong with it. Every step of every run reads the same ones."""
    if len(text) > _LONGEST:
        raise ExpressionError(f"A path has at most {_LONGEST:,} characters; found {len(text):,}.")
    rest = text
    found = _ROOT.match(text)
    if found is not None:
        root, rest = found[1], text[found.end() :]
        if root not in ROOTS:
            raise ExpressionError(f"Path {text!r} begins with none of $params, $shared and $input.")
        if rest and rest[0] not in ".[":
            raise ExpressionError(f"Path {text!r} cannot be read after ${root}: expected `.name` or `[0]`.")
    parts: list[str | int] = []
    place = 0
    if rest == "." or rest.startswith(".."):
        raise ExpressionError(f"Path {text!r} cannot be read at {rest[:40]!r}: expected `.name` or `[0]`.")
    rest = rest.removeprefix(".")
    while place < len(rest):
        part = _PART.match(rest, place)
        if part is None or (place and part[1] is not None and rest[place] != "."):
            raise ExpressionError(f"Path {text!r} cannot be read at {rest[place:][:40]!r}: expected `.name` or `[0]`.")
        parts.append(part[1] if part[1] is not None else int(part[2]))
        place = part.end()
    if found is None and not parts:
        raise ExpressionError(f"Path {text!r} is empty: expected something like `$shared.name`.")
    return Path(root, tuple(parts))


def look_up(value: Any, parts: tuple[str | int, ...]) -> Any:
    """Return what stands at the end of a way; None where it leads nowhere."""
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
    """Return what the path of a text leads to."""
    return resolve(parse(text), names)


def part_of(value: Any, text: str) -> Any:
    """Return a part of a value, by the way to it."""
    return look_up(value, parse(text).parts) if text else value


def write(shared: dict[str, Any], text: str, value: Any) -> None:
    """Put a value into the shared state, or say why it cannot stand there.

    `a.b` is `b` of the mapping `a`, which is made if there is none; `a[1]` is an item that the list `a` has.
    """
    first, *rest = parse(text).parts or ("",)
    if isinstance(first, int):
        raise ExpressionError(f"Path {text!r} cannot be written: the shared state is a mapping, which has no items.")
    shared[first] = _written(shared.get(first), tuple(rest), value, Path("shared", (first,)), text)


def _written(held: Any, rest: tuple[str | int, ...], value: Any, above: Path, text: str) -> Any:
    """Return what is held with a value in it. It is a copy, because parameters or another result may hold the same."""
    if not rest:
        return value
    part, below = rest[0], rest[1:]
    at = Path(above.root, (*above.parts, part))
    if isinstance(part, int):
        if not isinstance(held, list):
            raise ExpressionError(f"Path {text!r} cannot be written: {above.key!r} is {_kind(held)}, and no list.")
        if part >= len(held):
            raise ExpressionError(f"Path {text!r} cannot be written: {above.key!r} has {len(held):,} items.")
        return [*held[:part], _written(held[part], below, value, at, text), *held[part + 1 :]]
    if held is not None and not isinstance(held, dict):
        raise ExpressionError(f"Path {text!r} cannot be written: {above.key!r} is {_kind(held)}, and no mapping.")
    found = {} if held is None else held
    return {**found, part: _written(found.get(part), below, value, at, text)}


def _kind(value: Any) -> str:
    if value is None:
        return "not there"
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list", dict: "a mapping"}
    return kinds.get(type(value), type(value).__name__)
