"""Delete stored payloads that no row names any more, or never came to name.

An object is written before the row that names it, and deleted after it, so there may be objects without a row, and no
row without its object. A process that dies between the two leaves an object for the collector, and so does retention.

An object is deleted if all of this holds:

- it is older than the grace period: by then, its writer has committed, or never will;
- the task or run that it goes with is no more, and nobody else names its payloads; or it is the result of an attempt
  of a task that is there, and has been tried again since: no report of that attempt counts;
- the same was found a while before. A transaction that has copied a reference from a row that was deleted at that
  moment has ended by then, and what it has written is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from orchestrator.domain.executors.record import task_of
from orchestrator.payloads.stores import SHARDS, Store
from orchestrator.references import RESULT, ObjectName

_BATCH = 1_000
"""Objects that are asked about, or deleted, at once."""
_MOST = 100_000
"""Objects that are found before some are deleted."""

FOLDER = "executions"
"""Where executions have folders of their own."""

Gone = Callable[[Sequence[bytes]], set[bytes]]
"""Says which owners are no more, and have no keepers."""
Attempts = Callable[[Sequence[bytes]], Mapping[bytes, int]]
"""Says which attempt of tasks is the last."""
Open = Callable[[Sequence[bytes]], set[bytes]]
"""Says which tasks are open."""


class Collector:
    """Walks along a store, and goes on where it has stopped."""

    def __init__(self, store: Store, grace: float, gone: Gone, attempts: Attempts, *, most: int = _MOST) -> None:
        self._store = store
        self._grace = grace
        self._gone = gone
        self._attempts = attempts
        self._most = most
        self._shard = 0
        self._unnamed: list[ObjectName] = []
        """What nobody named when it was looked at."""

    def look(self) -> Iterator[int]:
        """Find what nobody names; yields after every batch how many objects were looked at."""
        for _ in range(len(SHARDS)):
            found = self._store.listed(SHARDS[self._shard])
            old = (one.name for one in found if one.age > self._grace)
            while batch := list(islice(old, _BATCH)):
                self._unnamed += self._unnamed_of(batch)
                yield len(batch)
            self._shard = (self._shard + 1) % len(SHARDS)
            if len(self._unnamed) >= self._most:
                return

    def delete(self) -> Iterator[int]:
        """Delete what was found so, and is so still; yields after every batch how many were deleted."""
        found, self._unnamed = self._unnamed, []
        for start in range(0, len(found), _BATCH):
            names = self._unnamed_of(found[start : start + _BATCH])
            self._store.delete(names)
            yield len(names)

    @property
    def has_found(self) -> bool:
        """Say whether there is something to delete."""
        return bool(self._unnamed)

    def _unnamed_of(self, names: Sequence[ObjectName]) -> list[ObjectName]:
        gone = self._gone(list({name.owner for name in names}))
        left = [name for name in names if name.owner not in gone and name.what == RESULT]
        last = self._attempts(list({name.task for name in left})) if left else {}
        given_up = {name for name in left if name.attempt < last.get(name.task, 0)}
        return [name for name in names if name.owner in gone or name in given_up]


def collect_leftovers(store: Store, grace: float, are_open: Open) -> Iterator[int]:
    """Delete the folders of executions that are over; yields after every batch how many were deleted.

    A container that runs for a task writes its status and its output into a folder of the execution, below `executions`
    (`workers/executors/left_outputs.py`). The worker that watches it deletes the folder when the end is in Postgres, or
    when it has cancelled the work. If that worker was killed in between, or the container wrote once more, it stays.

    A folder is deleted if nothing was written there during the grace period, and its task is not open: it has ended, or
    is no more. While a task is open, its next watcher may read the folder. Unlike a stored payload, no row names it, so
    no transaction could have begun to name it meanwhile.
    """
    old = ((name, task_of(name)) for name, age in store.folders(FOLDER) if age > grace)
    ours = ((name, task) for name, task in old if task is not None)  # whatever else stands there is somebody else's
    while batch := dict(islice(ours, _BATCH)):
        wanted = are_open(list({*batch.values()}))
        over = [name for name, task in batch.items() if task not in wanted]
        for name in over:
            store.delete_folder(f"{FOLDER}/{name}")
        yield len(over)
