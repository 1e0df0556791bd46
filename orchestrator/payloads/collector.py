"""Garbage collection of stored payloads that no row references.

An object is written before the row that references it, and deleted after it. So there may be objects without a row, but
no row without its object. Retention, and processes that die in between, leave such objects to the collector.

An object is deleted if all of these conditions hold:

- It is older than the grace period: its writer has committed by now, or never will.
- Its owner, a task or run, no longer exists and nothing else references its payloads. Or it is the result of an attempt
  of an existing task that has been retried since: no report of that attempt counts.
- Both were found a while ago, too. By now, a transaction has ended that may have copied the reference from a row while
  the row was deleted, and its writes are visible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from orchestrator.domain.executors.record import task_of
from orchestrator.payloads.stores import SHARDS, Store
from orchestrator.references import RESULT, ObjectName

_BATCH = 1_000
"""Objects checked or deleted at once."""
_MAX_FOUND = 100_000
"""Unreferenced objects found before the deletion starts."""

FOLDER = "executions"
"""The folder with one subfolder for each execution."""

Gone = Callable[[Sequence[bytes]], set[bytes]]
"""Returns the owners that no longer exist and whose payloads nothing else references."""
Attempts = Callable[[Sequence[bytes]], Mapping[bytes, int]]
"""Returns the last attempt of each task."""
Open = Callable[[Sequence[bytes]], set[bytes]]
"""Returns the tasks that are open."""


class Collector:
    """Scans a store part by part, and continues where the last scan stopped."""

    def __init__(self, store: Store, grace: float, gone: Gone, attempts: Attempts, *, most: int = _MAX_FOUND) -> None:
        self._store = store
        self._grace = grace
        self._gone = gone
        self._attempts = attempts
        self._max_found = most
        self._shard = 0
        self._unreferenced: list[ObjectName] = []
        """Objects that were unreferenced when they were checked."""

    def find_unreferenced(self) -> Iterator[int]:
        """Find unreferenced objects. Yields the number of objects checked after every batch."""
        for _ in range(len(SHARDS)):
            objects = self._store.listed(SHARDS[self._shard])
            old = (stored.name for stored in objects if stored.age > self._grace)
            while batch := list(islice(old, _BATCH)):
                self._unreferenced += self._unreferenced_of(batch)
                yield len(batch)
            self._shard = (self._shard + 1) % len(SHARDS)
            if len(self._unreferenced) >= self._max_found:
                return

    def delete(self) -> Iterator[int]:
        """Delete the objects found before that are still unreferenced. Yields the number deleted after every batch."""
        candidates, self._unreferenced = self._unreferenced, []
        for start in range(0, len(candidates), _BATCH):
            names = self._unreferenced_of(candidates[start : start + _BATCH])
            self._store.delete(names)
            yield len(names)

    @property
    def has_unreferenced(self) -> bool:
        """Whether there are objects to delete."""
        return bool(self._unreferenced)

    def _unreferenced_of(self, names: Sequence[ObjectName]) -> list[ObjectName]:
        gone = self._gone(list({name.owner for name in names}))
        kept_results = [name for name in names if name.owner not in gone and name.what == RESULT]
        last_attempts = self._attempts(list({name.task for name in kept_results})) if kept_results else {}
        superseded = {name for name in kept_results if name.attempt < last_attempts.get(name.task, 0)}
        return [name for name in names if name.owner in gone or name in superseded]


def collect_leftovers(store: Store, grace: float, are_open: Open) -> Iterator[int]:
    """Delete the folders of ended executions. Yields the number deleted after every batch.

    A container that runs for a task writes its status and output to a folder below `executions`
    (`workers/executors/left_outputs.py`). Its worker deletes the folder when the end is stored in Postgres, or when it
    has cancelled the work. The folder is left over if the worker was killed before, or the container wrote once more.

    A folder is deleted if nothing was written to it during the grace period, and its task is no longer open. While the
    task is open, the next worker that watches it may read the folder. No row references a folder, so no transaction
    can begin to reference it in the meantime.
    """
    old = ((name, task_of(name)) for name, age in store.folders(FOLDER) if age > grace)
    ours = ((name, task) for name, task in old if task is not None)  # other folders belong to somebody else
    while batch := dict(islice(ours, _BATCH)):
        open_tasks = are_open(list({*batch.values()}))
        ended = [name for name, task in batch.items() if task not in open_tasks]
        for name in ended:
            store.delete_folder(f"{FOLDER}/{name}")
        yield len(ended)
