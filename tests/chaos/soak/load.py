"""A steady load, which records every committed enqueue; all of these must succeed."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Collection
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from orchestrator import OrchestratorError, Task
from orchestrator.sdk.dag.definitions import loads
from tests.chaos.soak import project
from tests.chaos.soak.ledger import Ledger

MIX = {"plain": 70, "slow": 10, "flaky": 10, "later": 8, "run": 2}
"""Share of each kind, in percent of the enqueues."""
_MAX_SINGLE_RATE = 1_000
"""Tasks per second up to which each task is enqueued separately; above, bulk calls are used, `_CALLS` per second."""
_CALLS = 20
_SLOW = 0.5
"""Seconds of the slowest task, reduced if slow tasks would occupy more than `_SLOTS` slots."""
_SLOTS = 8


class Load:
    """Enqueues about `rate` tasks a second, in a thread."""

    def __init__(self, rate: float, seed: int, kinds: Collection[str] = tuple(MIX)) -> None:
        self._mix = {kind: share for kind, share in MIX.items() if kind in kinds}
        shares = sum(self._mix.values())
        tasks_each = 1 + (project.TASKS_OF_A_RUN - 1) * self._mix.get("run", 0) / shares
        self._batch = 1 if rate <= _MAX_SINGLE_RATE else round(rate / tasks_each / _CALLS)
        self._pause = self._batch * tasks_each / rate
        self._slow = min(_SLOW, 2 * _SLOTS / (rate * MIX["slow"] / shares))
        self._random = random.Random(seed)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load")
        self.tasks = Ledger(ended="ended_tasks", open="tasks")
        """Standalone tasks whose enqueue returned."""
        self.runs = Ledger(ended="runs", open="runs")
        self.refused = 0
        """Calls that raised an error; their enqueues may or may not have committed."""

    @property
    def enqueued(self) -> int:
        """Number of enqueued tasks, including those of runs."""
        return self.tasks.count + self.runs.count * project.TASKS_OF_A_RUN

    def start(self) -> None:
        project.app.workflows.apply(loads(project.DAG))
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        project.app.close()

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stopping.wait(max(0.0, due - time.monotonic())):
            drawn = self._random.choices(list(self._mix), list(self._mix.values()), k=self._batch)
            for kind, count in Counter(drawn).items():
                try:
                    self._enqueue(kind, count)
                except (OrchestratorError, SQLAlchemyError):
                    self.refused += 1
                    self._stopping.wait(0.1)
            # Enqueues missed during an outage are not caught up in a burst: the rate stays constant.
            due = max(due + self._pause, time.monotonic() - 1.0)

    def _enqueue(self, kind: str, count: int) -> None:
        if kind == "run":
            for _ in range(count):
                self.runs.add([project.app.workflows["soak"].start().id])
            return
        first = self.tasks.count
        numbers = range(first, first + count)
        task: Task[..., Any]
        calls: list[tuple[Any, ...]]
        if kind == "slow":
            task, calls = project.slow, [(self._random.uniform(0.01, self._slow),) for _ in numbers]
        elif kind == "later":
            task, calls = project.later.options(delay=self._random.uniform(0.5, 5.0)), [(number,) for number in numbers]
        else:
            task, calls = getattr(project, kind), [(number,) for number in numbers]
        handles = [task.enqueue(*calls[0])] if count == 1 else project.app.enqueue_many(task, calls)
        self.tasks.add([handle.id for handle in handles])
