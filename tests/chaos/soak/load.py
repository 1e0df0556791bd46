"""A steady load. What was committed is written down, and must have succeeded in the end."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from orchestrator import Handle, OrchestratorError
from orchestrator.sdk.dag.definitions import loads
from tests.chaos.soak import project

_MIX = {"plain": 70, "slow": 10, "flaky": 10, "later": 8, "run": 2}
"""Of a hundred enqueues."""
_TASKS_PER_ENQUEUE = sum(
    share * (project.TASKS_OF_A_RUN if kind == "run" else 1) for kind, share in _MIX.items()
) / sum(_MIX.values())


class Load:
    """Enqueues about `rate` tasks a second, one after another, in a thread of its own."""

    def __init__(self, rate: float, seed: int) -> None:
        self._pause = _TASKS_PER_ENQUEUE / rate
        self._random = random.Random(seed)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load")
        self.tasks: list[str] = []
        """Ids of standalone tasks whose enqueue returned."""
        self.runs: list[str] = []
        self.refused = 0
        """Enqueues that raised; whether they were committed is then unknown."""

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
            try:
                self._enqueue()
            except (OrchestratorError, SQLAlchemyError):
                self.refused += 1
                self._stopping.wait(0.1)
            # What could not be sent during an outage is not sent in a burst afterwards: the rate is what stays.
            due = max(due + self._pause, time.monotonic() - 1.0)

    def _enqueue(self) -> None:
        roll = self._random
        number = len(self.tasks)
        kind = roll.choices(list(_MIX), list(_MIX.values()))[0]
        if kind == "run":
            self.runs.append(project.app.workflows["soak"].start().id)
            return
        handle: Handle[Any]
        if kind == "slow":
            handle = project.slow.enqueue(roll.uniform(0.01, 0.5))
        elif kind == "flaky":
            handle = project.flaky.enqueue(number)
        elif kind == "later":
            handle = project.later.options(delay=roll.uniform(0.5, 5.0)).enqueue(number)
        else:
            handle = project.plain.enqueue(number)
        self.tasks.append(handle.id)
