"""Apply the inbox: what people and programs asked for since the last tick."""

from __future__ import annotations

from orchestrator.domain.states import IN_FLIGHT_STATES, TaskState
from orchestrator.domain.task import TaskError
from orchestrator.scheduler.advance import advance_runs, conclude
from orchestrator.scheduler.status import error_json
from orchestrator.scheduler.tick import Tick
from orchestrator.store import inbox, runs, transitions
from orchestrator.store.inbox import Wish
from orchestrator.store.transitions import Ending

_CANCELLED = TaskError("Cancelled", "Cancelled by request.")
_CANCELLED_JSON = error_json(_CANCELLED)


def apply_inbox(tick: Tick, limit: int) -> None:
    """Apply the oldest requests, all of a kind at once."""
    items = inbox.read(tick.connection, limit)
    if not items:
        return
    wanted: dict[str, list[bytes]] = {}
    for item in items:
        wanted.setdefault(item.kind, []).append(item.target)
    if ids := wanted.get(Wish.CANCEL_TASK):
        cancel_tasks(tick, ids)
    if ids := wanted.get(Wish.CANCEL_RUN):
        runs.mark_cancelling(tick.connection, ids)
    if ids := wanted.get(Wish.RETRY_TASK):
        retry_tasks(tick, ids)
    if ids := wanted.get(Wish.RETRY_RUN):
        retry_tasks(tick, runs.retryable_tasks(tick.connection, ids, limit=100_000))
    inbox.remove(tick.connection, [item.id for item in items])


def cancel_tasks(tick: Tick, ids: list[bytes]) -> None:
    """End tasks wherever they stand; running attempts are revoked after the commit."""
    endings = [Ending(task, None, "cancelled", _CANCELLED_JSON) for task in dict.fromkeys(ids)]
    moved = transitions.end(tick.connection, TaskState.CANCELLED, endings, tick.now)
    tick.note(moved, errors={task.id: _CANCELLED for task in moved})
    tick.revoked.extend(task for task in moved if task.before in IN_FLIGHT_STATES)


def cancel_runs(tick: Tick, limit: int) -> None:
    """Cancel a slice of the open tasks of runs that are being cancelled, and end the runs that have none left."""
    cancelling = runs.cancelling(tick.connection)
    if not cancelling:
        return
    ids = [row.id for row in cancelling]
    tasks = runs.open_tasks(tick.connection, ids, limit)
    if tasks:
        cancel_tasks(tick, tasks)
        advance_runs(tick)
    else:
        conclude(tick, cancelling)


def retry_tasks(tick: Tick, ids: list[bytes]) -> None:
    """Open failed and skipped tasks again, and their runs with them."""
    if not ids:
        return
    moved = transitions.revive(tick.connection, list(dict.fromkeys(ids)))
    tick.note(moved)
    run_ids = list({task.run_id for task in moved if task.run_id is not None})
    if run_ids:
        advance_runs(tick)
        runs.reopen(tick.connection, run_ids)
