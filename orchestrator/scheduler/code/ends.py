"""The end of tasks in runs of code, and of the runs themselves: with their turn tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from orchestrator.domain.code import history
from orchestrator.domain.code.commands import ContinueRun
from orchestrator.domain.code.history import Outcome
from orchestrator.domain.code.promises import Resolution, resolutions
from orchestrator.domain.code.succession import carried_over, ignores_cancel
from orchestrator.domain.ids import successor_id
from orchestrator.domain.runs.changes import RunChanges, TurnTaskEnd
from orchestrator.domain.runs.verdict import RAN_TOO_LONG
from orchestrator.domain.states import RunState, TaskState
from orchestrator.domain.tasks.task import TaskError
from orchestrator.scheduler.code.runs import CodeRuns, ask_to_cancel
from orchestrator.scheduler.news import News
from orchestrator.scheduler.runs.triggers import Triggers
from orchestrator.scheduler.tasks.creation import cancel_tasks
from orchestrator.scheduler.transaction import Transaction
from orchestrator.store.code import histories
from orchestrator.store.code import keys as run_keys
from orchestrator.store.code import resolutions as store
from orchestrator.store.code import runs as code_runs
from orchestrator.store.code.runs import EndedRun, NewCodeRun
from orchestrator.store.runs import cancels
from orchestrator.store.tasks.transitions import Moved
from orchestrator.transport.codec import Ended

_NOTHING = b"\xc0"


def task_fact(task: Moved, result: bytes | None, error: TaskError | None) -> Outcome:
    """Return what the code of a run learns of the end of one of its tasks."""
    if task.state == TaskState.SUCCESS:
        return history.TaskCompleted(task.id, result or _NOTHING)
    if task.state == TaskState.FAILED:
        return history.TaskFailed(task.id, error or TaskError("Failed", "The task failed."))
    return history.TaskCancelled(task.id)


class RunEnd(NamedTuple):
    """A run whose turn task has ended, and that ends with it."""

    turn_task: TurnTaskEnd
    continuing: ContinueRun | None
    """How it goes on in another, if it does."""
    is_reset: bool
    """It ends because another repeats it."""

    @property
    def changes(self) -> RunChanges:
        """Return what is kept of it until the run can be ended."""
        return RunChanges(turn_task_end=self.turn_task, continuing=self.continuing)

    @property
    def reason(self) -> str | None:
        """Return why it ended, for people to see, if that is not how its code did."""
        if self.continuing is not None:
            return code_runs.CONTINUED
        return code_runs.RESET if self.is_reset else None


def end_runs(tx: Transaction, news: News, some: Sequence[RunEnd], triggers: Triggers, code: CodeRuns) -> None:
    """End the runs whose turn tasks have ended: cancel what is open in them, and tell all who wait for them.

    A run that goes on in another has not ended for anyone but the clients, who follow it.
    """
    ends = {end.turn_task.id: end for end in some}
    states = ((run, RunState(end.turn_task.state), end.reason) for run, end in ends.items())
    continuing = {run: end.continuing for run, end in ends.items() if end.continuing is not None}
    successors = _successors(tx, continuing) if continuing else {}
    ended = code_runs.end(tx.connection, states, tx.now)
    news.wakeups.has_requests |= any(run.open for run in ended)  # the agenda says that they are closing
    if successors:
        _continue(tx, news, [successors[run.id] for run in ended if run.id in successors])
    # A child may have continued in this very tick, so this comes after the successors are there.
    with_children = code_runs.children(tx.connection, [run.id for run in ended if run.open])
    if with_children:
        ask_to_cancel(tx, with_children, "its parent has ended")
    over = [run for run in ended if run.id not in successors and not ends[run.id].is_reset]
    news.runs.child_outcomes.extend(
        (run.parent, run.state, fact_for_parent(run.child_id, run.state, ends[run.id].turn_task))
        for run in over
        if run.parent is not None
    )
    news.outgoing.ended.extend(_announced(run, ends[run.id]) for run in ended)
    if over:
        triggers.code_ended(tx, news, over)
    code.ended(tx, news, {run: successors[run].new.id if run in successors else run for run in ends})


def _announced(run: EndedRun, end: RunEnd) -> Ended:
    """Return what clients hear. A success without a result tells them to look, and they find where a run goes on."""
    if end.is_reset:
        return Ended(run.id, RunState.SUCCESS)
    return Ended(run.id, run.state, end.turn_task.inline, _error(run.state, end.turn_task))


def fact_for_parent(child: bytes, state: str, end: TurnTaskEnd) -> Outcome:
    """Return what a parent learns of the end of its child, by the id that it knows it by."""
    if state == RunState.SUCCESS:
        return history.ChildCompleted(child, end.result or _NOTHING)
    if state == RunState.CANCELLED:
        return history.ChildCancelled(child)
    return history.ChildFailed(child, _error(state, end) or TaskError("Failed", "The run failed."))


def _error(state: str, end: TurnTaskEnd) -> TaskError | None:
    """Return why a run ended as it did. One that was cancelled because its time was up has failed."""
    return RAN_TOO_LONG if state == RunState.FAILED and end.state == TaskState.CANCELLED else end.error


class _Successor(NamedTuple):
    """A run in which another goes on."""

    new: NewCodeRun
    resolutions: list[Resolution]
    """What people have said of promises, and the code has not learnt."""


def _successors(tx: Transaction, continuing: Mapping[bytes, ContinueRun]) -> dict[bytes, _Successor]:
    """Return the runs in which others go on, with everything that was said to those and their code has not heard."""
    ids = list(continuing)
    said = histories.said(tx.connection, [(run, end.seen) for run, end in continuing.items()])
    carried = {run: carried_over(said.get(run, []), end) for run, end in continuing.items()}
    settled = [run for run in ids if carried[run].settled]
    created = histories.promises(tx.connection, settled) if settled else {}
    left = {run: resolutions(carried[run].settled, created.get(run, ())) for run in ids}
    for kept in store.of_runs(tx.connection, ids):
        if kept.number:
            left[kept.run].append(kept.what)
    successors: dict[bytes, _Successor] = {}
    for old in code_runs.predecessors(tx.connection, ids, tx.now):
        payload = continuing[old.id].payload
        started = history.RunStarted(old.workflow, old.version, payload, old.queue, old.parent, old.id)
        new = NewCodeRun(
            successor_id(old.id),
            [started, *carried[old.id].facts],
            old.timeout,
            old.position,
            old.child_id,
            old.detached,
            msgspec.json.encode(old.tags).decode(),
            old.pinned,
            parent=old.parent,
            reason=old.reason,
            cancelling=old.cancelling or ignores_cancel(said.get(old.id, []), continuing[old.id], old.began_at),
            schedule=old.schedule,
            fire_time=old.fire_time,
            name=old.name,
        )
        successors[old.id] = _Successor(new, left[old.id])
    return successors


def _continue(tx: Transaction, news: News, successors: Sequence[_Successor]) -> None:
    """Start the runs in which others go on."""
    new = [successor.new for successor in successors]
    code_runs.start(tx.connection, new, tx.now)
    run_keys.pass_on(tx.connection, [(run.started.continued_from or b"", run.id) for run in new])
    kept = [kept for successor in successors for kept in store.numbered(successor.new.id, successor.resolutions)]
    if kept:
        store.keep(tx.connection, kept)
    news.wakeups.delayed |= any(run.timeout is not None for run in new)
    news.wakeups.has_requests |= any(run.cancelling for run in new)  # the agenda says so


def close_runs(tx: Transaction, news: News, limit: int) -> None:
    """Cancel a slice of what is open in runs that have ended."""
    closing = code_runs.closing(tx.connection, limit)
    tasks = cancels.open_tasks(tx.connection, closing, limit) if closing else []
    if tasks:
        cancel_tasks(tx, news, tasks)
    if len(tasks) < limit:
        code_runs.closed(tx.connection, closing)
