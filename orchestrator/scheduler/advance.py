"""Advance the runs that a tick has touched: count what moved, plan what follows, end what is complete.

An end may touch another run, the parent of a child; so this repeats until nothing is touched.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from orchestrator.domain.history import Outcome
from orchestrator.domain.ids import is_derived
from orchestrator.domain.run import verdict
from orchestrator.domain.states import ENDED_TASK_STATES, RunState, run_sources_of
from orchestrator.scheduler.code import tell
from orchestrator.scheduler.code_ends import end_runs, task_fact
from orchestrator.scheduler.dags import Saved
from orchestrator.scheduler.tick import Tick
from orchestrator.store import dags, runs
from orchestrator.store.runs import TIMED_OUT, RunRow
from orchestrator.transport.codec import Ended

Deltas = dict[bytes, dict[str, int]]
Events = dict[bytes, list[tuple[str, str]]]
Facts = dict[bytes, list[Outcome]]


def begin_runs(tick: Tick, limit: int) -> None:
    """Start the runs that were created since the last tick."""
    begun = runs.begin(tick.connection, tick.now, limit)
    planned = [row.id for row in begun if row.is_planned]
    conclude(tick, [row for row in begun if not row.is_planned])
    if planned:
        _save(tick, defaultdict(lambda: defaultdict(int)), tick.dags.advance(tick, ended={}, begun=planned))
    advance_runs(tick)


def advance_runs(tick: Tick) -> None:
    """Count the tasks that moved, once per run, and go on with the runs that they belong to."""
    while tick.moved or tick.children or tick.reopened or tick.told or tick.own_ends:
        deltas, ended, reopened, facts = _fold(tick)
        planned = {**dict.fromkeys(ended), **dict.fromkeys(reopened)}
        saved = tick.dags.advance(tick, ended=ended, reopened=reopened) if planned else {}
        if deltas or saved:
            _save(tick, deltas, saved, facts)
        if tick.own_ends:
            end_runs(tick)


def expand_runs(tick: Tick, limit: int) -> None:
    """Create more tasks of large fan-outs."""
    _save(tick, defaultdict(lambda: defaultdict(int)), tick.dags.expand(tick, limit))
    advance_runs(tick)


def stop_runs(tick: Tick, rows: Iterable[RunRow]) -> None:
    """Start nothing more of runs that are being cancelled."""
    planned = [row.id for row in rows if row.is_planned and row.state is RunState.RUNNING]
    if planned:
        _save(tick, defaultdict(lambda: defaultdict(int)), tick.dags.advance(tick, ended={}, stopped=planned))


def conclude(tick: Tick, rows: Iterable[RunRow]) -> None:
    """End the runs among these that are complete, and tell their parents and lanes. Code ends its runs itself."""
    complete: dict[RunState, dict[bytes, RunRow]] = defaultdict(dict)
    for row in rows:
        if row.code:
            continue
        state = verdict(row.counters, row.cancelling, row.reason == TIMED_OUT)
        if state is not None and row.state in run_sources_of(state):
            complete[state][row.id] = row
    lanes: Counter[str] = Counter()
    workflow_ends: dict[bytes, str] = {}
    for state, candidates in complete.items():
        for run_id in runs.end(tick.connection, state, list(candidates), tick.now):
            row = candidates[run_id]
            tick.ended.append(Ended(run_id, state))
            if row.lane is not None:
                lanes[row.lane] += 1
            if row.workflow is not None:
                workflow_ends[run_id] = str(state)
            if row.parent_run is not None and row.parent_step is not None:
                if state is RunState.SUCCESS:
                    dags.save_output(tick.connection, run_id, tick.dags.output(tick, run_id))
                tick.children.append((row.parent_run, row.parent_step, str(state)))
    if lanes:
        runs.unpark(tick.connection, lanes)
        tick.runs_to_begin = True
    if workflow_ends:
        tick.triggers.runs_ended(tick, workflow_ends)


def _fold(tick: Tick) -> tuple[Deltas, Events, Events, Facts]:
    """Sum up, by run, what moved: counters, for runs with a definition what ended or was opened again, and for those
    that may be runs of code what that learns.
    """
    deltas: Deltas = defaultdict(lambda: defaultdict(int))
    ended: Events = defaultdict(list)
    reopened: Events = defaultdict(list)
    facts: Facts = defaultdict(list)
    for task in tick.moved:
        if task.run_id is None:
            continue
        if task.state in ENDED_TASK_STATES:
            deltas[task.run_id][task.state] += 1
            deltas[task.run_id]["opened"] -= 1
            if task.step is not None:
                ended[task.run_id].append((task.step, task.state))
            else:
                facts[task.run_id].append(task_fact(task, *tick.outcomes.pop(task.id, (None, None))))
        elif task.before in ENDED_TASK_STATES:
            deltas[task.run_id][task.before] -= 1
            deltas[task.run_id]["opened"] += 1
            if task.step is not None:
                reopened[task.run_id].append((task.step, task.before))
    for run, step, state in tick.children:
        deltas[run][state] += 1
        deltas[run]["opened"] -= 1
        ended[run].append((step, state))
    for run, steps in tick.reopened.items():
        reopened[run].extend((step, "failed") for step in steps)
        for _ in steps:
            deltas[run]["failed"] -= 1
            deltas[run]["opened"] += 1
    for run, state, fact in tick.told:
        deltas[run][state] += 1
        deltas[run]["opened"] -= 1
        facts[run].append(fact)
    tick.moved.clear()
    tick.told.clear()
    tick.children.clear()
    tick.reopened.clear()
    return deltas, ended, reopened, facts


def _save(tick: Tick, deltas: Deltas, saved: Mapping[bytes, Saved], facts: Facts | None = None) -> None:
    """Write counters and plans, one row per run, tell code what it waits for, and end what has nothing left open."""
    for run, plan in saved.items():
        delta = deltas[run]
        delta["total"] += plan.delta.total
        delta["opened"] += plan.delta.opened
        for name, number in plan.delta.counts.items():
            delta[name] += number
    if not deltas:
        return
    tick.has_advanced = True
    facts = facts or {}
    # What code waits for has a derived id, and so has a step of a plan. One statement tells and counts; runs that turn
    # out to be none of code, or to have ended, are counted like all others.
    of_code = {run: some for run, some in facts.items() if run not in saved and is_derived(some[0].id)}
    told = tell(tick, of_code, deltas)
    rest = {run: delta for run, delta in deltas.items() if run not in told}
    if rest:
        plans = {run: (plan.state, plan.expanding) for run, plan in saved.items()}
        rows = runs.count(tick.connection, rest, plans)
        untold = facts.keys() - of_code.keys()
        tell(tick, {row.id: facts[row.id] for row in rows if row.code and row.id in untold})
        conclude(tick, rows)
