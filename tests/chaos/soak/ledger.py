"""What was enqueued, until it is seen to have succeeded. What is checked is forgotten, however long the soak."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

import psycopg2.extensions

_SLICE = 50_000
"""Ids that one statement looks for."""

_SUCCEEDED = """
SELECT id FROM orchestrator.{ended} WHERE id = ANY (%s::uuid[]) AND status = 'success'
"""
_STATES = """
SELECT coalesce(e.status, o.status, 'missing'), count(*)
  FROM unnest(%s::uuid[]) AS wanted(id)
  LEFT JOIN orchestrator.{ended} e USING (id) LEFT JOIN orchestrator.{open} o USING (id)
 WHERE coalesce(e.status, '') <> 'success' GROUP BY 1
"""


class Entry(NamedTuple):
    """One task or run whose enqueue returned."""

    at: float
    id: str


class Ledger:
    """The load appends in its thread; the sampler checks in another."""

    def __init__(self, *, ended: str, open: str) -> None:
        self._tables = {"ended": ended, "open": open}
        self._waiting: deque[Entry] = deque()
        self._late: deque[str] = deque()
        """Ids that had not succeeded when they were looked for."""
        self.count = 0

    def add(self, ids: Sequence[str]) -> None:
        now = time.monotonic()
        self._waiting.extend(Entry(now, identifier) for identifier in ids)
        self.count += len(ids)

    def check(self, cursor: psycopg2.extensions.cursor, *, age: float) -> None:
        """Look for what is older than this, and for some of what had not succeeded: the soak must not slow itself."""
        until = time.monotonic() - age
        due = [self._late.popleft() for _ in range(min(len(self._late), _SLICE))]
        while self._waiting and self._waiting[0].at <= until:
            due.append(self._waiting.popleft().id)
        self._look(cursor, due)

    def unfinished(self, cursor: psycopg2.extensions.cursor) -> Counter[str]:
        """Return, by state, how many did not succeed; what is nowhere is in state `missing`."""
        due = [*self._late, *(entry.id for entry in self._waiting)]
        self._late.clear()
        self._waiting.clear()
        self._look(cursor, due)
        cursor.execute(_STATES.format(**self._tables), [list(self._late)])
        return Counter(dict(cursor.fetchall()))

    def _look(self, cursor: psycopg2.extensions.cursor, due: Sequence[str]) -> None:
        found: set[str] = set()
        try:
            for start in range(0, len(due), _SLICE):
                cursor.execute(_SUCCEEDED.format(**self._tables), [due[start : start + _SLICE]])
                found.update(identifier for (identifier,) in cursor.fetchall())
        finally:  # an error of Postgres loses none
            self._late.extend(identifier for identifier in due if identifier not in found)
