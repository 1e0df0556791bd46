"""The leader's spans: of tasks that were handed out, and of runs that ended. A thread makes them after the commit."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from orchestrator.domain.ids import to_text
from orchestrator.domain.states import ENDED_RUN_STATES, RunState
from orchestrator.scheduler.tick_result import CommitHooks, TickResult
from orchestrator.store.runs.creation import NewRun
from orchestrator.store.runs.transitions import RunRow
from orchestrator.store.tasks.claims import Claimed

if TYPE_CHECKING:
    from orchestrator.tracing.spans import Spans

_MOST = 10_000
"""Commits whose spans may wait for the thread; then the oldest go."""


class _Committed(NamedTuple):
    """The spans of one commit."""

    at: float
    tasks: list[Claimed]
    runs: list[RunRow]


class LeaderSpans(CommitHooks):
    """Lives as long as its process, over all terms. A tick only puts down what there are spans of."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._waiting: deque[_Committed] = deque(maxlen=_MOST)
        self._some = threading.Event()
        threading.Thread(target=self._work, name="spans", daemon=True).start()

    def rooted(self, run: NewRun) -> NewRun:
        """Return a run that comes of no span, as that of a schedule, with a trace that begins with it."""
        return run if run.trace is not None else run._replace(trace=self._spans.root_of_run(run.id, run.name))

    def committed(self, tick: TickResult) -> None:
        """Put down what was handed out, and what has ended."""
        tasks = [task for task in tick.outgoing.claimed if task.trace is not None and not task.is_turn_task]
        runs = [run for run in tick.outgoing.runs if run.trace is not None and run.state in ENDED_RUN_STATES]
        if tasks or runs:
            self._waiting.append(_Committed(time.time(), tasks, runs))
            self._some.set()

    def close(self, seconds: float) -> None:
        """Make the last ones, and wait so long for them to be sent."""
        while self._waiting:
            self._make(self._waiting.popleft())
        self._spans.flush(seconds)

    def _work(self) -> None:
        while True:
            self._some.wait()
            self._some.clear()
            while True:
                try:
                    commit = self._waiting.popleft()
                except IndexError:
                    break
                self._make(commit)

    def _make(self, commit: _Committed) -> None:
        for task in commit.tasks:
            about: dict[str, str | int] = {
                "messaging.destination.name": task.queue,
                "messaging.message.id": to_text(task.id),
                "orchestrator.attempt": task.attempt,
            }
            if task.run_id is not None:
                about["orchestrator.run.id"] = to_text(task.run_id)
            assert task.trace is not None
            self._spans.dispatch(task.trace, task.name, task.ready or commit.at, commit.at, about)
        for run in commit.runs:
            assert run.trace is not None
            name = run.workflow or "run of many"
            error = None if run.state is RunState.SUCCESS else run.reason or run.status
            counts: dict[str, str | int] = {"orchestrator.run.id": to_text(run.id), "orchestrator.run.tasks": run.total}
            self._spans.run(run.trace, run.id, name, run.created or commit.at, commit.at, error, counts)
