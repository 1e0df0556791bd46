"""A client that submits work during the faults, and records every enqueue that returned."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import psycopg2

from orchestrator import Handle, RunHandle, WorkflowHandle
from tests.chaos.real.arena import Arena
from tests.chaos.real.clockwork import Clockwork
from tests.chaos.real.journal import append
from tests.chaos.real.loads import LOADS
from tests.chaos.real.loads.runs import workflow
from tests.chaos.real.outsider import Outsider
from tests.chaos.real.project import app
from tests.chaos.real.project.flows import FLOW
from tests.chaos.real.puller import Puller
from tests.chaos.real.visitor import Visitor
from tests.chaos.real.weather import is_weather

Cancellable = Handle[Any] | RunHandle[Any] | WorkflowHandle[Any]
MAX_OPEN_TASKS = 1_500
"""Open tasks above which the client waits."""


class Client:
    """Submits work in a thread, and records every enqueue that returned."""

    def __init__(self, arena: Arena, seed: int, rate: float, loads: Sequence[str] = ()) -> None:
        self._arena = arena
        self._pause = 1.0 / rate
        self._loads = [(LOADS[name][0], LOADS[name][1] or 1) for name in loads] or list(LOADS.values())
        self._has_visitor = not loads
        self.random = Random(f"{seed} load")
        self.tasks: list[Handle[Any]] = []
        self.runs: list[RunHandle[Any]] = []
        self.journeys: list[WorkflowHandle[Any]] = []
        self.slow_to_stop: Handle[Any] | None = None
        """The last enqueued task of the load `reconsidered`, which cancels it before the next."""
        self.counts: Counter[str] = Counter()
        """Submissions by kind; `refused` counts errors, after which the enqueue may or may not have committed."""
        self.open = 0
        self.violations: list[str] = []
        """Errors that no caller may ever get."""
        self._outsider = Outsider(arena, seed)
        self._visitor = Visitor(arena, seed)
        self._puller = Puller(arena, seed)
        self._clockwork = Clockwork(arena)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="client", daemon=True)

    def committed(self, handle: Handle[Any]) -> None:
        """Record that the enqueue of a task returned."""
        append(self._arena.journal.commit_log, "task", handle.id)

    def enqueued(self, handle: Handle[Any]) -> None:
        """Record that the enqueue of a task returned; the task may be cancelled later."""
        self.committed(handle)
        self.tasks.append(handle)

    def begun(self, run: RunHandle[Any] | WorkflowHandle[Any]) -> None:
        """Record that the start of a run returned."""
        append(self._arena.journal.commit_log, "run", run.id)

    def started(self, run: RunHandle[Any]) -> None:
        """Record that the start of a run returned; the run may be cancelled later."""
        self.begun(run)
        self.runs.append(run)

    def set_out(self, run: WorkflowHandle[Any], width: int) -> None:
        """Record that the start of a journey returned, and the number of its parallel steps."""
        self.begun(run)
        append(self._arena.journal.commit_log, "journey", run.id, width)
        self.journeys.append(run)

    def go_round(self, run: WorkflowHandle[Any]) -> None:
        """Record that the start of a workflow returned; the run may be cancelled later."""
        self.begun(run)
        self.journeys.append(run)

    def cancelling(self, handle: Cancellable) -> None:
        """Record that a task or run is about to be cancelled."""
        append(self._arena.journal.commit_log, "cancel", handle.id)

    def start(self) -> None:
        app.close()
        app._client._settings = self._arena.settings
        app.workflows.apply(workflow())
        app.flows.publish("errands", FLOW)
        self._clockwork.create_schedules()
        self._thread.start()
        self._outsider.start()
        self._puller.start()
        if self._has_visitor:
            self._visitor.start()

    def stop(self) -> None:
        """Stop submitting. Messages to waiting runs continue until `close`."""
        self._stopping.set()
        self._visitor.stop()
        self._outsider.hurry()
        if self._thread.is_alive():
            self._thread.join()

    def wind_down(self) -> None:
        """When everything is healed: pause the schedules once all due fires have happened."""
        self.violations += self._clockwork.pause_schedules()

    def close(self) -> None:
        """Stop all threads; call this when everything is at rest."""
        self.stop()
        self._outsider.stop()
        self._visitor.close()
        self._puller.close()
        for helper in (self._outsider, self._visitor, self._puller):
            self.violations += helper.violations
            self.counts += helper.counts
        app.close()
        app._client._settings = None

    def _run(self) -> None:
        kinds, weights = zip(*self._loads, strict=True)
        counted_at = 0.0
        while not self._stopping.wait(self._pause):
            try:
                if time.monotonic() - counted_at > 1.0:
                    self._count_open()
                    counted_at = time.monotonic()
                if self.open < MAX_OPEN_TASKS:
                    kind = self.random.choices(kinds, weights)[0]
                    kind(self)
                    self.counts[kind.__name__] += 1
            except Exception as error:  # noqa: BLE001  # any error not caused by an outage is a defect
                if is_weather(error):
                    self.counts["refused"] += 1
                else:
                    self.violations.append(f"the client was told {type(error).__name__}: {error}")

    def _count_open(self) -> None:
        try:
            self.open = self._arena.sql("SELECT count(*) AS open FROM orchestrator.tasks")[0]["open"]
        except psycopg2.OperationalError:
            return  # Postgres is down: keep the last count
