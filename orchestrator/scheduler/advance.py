"""Advance the runs that a tick has touched: count what moved, and end what is complete."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from orchestrator.domain.run import verdict
from orchestrator.domain.states import ENDED_TASK_STATES, RunState, run_sources_of
from orchestrator.scheduler.tick import Tick
from orchestrator.store import runs
from orchestrator.store.runs import RunRow
from orchestrator.transport.codec import Ended


def begin_runs(tick: Tick, limit: int) -> None:
    """Start the runs that were created since the last tick."""
    conclude(tick, runs.begin(tick.connection, tick.now, limit))


def advance_runs(tick: Tick) -> None:
    """Count the tasks that moved, once per run, and end the runs that have none left open."""
    deltas: dict[bytes, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for task in tick.moved:
        if task.run_id is None:
            continue
        delta = deltas[task.run_id]
        if task.state in ENDED_TASK_STATES:
            delta[task.state] += 1
            delta["opened"] -= 1
        elif task.before in ENDED_TASK_STATES:
            delta[task.before] -= 1
            delta["opened"] += 1
    tick.moved.clear()
    if deltas:
        conclude(tick, runs.count(tick.connection, deltas))


def conclude(tick: Tick, rows: Iterable[RunRow]) -> None:
    """End the runs among these that are complete."""
    complete: dict[RunState, list[bytes]] = defaultdict(list)
    for row in rows:
        state = verdict(row.counters, row.cancelling)
        if state is not None and row.state in run_sources_of(state):
            complete[state].append(row.id)
    for state, ids in complete.items():
        for run_id in runs.end(tick.connection, state, ids, tick.now):
            tick.ended.append(Ended(run_id, state))
