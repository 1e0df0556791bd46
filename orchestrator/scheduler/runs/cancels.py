"""Cancel runs, and all below them: thousands in a few statements, whatever they are in the middle of.

A run that is being cancelled starts nothing more. Its plan is not asked: when its tasks and the runs below it have
ended, it ends, and what is left of it counts as cancelled.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.domain.runs.happened import Happened, total
from orchestrator.domain.runs.verdict import TIMED_OUT
from orchestrator.domain.states import RunState
from orchestrator.scheduler.isolation import isolate
from orchestrator.scheduler.runs.advance import advance_runs, conclude, follow_ends, is_refused
from orchestrator.scheduler.tasks.creation import cancel_tasks
from orchestrator.scheduler.tick import Tick
from orchestrator.store.runs import cancels, stuck
from orchestrator.store.runs import life as runs

_MARKED = 2_000
"""Runs below others that are marked at once."""


def mark_cancelling(tick: Tick, ids: list[bytes], *, code: bool = False) -> None:
    """Let runs start nothing more, and be cancelled."""
    tick.dags.drop(cancels.mark(tick.connection, ids, code=code))


def time_out(tick: Tick, limit: int) -> None:
    """Cancel runs that have taken too long."""
    tick.dags.drop(cancels.time_out(tick.connection, tick.now, limit))


def cancel_runs(tick: Tick, limit: int) -> None:
    """Cancel what is below runs that are being cancelled, and end those of which nothing is open, slice by slice."""
    advance_runs(tick)  # what ended in this tick is counted before it is asked what is left
    while ids := tick.backlog.cancelling(tick, tick.budget.slice):
        with tick.budget.charging(ids):
            _cancel_slice(tick, ids, limit)
        if len(ids) < tick.budget.slice or tick.budget.is_spent:
            break


def _cancel_slice(tick: Tick, ids: Sequence[bytes], limit: int) -> None:
    """Cancel some of what is below these runs, and some of their tasks; end those that have neither."""
    below = cancels.mark_below(tick.connection, ids, tick.now, _MARKED)
    tick.dags.drop(row.id for row in below)
    ended = [(row, row.state) for row in below if row.state is RunState.CANCELLED]
    follow_ends(tick, ended, silent={row.id for row, _ in ended})
    ids = [*ids, *(row.id for row in below if row.state is not RunState.CANCELLED)]
    tasks = cancels.open_tasks(tick.connection, ids, limit)
    if tasks:
        cancel_tasks(tick, tasks)
        advance_runs(tick)
    waiting = tick.backlog.waiting(tick, ids)
    left = [run for run in ids if run not in waiting and not is_refused(tick, run)]
    isolate(tick, left, lambda some: _end(tick, some), lambda run, error: tick.backlog.set_aside(tick, run, (), error))
    waiting = tick.backlog.waiting(tick, ids)  # and those of which this was found out just now
    _close_stuck(tick, [run for run in ids if run in waiting])


def _end(tick: Tick, left: Sequence[bytes]) -> None:
    """End runs from below, as far as there is time."""
    while left and (ended := cancels.end(tick.connection, left, tick.now)):
        over = {run.row.id: run for run in ended}
        silent = {run for run, cancelled in over.items() if cancelled.is_with_parent}
        follow_ends(tick, [(run.row, run.row.state) for run in ended], silent=silent)
        if tick.budget.is_spent:
            break
        left = [run for run in left if run not in over]


def _close_stuck(tick: Tick, ids: list[bytes]) -> None:
    """End runs that are being cancelled and cannot be planned: nothing of them is open but what was never created."""
    over = stuck.at_rest(tick.connection, ids) if ids else []
    if not over:
        return
    untold = tick.backlog.take_of(tick, over)
    counted = {run: total(untold.get(run, ())) for run in over}
    rows = runs.count(tick.connection, counted)
    rest = {row.id: {"cancelled": row.counters.open, "opened": -row.counters.open} for row in rows}
    conclude(tick, runs.count(tick.connection, rest), hooks=False)
    for row in rows:
        if row.reason == TIMED_OUT:  # it can be retried: then its plan is told after all, and counts by itself
            counted[row.id].update(rest[row.id])
            end = Happened({name: -number for name, number in counted[row.id].items()}, stopped=True)
            tick.backlog.add(tick, [(row.id, one) for one in [*untold.get(row.id, ()), end]], is_over=True)
