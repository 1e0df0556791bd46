"""Where a listener stands: the id of the last event that it has got.

    12-1-9f86d081:1731720000000-0~1731719999000-2

is the generation of the stream of changes, the entry in it, and, for a task that has said something, the entry in its
log. The last event of all has the id `end`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from orchestrator.transport.changes import NOWHERE

END = "end"
_ENTRY = r"[0-9]{1,19}-[0-9]{1,19}"
_PLACE = re.compile(rf"([0-9a-z-]{{1,80}}):({_ENTRY})(?:~({_ENTRY}))?")


class Cursor(NamedTuple):
    """A place in the stream of changes, and in the log of a task."""

    generation: str
    entry: str
    log: str = NOWHERE

    def __str__(self) -> str:
        if self.entry == NOWHERE:
            return ""  # there is nothing to go on from
        return f"{self.generation}:{self.entry}" + (f"~{self.log}" if self.log != NOWHERE else "")


def parse(text: str) -> Cursor | None:
    """Return the place that an id tells, or None if it tells none."""
    found = _PLACE.fullmatch(text)
    return Cursor(found[1], found[2], found[3] or NOWHERE) if found else None
