"""Try failed runs again: a run waits for its limit like a new one, then goes on by `domain/dag/state.py`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import zip_longest

from orchestrator.scheduler.runs.advance import Runs
from orchestrator.scheduler.transaction import Transaction
from orchestrator.store import inbox
from orchestrator.store.runs import retries as run_retries
from orchestrator.store.runs import transitions as store
from orchestrator.store.tasks import revival
from orchestrator.store.tasks.revival import Revived


def requeue_runs(tx: Transaction, ids: list[bytes]) -> set[bytes]:
    """Let failed runs of workflows stand in line again; return those that do."""
    requeued = run_retries.requeue(tx.connection, ids) if ids else set()
    tx.result.wake.runs_to_begin |= bool(requeued)
    return requeued


def retry_plain(tx: Transaction, runs: Runs, item: inbox.Request, limit: int) -> bool:
    """Open a slice of the tasks of a run without a workflow that had not succeeded when this was asked; say if that is
    all."""
    if run_retries.has_workflow(tx.connection, item.target):
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
        store.reopen(tx.connection, run_ids)
        tx.result.outgoing.counted += run_ids
    return revived
