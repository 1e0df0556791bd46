"""Problems of a definition, of a DAG or of a flow: where, and in which words."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import msgspec

MOST_PROBLEMS = 100
"""Most problems in one report: looking for the nearest of thousands of names takes long."""

Path = tuple[str | int, ...]


class Problem(msgspec.Struct, frozen=True):
    """Something in a definition that cannot be accepted."""

    path: Path
    """Where, in the words of the file: `("tasks", "report", "depends_on", 0)`."""
    message: str


def first_problems(found: Iterable[Problem]) -> list[Problem]:
    """Return all problems; of very many, the first."""
    problems = list(islice(found, MOST_PROBLEMS + 1))
    if len(problems) > MOST_PROBLEMS:
        problems[-1] = Problem((), f"there is more that is wrong: these are the first {MOST_PROBLEMS}.")
    return problems


def shown(value: Any) -> str:
    """Return a value as it stands in a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
