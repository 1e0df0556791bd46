"""How far one walks through the files of the product to follow one thing, as calls are really made.

The walk has all calls that are given the thing, or return it, and those that lead there. A stay is a stretch of calls
in one file, and a return a stay in a file that was visited before. All files of the product count, but for those that
are only given the result of the whole tick.
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
_OF_ALL = ("TickResult", "Transaction")


@dataclass
class Walk:
    """The files that were entered, one after another."""

    calls: list[str] = field(default_factory=list)

    @property
    def stays(self) -> list[str]:
        return [file for place, file in enumerate(self.calls) if place == 0 or file != self.calls[place - 1]]

    @property
    def files(self) -> set[str]:
        return set(self.stays)

    @property
    def returns(self) -> int:
        return len(self.stays) - len(self.files)

    def __str__(self) -> str:
        return f"{len(self.files)} files, {len(self.stays)} stays, {self.returns} returns: {' → '.join(self.stays)}"


def marks_of(identifier: bytes) -> tuple[str, ...]:
    """Return the texts by which something with an id is known wherever it stands."""
    return repr(identifier)[2:-1], identifier.hex(), str(UUID(bytes=identifier))


@contextmanager
def following(*marks: str) -> Iterator[Walk]:
    """Follow something through what is called meanwhile, by texts that stand in whatever has it."""
    walk = Walk()
    calls: list[str] = []
    stack: list[tuple[FrameType, int]] = []
    on_the_way: set[int] = set()

    def has_it(value: Any) -> bool:
        return type(value).__name__ not in _OF_ALL and any(mark in repr(value) for mark in marks)

    def note(frame: FrameType, event: str, value: Any) -> None:
        file = _file(frame.f_code)
        if file is None or event not in ("call", "return"):
            return
        if event == "call":
            calls.append(file)
            stack.append((frame, len(calls) - 1))
            given = inspect.getargvalues(frame)
            names = [*given.args, *filter(None, (given.varargs, given.keywords))]
            found = any(has_it(given.locals.get(name)) for name in names if name != "self")
        else:
            found = has_it(value)
        if found:
            on_the_way.update(number for _, number in stack)
        if event == "return" and stack and stack[-1][0] is frame:
            stack.pop()

    sys.setprofile(note)
    try:
        yield walk
    finally:
        sys.setprofile(None)
        walk.calls = [file for number, file in enumerate(calls) if number in on_the_way]


@cache
def _file(code: CodeType) -> str | None:
    """Return the file of the product that a function stands in; None for other code, and for parts of a function."""
    path = Path(os.path.realpath(code.co_filename))
    if code.co_name.startswith("<") or not any(
        path.is_relative_to(ROOT / part) for part in ("orchestrator", "workers")
    ):
        return None
    return str(path.relative_to(ROOT)).removeprefix("orchestrator/")
