"""Somebody who tells runs of workflows as code what they wait for: signals, updates, and at last the promise; and runs
of flows, each until the call has returned once, what their approval waits for.

Whom to tell, Postgres says, past every wire: also runs whose start raised and committed nevertheless. What is told is
a new number each time, written down before it is said and again when the call has returned.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from random import Random
from typing import Any

import psycopg2

from orchestrator import ResultTimeout, WorkflowHandle, WrongState
from tests.chaos.real.arena import Arena
from tests.chaos.real.journal import append
from tests.chaos.real.project import app
from tests.chaos.real.project.flows import ASKING
from tests.chaos.real.weather import is_weather

_EVERY = 0.1
_TIMEOUT = 3.0
"""Seconds that an update may take; what comes later counts as unanswered."""
_LAST_ANSWER = 20.0
_FLOWS = "SELECT id::text AS run FROM orchestrator.runs WHERE workflow = 'errands' AND ended_at IS NULL ORDER BY id"
_WAITING = """
SELECT p.run_id::text AS run, r.workflow FROM orchestrator.promises p JOIN orchestrator.runs r ON r.id = p.run_id
 WHERE p.name = 'answer' ORDER BY p.run_id
"""
_ANSWERED = {"journey": 1.0, "inquiry": 0.2}
"""How likely it is that who waits for an answer is given one at a visit, while there is time."""


class Outsider:
    """Goes round the runs that wait, in a thread."""

    def __init__(self, arena: Arena, seed: int) -> None:
        self._arena = arena
        self._random = Random(f"{seed} outsider")
        self._numbers = count(1)
        self._answered: set[str] = set()
        self._hurries = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outsider", daemon=True)
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []

    def start(self) -> None:
        self._thread.start()

    def hurry(self) -> None:
        """Answer at the next visit whoever waits."""
        self._hurries = True

    def stop(self) -> None:
        """End; whoever still waits for an answer, when all is at rest, waits for ever."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_LAST_ANSWER)
            if self._thread.is_alive():
                self.violations.append("somebody who told a run something still waits for an answer")

    def _run(self) -> None:
        while not self._stopping.wait(_EVERY):
            for row in self._waiting(_WAITING):
                if self._stopping.is_set():
                    return
                self._visit(row["run"], row["workflow"])
            for run in [row["run"] for row in self._waiting(_FLOWS)]:
                if run not in self._answered and self._random.random() < 0.2:
                    self._say("approval", run, partial(self._approve, run))

    def _approve(self, run: str, number: int) -> None:
        """Decide, whether the run has come there or not."""
        app.flows.run(run).approve(why=f"number {number}", node=ASKING)
        self._answered.add(run)

    def _waiting(self, statement: str) -> list[dict[str, Any]]:
        try:
            return self._arena.sql(statement)
        except psycopg2.OperationalError:
            return []  # down at the moment

    def _visit(self, run: str, workflow: str) -> None:
        """Tell a run some news, have it add a number now and then, and give it its answer, at once or some day."""
        handle: WorkflowHandle[object] = app.workflow_run(run)
        for _ in range(self._random.randint(0, 2)):
            self._say("signal", run, lambda number: handle.signal("news", number))
        if workflow == "journey" and self._random.random() < 0.5:
            self._say("update", run, lambda number: handle.update("add", number, timeout=_TIMEOUT))
        if self._random.random() < _ANSWERED[workflow] or self._hurries:
            self._say("answer", run, lambda number: handle.resolve("answer", number))

    def _say(self, what: str, run: str, tell: Callable[[int], object]) -> None:
        log, number = self._arena.journal.commit_log, next(self._numbers)
        append(log, "saying", what, run, number)
        try:
            tell(number)
        except (WrongState, ResultTimeout):
            self.counts[f"{what} too late"] += 1
        except Exception as error:  # noqa: BLE001  # whatever but the weather a caller sees is a defect
            if is_weather(error):
                self.counts["refused"] += 1
            else:
                self.violations.append(f"who said a {what} to run {run} was told {type(error).__name__}: {error}")
        else:
            append(log, "said", what, run, number)
            self.counts[what] += 1
