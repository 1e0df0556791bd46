"""How much each part of a tick does, after a statement of it took too long.

A part that Postgres has ended for its time does a fraction of what it did, down to one row. If one row takes too long,
the part is left out for a while, and all others go on without it. When it works again it does more again, quickly up to
half of what was too much, and slowly beyond.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

_WHOLE = 1_024
_LESS = 32
"""By how much a part does less after a timeout."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
"""Seconds for which a part is left out that cannot do with one row."""


class Share:
    """How much is done at once: less after it was too much; then more again, fast up to half of that, slowly beyond."""

    def __init__(self, whole: int) -> None:
        self.whole = self.now = self._ceiling = whole

    def shrink(self, to: int) -> None:
        """Do less: it was too much."""
        self._ceiling, self.now = max(1, self.now // 2), max(1, to)

    def grow(self) -> None:
        """Do more: it was done in time."""
        self.now = min(self.whole, self.now + (self.now if self.now < self._ceiling else max(1, self.now // 16)))


@dataclass
class _SlowPart:
    share: Share = field(default_factory=lambda: Share(_WHOLE))
    pause: float = _FIRST_PAUSE
    out_until: float = 0.0
    statement: str = ""


class Parts:
    """Remembers the parts that took too long; it outlives ticks and the terms of the leader."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._slow: dict[str, _SlowPart] = {}
        self.on_timeout: Callable[[str], object] = lambda _: None
        """Called with the name of a statement that took too long."""

    def __bool__(self) -> bool:
        return bool(self._slow)

    def most(self, part: str, rows: int) -> int:
        """Return how many rows a part may work on, which usually works on so many."""
        slow = self._slow.get(part)
        return rows if slow is None else max(1, rows * slow.share.now // _WHOLE)

    def is_out(self, part: str) -> bool:
        """Say whether a part is left out for now."""
        slow = self._slow.get(part)
        return slow is not None and self._monotonic() < slow.out_until

    def timed_out(self, part: str, statement: str) -> None:
        """Take note that a statement of a part took too long."""
        slow = self._slow.setdefault(part, _SlowPart())
        slow.statement = statement
        if slow.share.now == 1:
            slow.out_until = self._monotonic() + slow.pause
            slow.pause = min(2 * slow.pause, _LONGEST_PAUSE)
        slow.share.shrink(slow.share.now // _LESS)
        self.on_timeout(statement)

    def worked(self, part: str) -> None:
        """Take note that a part has done its work in time."""
        slow = self._slow.get(part)
        if slow is None:
            return
        slow.pause = _FIRST_PAUSE
        slow.share.grow()
        if slow.share.now == _WHOLE:
            del self._slow[part]

    def describe(self) -> str | None:
        """Say in a sentence which parts do less than they should; None where none does."""
        if not self._slow:
            return None
        parts = ", ".join(f"{part!r} (statement {slow.statement})" for part, slow in self._slow.items())
        return (
            f"Statements of the scheduler take too long, and these parts do less, or wait: {parts}. All others go on. "
            f"It has asked Postgres for new statistics; if this lasts, look at the statement in pg_stat_activity."
        )
