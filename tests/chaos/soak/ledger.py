"""Tracks enqueued tasks and runs until they have succeeded. Checked ids are dropped, so that memory stays constant."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

import psycopg2.extensions

_BATCH = 50_000
"""Ids that one statement checks, at most."""

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
    """A task or run whose enqueue returned."""

    at: float
    id: str


class Ledger:
    """Ids to check. The load adds ids in its thread; the sampler checks them in another thread."""

    def __init__(self, *, ended: str, open: str) -> None:
        self._tables = {"ended": ended, "open": open}
        self._waiting: deque[Entry] = deque()
        self._late: deque[str] = deque()
        """Ids that had not succeeded at an earlier check."""
        self.count = 0

    def add(self, ids: Sequence[str]) -> None:
        now = time.monotonic()
        self._waiting.extend(Entry(now, identifier) for identifier in ids)
        self.count += len(ids)

    def check(self, cursor: psycopg2.extensions.cursor, *, age: float) -> None:
        """Check ids older than `age` seconds.

        Check only some of the earlier failures again, to keep the check cheap.
        """
        until = time.monotonic() - age
        due = [self._late.popleft() for _ in range(min(len(self._late), _BATCH))]
        while self._waiting and self._waiting[0].at <= until:
            due.append(self._waiting.popleft().id)
        self._check_batch(cursor, due)

    def unfinished(self, cursor: psycopg2.extensions.cursor) -> Counter[str]:
        """Return how many ids have not succeeded, by state; `missing` means that there is no row."""
        due = [*self._late, *(entry.id for entry in self._waiting)]
        self._late.clear()
        self._waiting.clear()
        self._check_batch(cursor, due)
        cursor.execute(_STATES.format(**self._tables), [list(self._late)])
        return Counter(dict(cursor.fetchall()))

    def _check_batch(self, cursor: psycopg2.extensions.cursor, due: Sequence[str]) -> None:
        found: set[str] = set()
        try:
            for start in range(0, len(due), _BATCH):
                cursor.execute(_SUCCEEDED.format(**self._tables), [due[start : start + _BATCH]])
                found.update(identifier for (identifier,) in cursor.fetchall())
        finally:  # also on an error of Postgres: keep the ids
            self._late.extend(identifier for identifier in due if identifier not in found)
