"""Delete what executions have left in a payload store, and nobody will read any more.

A container that runs for a task writes its status and its output into a folder of the execution, below `executions`
(`workers/executors/left_outputs.py`). The worker that watches it deletes the folder when the end is in Postgres, or
when it has cancelled the work. Where that worker was killed in between, or the container wrote once more, it stays.

A folder is deleted if nothing was written there during the grace period, and its task is not open: it has ended, or is
no more. While a task is open, whoever watches it next may read the folder. Unlike a stored payload, it is named by no
row, so there is nobody who could have begun to name it meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from uuid import UUID

from orchestrator.payloads.stores import Store

FOLDER = "executions"
_NAME = re.compile(r"task-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}-\d{1,10}")
"""What `domain/executors/record.py` calls executions; whatever else stands there is somebody else's."""
_BATCH = 1_000

Open = Callable[[Sequence[bytes]], set[bytes]]
"""Says which tasks are open."""


def collect_leftovers(store: Store, grace: float, are_open: Open) -> Iterator[int]:
    """Delete the folders of executions that are over; yields after every batch how many were deleted."""
    old = (name for name, age in store.folders(FOLDER) if age > grace and _NAME.fullmatch(name))
    while batch := {name: _task(name) for name in islice(old, _BATCH)}:
        wanted = are_open(list({*batch.values()}))
        over = [name for name, task in batch.items() if task not in wanted]
        for name in over:
            store.delete_folder(f"{FOLDER}/{name}")
        yield len(over)


def _task(name: str) -> bytes:
    """Return the id of the task that an execution of that name is of."""
    return UUID(name.removeprefix("task-").rpartition("-")[0]).bytes
