"""The leader's spans: of dispatched tasks and of ended runs. A thread creates them after the commit."""

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

_MAX_QUEUED = 10_000
"""Commits whose spans may wait for the thread, at most; beyond that, the oldest are dropped."""


class _Committed(NamedTuple):
    """The tasks and runs of one commit that get spans."""

    at: float
    tasks: list[Claimed]
    runs: list[RunRow]


class LeaderSpans(CommitHooks):
    """Creates spans over the life of the process, across terms. A tick only queues the data."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._queued: deque[_Committed] = deque(maxlen=_MAX_QUEUED)
        self._has_queued = threading.Event()
        threading.Thread(target=self._work, name="spans", daemon=True).start()

    def rooted(self, run: NewRun) -> NewRun:
        """Give a run without a trace, such as a scheduled run, a trace that begins with the run."""
        return run if run.trace is not None else run._replace(trace=self._spans.root_of_run(run.id, run.name))

    def committed(self, tick: TickResult) -> None:
        """Queue the dispatched tasks and ended runs that have traces."""
        tasks = [task for task in tick.outgoing.claimed if task.trace is not None and not task.is_turn_task]
        runs = [run for run in tick.outgoing.runs if run.trace is not None and run.state in ENDED_RUN_STATES]
        if tasks or runs:
            self._queued.append(_Committed(time.time(), tasks, runs))
            self._has_queued.set()

    def close(self, seconds: float) -> None:
        """Create the queued spans, and wait so many seconds for them to be sent."""
        while self._queued:
            self._create_spans(self._queued.popleft())
        self._spans.flush(seconds)

    def _work(self) -> None:
        while True:
            self._has_queued.wait()
            self._has_queued.clear()
            while True:
                try:
                    commit = self._queued.popleft()
                except IndexError:
                    break
                self._create_spans(commit)

    def _create_spans(self, commit: _Committed) -> None:
        for task in commit.tasks:
            attributes: dict[str, str | int] = {
                "messaging.destination.name": task.queue,
                "messaging.message.id": to_text(task.id),
                "orchestrator.attempt": task.attempt,
            }
            if task.run_id is not None:
                attributes["orchestrator.run.id"] = to_text(task.run_id)
            assert task.trace is not None
            self._spans.dispatch(task.trace, task.name, task.ready or commit.at, commit.at, attributes)
        for run in commit.runs:
            assert run.trace is not None
            name = run.workflow or "run of many"
            error = None if run.state is RunState.SUCCESS else run.reason or run.status
            counts: dict[str, str | int] = {"orchestrator.run.id": to_text(run.id), "orchestrator.run.tasks": run.total}
            self._spans.run(run.trace, run.id, name, run.created or commit.at, commit.at, error, counts)
