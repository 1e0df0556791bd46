"""Cancel runs and their descendants, thousands in a few statements, whatever their state.

A run being cancelled starts nothing more, and its plan is not consulted. It ends when its tasks and child runs have
ended; tasks that never started count as cancelled.
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

_MAX_MARKED = 1_000
"""Descendants marked between two checks of the clock."""
_COST = 2
"""The cost of cancelling a run, as a number of planned steps."""


@dataclass
class Cancels:
    """Cancels runs slice by slice."""

    runs: Runs
    backlog: Backlog

    def mark(self, tx: Transaction, ids: list[bytes], *, code: bool = False) -> None:
        """Mark runs as being cancelled, so that they start nothing more."""
        self.runs.forget(cancels.mark_cancelling(tx.connection, ids, code=code))

    def withhold(self, tx: Transaction, wanted: Sequence[tuple[bytes, str | None]], limit: int) -> set[bytes] | None:
        """Start no further tasks of compositions, or not those of one step each; running tasks continue.

        Return runs that have not begun, so that requests about their steps must wait; None if more tasks remain.
        """
        whole = cancels.open_parts(tx.connection, [run for run, step in wanted if step is None])
        self.mark(tx, [part.id for part in whole if part.status == RunState.PENDING])
        begun = [part.id for part in whole if part.status == RunState.RUNNING]
        of_steps = [(run, step) for run, step in wanted if step is not None]
        states = {part.id: part.status for part in cancels.open_parts(tx.connection, [run for run, _ in of_steps])}
        ready = [(run, step) for run, step in of_steps if states.get(run) == RunState.RUNNING]
        changes: dict[bytes, list[RunChanges]] = {run: [RunChanges(stopped=True)] for run in begun}
        for run, step in ready:
            changes.setdefault(run, []).append(RunChanges(withheld=[step]))
        self.runs.notify(tx, list(changes.items()))
        places = [*((run, None) for run in begun), *ready]
        tasks = cancels.not_running(tx.connection, [run for run, _ in places], [step for _, step in places], limit)
        cancel_tasks(tx, tasks)
        self.runs.advance(tx)
        if len(tasks) == limit:
            return None
        return {run for run, _ in of_steps if states.get(run) == RunState.PENDING}

    def time_out(self, tx: Transaction, limit: int, grace: float) -> list[bytes]:
        """Cancel runs that have timed out. Return those whose code must be notified first."""
        late = cancels.time_out(tx.connection, tx.now, limit, grace)
        self.runs.forget([run.id for run in late])
        return [run.id for run in late if run.must_notify_code]

    def go_on(self, tx: Transaction, limit: int) -> None:
        """Cancel descendants of runs being cancelled, and end those runs with nothing open.

        This continues while there is time, and always cancels some.
        """
        size = max(1, tx.budget.slice // _COST)
        while ids := self.backlog.cancelling(tx, size):
            with tx.budget.charging(ids):
                has_more = self._cancel_slice(tx, ids, limit)
            if tx.budget.is_spent or not (has_more or len(ids) == size):
                break

    def _cancel_slice(self, tx: Transaction, ids: Sequence[bytes], limit: int) -> bool:
        """Cancel some descendants and tasks of these runs. End runs without either.

        Return whether there may be more descendants.
        """
        below = cancels.cancel_descendants(tx.connection, ids, tx.now, _MAX_MARKED)
        self.runs.forget([row.id for row in below])
        ended = [row for row in below if row.state is RunState.CANCELLED]
        self.runs.follow_each(tx, ended, silent={row.id for row in ended})
        ids = [*ids, *(row.id for row in below if row.state is not RunState.CANCELLED)]
        tasks = cancels.open_tasks(tx.connection, ids, limit)
        if tasks:
            cancel_tasks(tx, tasks, is_repeated=True)
            self.runs.advance(tx)
        waiting = self.backlog.waiting(tx, ids)
        remaining = [run for run in ids if run not in waiting and not self.runs.is_refused(tx, run)]
        isolate(tx, remaining, self._end, lambda tx, run, error: self.backlog.set_aside(tx, (run, ()), error))
        self.runs.advance(tx)  # a stuck run receives the ends of its children first
        waiting = self.backlog.waiting(tx, ids)  # some runs may have become stuck just now
        closing = [run for run in ids if run in waiting and run not in tx.budget.refused]
        isolate(tx, closing, self._close_stuck, self._leave_stuck)
        return len(below) == _MAX_MARKED

    def _end(self, tx: Transaction, remaining: Sequence[bytes]) -> None:
        """End runs from the leaves upward, while there is time."""
        while remaining and (at_rest := cancels.without_open_work(tx.connection, remaining)):
            silent = {run.id for run in at_rest if run.is_with_parent}
            self._end_as_cancelled(tx, [run.id for run in at_rest], silent=silent)
            if tx.budget.is_spent:
                break
            ended = {run.id for run in at_rest}
            remaining = [run for run in remaining if run not in ended]

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
        """Set aside a run that cannot even be ended, so that others are cancelled. A person's retry tries it again."""
        self.backlog.set_aside(tx, (run, ()), error)
        tx.budget.given_up.add(run)

    def _close_stuck(self, tx: Transaction, ids: Sequence[bytes]) -> None:
        """End stuck runs being cancelled whose remaining open steps were never created."""
        stuck_runs = stuck.without_open_work(tx.connection, ids)
        if not stuck_runs:
            return
        pending_changes = self.backlog.take_of(tx, stuck_runs)
        counted = {run: total(pending_changes.get(run, ())) for run in stuck_runs}
        rows = runs.count(tx.connection, counted)
        self._end_as_cancelled(tx, stuck_runs, hooks=False)
        for row in rows:
            if row.reason == TIMED_OUT:  # a retry notifies its plan after all, which then does its own counting
                counted[row.id].update(cancelled=row.open, opened=-row.open)
                end = RunChanges({name: -number for name, number in counted[row.id].items()}, stopped=True)
                self.backlog.add(
                    tx, [(row.id, changes) for changes in [*pending_changes.get(row.id, ()), end]], is_over=True
                )


# -- retry failed runs: a run waits for its limit like a new one, then continues by `domain/dag/state.py`


def requeue_runs(tx: Transaction, ids: list[bytes]) -> set[bytes]:
    """Queue failed runs of workflows again. Return the queued runs."""
    requeued = cancels.requeue(tx.connection, ids) if ids else set()
    tx.result.wake.runs_to_begin |= bool(requeued)
    return requeued


def retry_plain(tx: Transaction, runs: Runs, item: inbox.Request, limit: int) -> bool:
    """Reopen a slice of a plain run's tasks that were unsuccessful at the request. Return whether all are done."""
    if cancels.has_workflow(tx.connection, item.target):
        return True  # another request has retried the run
    requested_at = tx.now - timedelta(seconds=item.age)
    ids = store.retryable_tasks(tx.connection, item.target, requested_at, limit)
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
    """Reopen failed and skipped tasks, with `cancelled` also cancelled ones, and their runs.

    `attempts` has one entry for each id: reopen the task only after that attempt.
    """
    if not ids:
        return Revived([], set())
    tasks, after = zip(*dict.fromkeys(zip_longest(ids, attempts)), strict=True)
    revived = revival.revive(tx.connection, list(tasks), cancelled=cancelled, attempts=after)
    tx.result.note(revived.moved)
    tx.result.wake.contested |= bool(revived.contested)
    run_ids = list({task.run_id for task in revived.moved if task.run_id is not None})
    if run_ids:
        runs.advance(tx)
        store.reopen(tx.connection, run_ids, tx.now)
        tx.result.outgoing.counted += run_ids
    return revived
