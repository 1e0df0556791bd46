"""Try failed runs again: a run stands in line for its limit like a new one, then goes on by `domain/dag/retrying`."""

from __future__ import annotations

from datetime import timedelta

from orchestrator.scheduler.runs.advance import advance_runs, conclude
from orchestrator.scheduler.tick import Tick
from orchestrator.store import inbox
from orchestrator.store.runs import life as runs
from orchestrator.store.runs import retries as run_retries
from orchestrator.store.tasks import revival
from orchestrator.store.tasks.revival import Revived


def retry_run(tick: Tick, item: inbox.Item, limit: int) -> bool:
    """Let a failed run stand in line again, or open a slice of its tasks if it has no workflow; say if that is all."""
    if run_retries.requeue(tick.connection, [item.target]):
        tick.runs_to_begin = True
        return True
    return _retry_plain(tick, item, limit)


def _retry_plain(tick: Tick, item: inbox.Item, limit: int) -> bool:
    """Open a slice of the tasks of a run without a workflow that had not succeeded when this was asked."""
    asked_at = tick.now - timedelta(seconds=item.age)
    ids = runs.retryable_tasks(tick.connection, item.target, asked_at, limit)
    if len(retry_tasks(tick, ids, cancelled=True).moved) >= limit:
        return False
    conclude(tick, runs.count(tick.connection, {item.target: {}}))
    advance_runs(tick)
    return True


def retry_tasks(tick: Tick, ids: list[bytes], *, cancelled: bool = False) -> Revived:
    """Open failed and skipped tasks again, also cancelled ones if so asked, and their runs with them."""
    if not ids:
        return Revived([], set())
    revived = revival.revive(tick.connection, list(dict.fromkeys(ids)), cancelled=cancelled)
    tick.note(revived.moved)
    tick.contested = tick.contested or bool(revived.contested)
    run_ids = list({task.run_id for task in revived.moved if task.run_id is not None})
    if run_ids:
        advance_runs(tick)
        runs.reopen(tick.connection, run_ids)
    return revived
