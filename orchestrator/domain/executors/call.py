"""The call of a task that is done outside the worker's own Python, and what a worker must have for it."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from orchestrator.domain.executors.record import Record

_ANNOUNCED = "@executor:"


class ExecutorCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which executor does a task, and how."""

    name: str
    options: dict[str, Any] = {}
    """Its `ExecutorOptions`, as plain data."""
    wants: str = ""
    """The requirement of a worker, where that is more than the executor itself: `process /usr/bin/convert`."""
    ends: Record | None = None
    """The execution of another task, which was cancelled: there is nothing to do but to end it."""

    @property
    def means(self) -> str:
        """The name that a worker that can do it announces, beside the names of its tasks, or a pattern that fits
        this."""
        return announced(self.wants or self.name)


def announced(wants: str) -> str:
    """Return how a worker says that it has an executor; `*` in it stands for any text without a slash."""
    return _ANNOUNCED + wants


def is_announced(name: str) -> bool:
    """Say whether what a worker knows is an executor, and no task."""
    return name.startswith(_ANNOUNCED)


def is_program(name: str) -> bool:
    """Say whether what a worker knows is a program of its machine, or a pattern for some."""
    return name.startswith(f"{_ANNOUNCED}process ")


def wanted(means: str) -> str:
    """Return what is announced, in the words of people."""
    return means.removeprefix(_ANNOUNCED)


def has_means(known: Iterable[str], means: str) -> bool:
    """Say whether one of the things that a worker announces is what a task needs."""
    return any(name == means or ("*" in name and is_announced(name) and _fits(means, name)) for name in known)


def is_one_of(program: str, pattern: str) -> bool:
    """Say whether a program is what a pattern means: `*` stands for any text without a slash; alone, for everything."""
    parts, named = program.split("/"), pattern.split("/")
    return pattern == "*" or (len(parts) == len(named) and all(map(fnmatchcase, parts, named)))


def _fits(means: str, pattern: str) -> bool:
    (executor, _, thing), (known, _, things) = wanted(means).partition(" "), wanted(pattern).partition(" ")
    return fnmatchcase(executor, known) and is_one_of(thing, things)
