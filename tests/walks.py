"""How many product files a reader visits to follow one value through the code, measured on real calls.

A walk contains every call that receives or returns the value, and their callers. A stay is a series of calls in one
file; a return is a stay in a file visited before. Objects of a whole tick (`_TICK_TYPES`) do not count as the value.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from uuid import UUID

import orchestrator

ROOT = Path(orchestrator.__file__).parent.parent
_TICK_TYPES = ("TickResult", "Transaction")


@dataclass
class Walk:
    """The product files entered, in order."""

    calls: list[str] = field(default_factory=list)

    @property
    def stays(self) -> list[str]:
        return [file for index, file in enumerate(self.calls) if index == 0 or file != self.calls[index - 1]]

    @property
    def files(self) -> set[str]:
        return set(self.stays)

    @property
    def returns(self) -> int:
        return len(self.stays) - len(self.files)

    def __str__(self) -> str:
        return f"{len(self.files)} files, {len(self.stays)} stays, {self.returns} returns: {' → '.join(self.stays)}"


def marks_of(identifier: bytes) -> tuple[str, ...]:
    """Return the text forms of an id in `repr` output."""
    return repr(identifier)[2:-1], identifier.hex(), str(UUID(bytes=identifier))


@contextmanager
def following(*marks: str) -> Iterator[Walk]:
    """Follow a value through the calls within the block; `marks` are texts that its `repr` contains."""
    walk = Walk()
    calls: list[str] = []
    stack: list[tuple[FrameType, int]] = []
    on_path: set[int] = set()

    def has_value(value: Any) -> bool:
        return type(value).__name__ not in _TICK_TYPES and any(mark in repr(value) for mark in marks)

    def note(frame: FrameType, event: str, value: Any) -> None:
        file = _file(frame.f_code)
        if file is None or event not in ("call", "return"):
            return
        if event == "call":
            calls.append(file)
            stack.append((frame, len(calls) - 1))
            arguments = inspect.getargvalues(frame)
            names = [*arguments.args, *filter(None, (arguments.varargs, arguments.keywords))]
            found = any(has_value(arguments.locals.get(name)) for name in names if name != "self")
        else:
            found = has_value(value)
        if found:
            on_path.update(number for _, number in stack)
        if event == "return" and stack and stack[-1][0] is frame:
            stack.pop()

    sys.setprofile(note)
    try:
        yield walk
    finally:
        sys.setprofile(None)
        walk.calls = [file for number, file in enumerate(calls) if number in on_path]


@cache
def _file(code: CodeType) -> str | None:
    """Return the product file of a function; None for other code, and for lambdas and comprehensions."""
    path = Path(os.path.realpath(code.co_filename))
    if code.co_name.startswith("<") or not any(
        path.is_relative_to(ROOT / part) for part in ("orchestrator", "workers")
    ):
        return None
    return str(path.relative_to(ROOT)).removeprefix("orchestrator/")
