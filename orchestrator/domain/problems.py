"""Problems in the definition of a DAG or a flow: the location and the message."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import msgspec

MAX_PROBLEMS = 100
"""Problems in one report, at most: finding similar names for thousands of names is slow."""

Path = tuple[str | int, ...]


class Problem(msgspec.Struct, frozen=True):
    """A reason why a definition is rejected."""

    path: Path
    """The location, in terms of the file: `("tasks", "report", "depends_on", 0)`."""
    message: str


def first_problems(all_problems: Iterable[Problem]) -> list[Problem]:
    """Return all problems, or the first `MAX_PROBLEMS` of them."""
    problems = list(islice(all_problems, MAX_PROBLEMS + 1))
    if len(problems) > MAX_PROBLEMS:
        problems[-1] = Problem((), f"there is more that is wrong: these are the first {MAX_PROBLEMS}.")
    return problems


def for_message(value: Any) -> str:
    """Return a value as text for a message, shortened if long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


# -- how each field of a definition is written in a file, for the file reader and for editors


class Key:
    """The type and documentation of a field that a file may contain. Fields without a `Key` cannot be set in files."""

    def __init__(self, kind: str, doc: str = "", **rules: Any) -> None:
        self.kind = kind
        """A name in `orchestrator.sdk.dag.fields.KINDS`, or `own` if the reader has a function for this field alone."""
        self.doc = doc
        self.rules = rules
        """Further JSON schema keywords of the value, such as `minimum`."""
