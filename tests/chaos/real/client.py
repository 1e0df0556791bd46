"""A client that submits work while everything breaks, and writes down every enqueue that committed."""

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
MOST_OPEN = 1_500
"""Tasks; a client that is this far ahead waits."""


class Client:
    """Submits work, in a thread, and writes down every enqueue that committed."""

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
        """The last of the tasks that are cancelled for the next one of their kind."""
        self.counts: Counter[str] = Counter()
        """How often each kind was submitted; `refused` raised, and may or may not have committed."""
        self.open = 0
        self.violations: list[str] = []
        """What no caller should ever see."""
        self._outsider = Outsider(arena, seed)
        self._visitor = Visitor(arena, seed)
        self._puller = Puller(arena, seed)
        self._clockwork = Clockwork(arena)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="client", daemon=True)

    def committed(self, handle: Handle[Any]) -> None:
        """Write down that this enqueue returned."""
        append(self._arena.journal.commit_log, "task", handle.id)

    def enqueued(self, handle: Handle[Any]) -> None:
        """Write it down; the task may be cancelled later."""
        self.committed(handle)
        self.tasks.append(handle)

    def begun(self, run: RunHandle[Any] | WorkflowHandle[Any]) -> None:
        """Write down that this start returned."""
        append(self._arena.journal.commit_log, "run", run.id)

    def started(self, run: RunHandle[Any]) -> None:
        """Write it down; the run may be cancelled later."""
        self.begun(run)
        self.runs.append(run)

    def set_out(self, run: WorkflowHandle[Any], width: int) -> None:
        """Write down that this start returned, and how many steps the run is to take side by side."""
        self.begun(run)
        append(self._arena.journal.commit_log, "journey", run.id, width)
        self.journeys.append(run)

    def go_round(self, run: WorkflowHandle[Any]) -> None:
        """Write down that this start returned; the run may be cancelled later."""
        self.begun(run)
        self.journeys.append(run)

    def cancelling(self, handle: Cancellable) -> None:
        """Write down that this is about to be cancelled."""
        append(self._arena.journal.commit_log, "cancel", handle.id)

    def start(self) -> None:
        app.close()
        app._client._settings = self._arena.settings
        app.workflows.apply(workflow())
        app.flows.publish("errands", FLOW)
        self._clockwork.wind_up()
        self._thread.start()
        self._outsider.start()
        self._puller.start()
        if self._has_visitor:
            self._visitor.start()

    def stop(self) -> None:
        """Submit no more. What was begun is still talked to, until `close`."""
        self._stopping.set()
        self._visitor.stop()
        self._outsider.hurry()
        if self._thread.is_alive():
            self._thread.join()

    def wind_down(self) -> None:
        """Once everything is healed: let schedules fire what they owe, and then no more."""
        self.violations += self._clockwork.wind_down()

    def close(self) -> None:
        """End, when everything is at rest."""
        self.stop()
        self._outsider.stop()
        self._visitor.close()
        self._puller.close()
        for other in (self._outsider, self._visitor, self._puller):
            self.violations += other.violations
            self.counts += other.counts
        app.close()
        app._client._settings = None

    def _run(self) -> None:
        kinds, weights = zip(*self._loads, strict=True)
        looked_at = 0.0
        while not self._stopping.wait(self._pause):
            try:
                if time.monotonic() - looked_at > 1.0:
                    self._count_open()
                    looked_at = time.monotonic()
                if self.open < MOST_OPEN:
                    kind = self.random.choices(kinds, weights)[0]
                    kind(self)
                    self.counts[kind.__name__] += 1
            except Exception as error:  # noqa: BLE001  # whatever but the weather a caller sees is a defect
                if is_weather(error):
                    self.counts["refused"] += 1
                else:
                    self.violations.append(f"the client was told {type(error).__name__}: {error}")

    def _count_open(self) -> None:
        try:
            self.open = self._arena.sql("SELECT count(*) AS open FROM orchestrator.tasks")[0]["open"]
        except psycopg2.OperationalError:
            return  # down at the moment; the last count will do
