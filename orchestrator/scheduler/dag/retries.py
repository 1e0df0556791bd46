"""Try the plan of a failed run again: what is evaluated anew is forgotten, the rest goes on where it was."""

from __future__ import annotations

from datetime import UTC, datetime

from orchestrator.domain.dag.plan import Plan
from orchestrator.domain.dag.state import to_retry
from orchestrator.scheduler.transaction import Transaction
from orchestrator.store.runs import retries as run_retries
from orchestrator.store.tasks import revival

_GONE = "what it had come to is no longer kept: start the run over"


def retry_plan(tx: Transaction, run: bytes, plan: Plan, limit: int) -> bool:
    """Retry a run that has ended and begun again; False if there is more to be forgotten first, in another tick."""
    steps, state = plan.graph.steps, plan.state()
    singles = {step.name: place for place, step in enumerate(steps) if step.workflow and place not in state.fans}
    children = run_retries.with_children(tx.connection, run, list(singles)) if singles else set()
    retry = to_retry(plan.graph, state.steps, {*state.fans, *(singles[name] for name in children)})
    anew = [steps[place].name for place in retry.anew]
    if anew and run_retries.take_back(tx.connection, run, anew, limit) >= limit:
        return False
    doubtful = {steps[place].name: place for place in retry.again if plan.may_be_incomplete(place)}
    found = run_retries.created(tx.connection, run, list(doubtful)) if doubtful else {}
    plan.retry(retry.again, retry.anew, tx.now.timestamp(), {doubtful[name]: found[name] for name in found})
    for place in retry.again:
        if plan.fan(place) is None:
            tx.result.wake.runs_to_begin = True
            if not run_retries.requeue_children(tx.connection, run, steps[place].name, tx.now, 1):
                plan.abandon(place, 1, _GONE)
    return True


def reopen_held(tx: Transaction, run: bytes, plan: Plan, place: int, limit: int) -> int:
    """Open tasks or child runs of a fan-out again that had not succeeded when the run was retried; return how many."""
    number = plan.reopen_held(place, limit)
    if not number:
        return 0
    step, until = plan.graph.steps[place], datetime.fromtimestamp(plan.retried_at, UTC)
    if step.workflow is not None:
        found = run_retries.requeue_children(tx.connection, run, step.name, until, number)
        tx.result.wake.runs_to_begin = True
    else:
        ids = run_retries.unfinished_tasks(tx.connection, run, step.name, until, number)
        moved = revival.revive(tx.connection, ids, cancelled=True).moved if ids else []
        found = len(moved)
        tx.result.wake.requests |= any(task.lane is not None for task in moved)
    if found < number:
        plan.lose(place, number - found, _GONE)
    return number
