"""A simulated person who sends code workflows the messages they wait for (signals, updates, finally the promise's
value) and approves flows, repeating each approval until a call returns. The waiting runs are read from Postgres without
a proxy, which includes runs whose start raised an error and committed. Each message is a new number, recorded before it
is sent and again when the call has returned."""

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

_INTERVAL = 0.1
_TIMEOUT = 3.0
"""Timeout of an update in seconds; a later reply counts as no reply."""
_STOP_TIMEOUT = 20.0
_FLOWS = "SELECT id::text AS run FROM orchestrator.runs WHERE workflow = 'errands' AND ended_at IS NULL ORDER BY id"
_WAITING = """
SELECT p.run_id::text AS run, r.workflow FROM orchestrator.promises p JOIN orchestrator.runs r ON r.id = p.run_id
 WHERE p.name = 'answer' ORDER BY p.run_id
"""
_ANSWER_PROBABILITY = {"journey": 1.0, "inquiry": 0.2}
"""Probability that a waiting run gets its answer at a visit, before `hurry`."""


class Outsider:
    """Visits the waiting runs in a thread."""

    def __init__(self, arena: Arena, seed: int) -> None:
        self._arena = arena
        self._random = Random(f"{seed} outsider")
        self._numbers = count(1)
        self._answered: set[str] = set()
        self._is_hurrying = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outsider", daemon=True)
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []

    def start(self) -> None:
        self._thread.start()

    def hurry(self) -> None:
        """Answer every waiting run at the next visit."""
        self._is_hurrying = True

    def stop(self) -> None:
        """Stop; call this at rest, when no run waits any more."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_TIMEOUT)
            if self._thread.is_alive():
                self.violations.append("somebody who told a run something still waits for an answer")

    def _run(self) -> None:
        while not self._stopping.wait(_INTERVAL):
            for row in self._waiting(_WAITING):
                if self._stopping.is_set():
                    return
                self._visit(row["run"], row["workflow"])
            for run in [row["run"] for row in self._waiting(_FLOWS)]:
                if run not in self._answered and self._random.random() < 0.2:
                    self._send("approval", run, partial(self._approve, run))

    def _approve(self, run: str, number: int) -> None:
        """Approve a flow, whether or not it has reached the approval."""
        app.flows.run(run).approve(why=f"number {number}", node=ASKING)
        self._answered.add(run)

    def _waiting(self, statement: str) -> list[dict[str, Any]]:
        try:
            return self._arena.sql(statement)
        except psycopg2.OperationalError:
            return []  # Postgres is down

    def _visit(self, run: str, workflow: str) -> None:
        """Send a run some signals, sometimes an update, and sooner or later its answer."""
        handle: WorkflowHandle[object] = app.workflow_run(run)
        for _ in range(self._random.randint(0, 2)):
            self._send("signal", run, lambda number: handle.signal("news", number))
        if workflow == "journey" and self._random.random() < 0.5:
            self._send("update", run, lambda number: handle.update("add", number, timeout=_TIMEOUT))
        if self._random.random() < _ANSWER_PROBABILITY[workflow] or self._is_hurrying:
            self._send("answer", run, lambda number: handle.resolve("answer", number))

    def _send(self, message: str, run: str, send: Callable[[int], object]) -> None:
        log, number = self._arena.journal.commit_log, next(self._numbers)
        append(log, "saying", message, run, number)
        try:
            send(number)
        except (WrongState, ResultTimeout):
            self.counts[f"{message} too late"] += 1
        except Exception as error:  # noqa: BLE001  # any error not caused by an outage is a defect
            if is_weather(error):
                self.counts["refused"] += 1
            else:
                self.violations.append(f"who said a {message} to run {run} was told {type(error).__name__}: {error}")
        else:
            append(log, "said", message, run, number)
            self.counts[message] += 1
