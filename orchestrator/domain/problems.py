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


# -- how the fields of a definition are written in a file. It stands beside each field, for the reader and for editors


class Key:
    """A field that a file can say: what kind of value it holds, and what it means. Others are not for files."""

    def __init__(self, kind: str, doc: str = "", **rules: Any) -> None:
        self.kind = kind
        """A name in `orchestrator.sdk.dag.fields.KINDS`, or `own` where the reader has one for this field alone."""
        self.doc = doc
        self.rules = rules
        """What else the JSON schema says of the value, such as `minimum`."""
