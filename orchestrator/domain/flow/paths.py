"""Paths into the data of a run: `$params.order.lines[0].price`, `$shared.total`, `$input`.

Without a root, a path is one of the shared state. What does not stand there is null.
"""

from __future__ import annotations

import re
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
    """What paths lead into."""

    params: Any
    shared: Any
    input: Any = None


def parse(text: str, root: str = "shared") -> Path:
    """Return a path, or say what is wrong with it."""
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
    """Return what a path leads to."""
    return look_up(getattr(names, path.root), path.parts)


def find(text: str, names: Names) -> Any:
    """Return what the path of a text leads to."""
    return resolve(parse(text), names)


def part_of(value: Any, text: str) -> Any:
    """Return a part of a value, by the way to it."""
    return look_up(value, parse(text).parts) if text else value


def write(shared: dict[str, Any], text: str, value: Any) -> None:
    """Put a value into the shared state; `a.b` is `b` of the mapping `a`, which is made if there is none."""
    *above, last = parse(text).parts or ("",)
    place = shared
    for part in above:
        inner = place.get(str(part))
        # A copy, because the parameters or another result may hold the same mapping.
        copy = {**inner} if isinstance(inner, dict) else {}
        place[str(part)] = copy
        place = copy
    place[str(last)] = value
