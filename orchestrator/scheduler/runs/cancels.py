"""Cancel runs, and all below them: thousands in a few statements, whatever they are in the middle of.

A run that is being cancelled starts nothing more. Its plan is not asked: when its tasks and the runs below it have
ended, it ends, and what is left of it counts as cancelled.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest

from orchestrator.domain.runs import TIMED_OUT, RunChanges, total
from orchestrator.domain.states import RunState
from orchestrator.scheduler.runs.advance import Runs
from orchestrator.scheduler.runs.backlog import Backlog
from orchestrator.scheduler.tasks.creation import cancel_tasks
from orchestrator.scheduler.transaction import Transaction, isolate
from orchestrator.store import inbox
from orchestrator.store.runs import cancels, stuck
from orchestrator.store.runs import transitions as runs
from orchestrator.store.runs import transitions as store
from orchestrator.store.tasks import revival
from orchestrator.store.tasks.revival import Revived

_MARKED = 1_000
"""Runs below others that are marked between two looks at the clock."""
_COST = 2
"""The cost of cancelling a run, as a number of planned steps."""


@dataclass
class Cancels:
    """Cancels runs slice by slice."""

    runs: Runs
    backlog: Backlog

    def mark(self, tx: Transaction, ids: list[bytes], *, code: bool = False) -> None:
        """Let runs start nothing more, and be cancelled."""
        self.runs.forget(cancels.mark(tx.connection, ids, code=code))

    def time_out(self, tx: Transaction, limit: int, grace: float) -> list[bytes]:
        """Cancel runs that have timed out; return those whose code must be notified first."""
        late = cancels.time_out(tx.connection, tx.now, limit, grace)
        self.runs.forget([run.id for run in late])
        return [run.id for run in late if run.is_told]

    def go_on(self, tx: Transaction, limit: int) -> None:
        """Cancel what is below runs that are being cancelled, and end those of which nothing is open.

        It goes on as long as there is time, but some are cancelled however little there is.
        """
        size = max(1, tx.budget.slice // _COST)
        while ids := self.backlog.cancelling(tx, size):
            with tx.budget.charging(ids):
                has_more = self._cancel_slice(tx, ids, limit)
            if tx.budget.is_spent or not (has_more or len(ids) == size):
                break

    def _cancel_slice(self, tx: Transaction, ids: Sequence[bytes], limit: int) -> bool:
        """Cancel some of what is below these runs, and some of their tasks; end those that have neither.

        Return whether there may be more below them.
        """
        below = cancels.mark_below(tx.connection, ids, tx.now, _MARKED)
        self.runs.forget([row.id for row in below])
        ended = [row for row in below if row.state is RunState.CANCELLED]
        self.runs.follow_each(tx, ended, silent={row.id for row in ended})
        ids = [*ids, *(row.id for row in below if row.state is not RunState.CANCELLED)]
        tasks = cancels.open_tasks(tx.connection, ids, limit)
        if tasks:
            cancel_tasks(tx, tasks)
            self.runs.advance(tx)
        waiting = self.backlog.waiting(tx, ids)
        left = [run for run in ids if run not in waiting and not self.runs.is_refused(tx, run)]
        isolate(tx, left, self._end, lambda tx, run, error: self.backlog.set_aside(tx, (run, ()), error))
        self.runs.advance(tx)  # a stuck run is notified of the children that have ended just now
        waiting = self.backlog.waiting(tx, ids)  # and those of which this was found out just now
        closing = [run for run in ids if run in waiting and run not in tx.budget.refused]
        isolate(tx, closing, self._close_stuck, self._leave_stuck)
        return len(below) == _MARKED

    def _end(self, tx: Transaction, left: Sequence[bytes]) -> None:
        """End runs from below, as far as there is time."""
        while left and (at_rest := cancels.at_rest(tx.connection, left)):
            silent = {run.id for run in at_rest if run.is_with_parent}
            self._end_as_cancelled(tx, [run.id for run in at_rest], silent=silent)
            if tx.budget.is_spent:
                break
            over = {run.id for run in at_rest}
            left = [run for run in left if run not in over]

    def _end_as_cancelled(
        self,
        tx: Transaction,
        ids: Iterable[bytes],
        *,
        hooks: bool = True,
        silent: Container[bytes] = (),
    ) -> None:
        ended = runs.end(tx.connection, [(run, RunState.CANCELLED, None) for run in ids], tx.now)
        self.runs.follow_ends(tx, ended, hooks=hooks, silent=silent)

    def _leave_stuck(self, tx: Transaction, run: bytes, error: Exception) -> None:
        """Let others be cancelled although a run cannot even be ended: that is tried again when somebody retries it."""
        self.backlog.set_aside(tx, (run, ()), error)
        tx.budget.given_up.add(run)

    def _close_stuck(self, tx: Transaction, ids: Sequence[bytes]) -> None:
        """End runs that are being cancelled and cannot be planned: all that is open of them was never created."""
        over = stuck.at_rest(tx.connection, ids)
        if not over:
            return
        pending_changes = self.backlog.take_of(tx, over)
        counted = {run: total(pending_changes.get(run, ())) for run in over}
        rows = runs.count(tx.connection, counted)
        self._end_as_cancelled(tx, over, hooks=False)
        for row in rows:
            if row.reason == TIMED_OUT:  # it can be retried: then its plan is notified after all, and counts by itself
                counted[row.id].update(cancelled=row.open, opened=-row.open)
                end = RunChanges({name: -number for name, number in counted[row.id].items()}, stopped=True)
                self.backlog.add(tx, [(row.id, one) for one in [*pending_changes.get(row.id, ()), end]], is_over=True)


# -- try failed runs again: a run waits for its limit like a new one, then goes on by `domain/dag/state.py`


def requeue_runs(tx: Transaction, ids: list[bytes]) -> set[bytes]:
    """Let failed runs of workflows stand in line again; return those that do."""
    requeued = cancels.requeue(tx.connection, ids) if ids else set()
    tx.result.wake.runs_to_begin |= bool(requeued)
    return requeued


def retry_plain(tx: Transaction, runs: Runs, item: inbox.Request, limit: int) -> bool:
    """Open a slice of the tasks of a run without a workflow that had not succeeded when this was asked; say if that is
    all."""
    if cancels.has_workflow(tx.connection, item.target):
        return True  # somebody else has retried it
    asked_at = tx.now - timedelta(seconds=item.age)
    ids = store.retryable_tasks(tx.connection, item.target, asked_at, limit)
    if len(retry_tasks(tx, runs, ids, cancelled=True).moved) >= limit:
        return False
    runs.conclude(tx, store.count(tx.connection, {item.target: {}}))
    runs.advance(tx)
    return True


def retry_tasks(
    tx: Transaction,
    runs: Runs,
    ids: list[bytes],
    *,
    cancelled: bool = False,
    attempts: Sequence[int | None] = (),
) -> Revived:
    """Open failed and skipped tasks again, also cancelled ones if so asked, and their runs with them.

    With `attempts`, one for each id, only after these.
    """
    if not ids:
        return Revived([], set())
    wanted, after = zip(*dict.fromkeys(zip_longest(ids, attempts)), strict=True)
    revived = revival.revive(tx.connection, list(wanted), cancelled=cancelled, attempts=after)
    tx.result.note(revived.moved)
    tx.result.wake.contested |= bool(revived.contested)
    run_ids = list({task.run_id for task in revived.moved if task.run_id is not None})
    if run_ids:
        runs.advance(tx)
        store.reopen(tx.connection, run_ids, tx.now)
        tx.result.outgoing.counted += run_ids
    return revived
