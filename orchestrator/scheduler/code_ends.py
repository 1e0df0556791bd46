"""The end of tasks in runs of code, and of the runs themselves: with their own tasks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from orchestrator.domain import history
from orchestrator.domain.history import Fact
from orchestrator.domain.ids import successor_id
from orchestrator.domain.states import RunState, TaskState
from orchestrator.domain.task import TaskError
from orchestrator.scheduler.code import ask_to_cancel
from orchestrator.scheduler.tasks import cancel_tasks
from orchestrator.scheduler.tick import OwnEnd, Tick
from orchestrator.store import code_runs, histories, runs
from orchestrator.store.code_runs import EndedRun, NewCodeRun
from orchestrator.store.transitions import Moved

_NOTHING = b"\xc0"


def task_fact(task: Moved, result: bytes | None, error: TaskError | None) -> Fact:
    """Return what the code of a run learns of the end of one of its tasks."""
    if task.state == TaskState.SUCCESS:
        return history.TaskCompleted(task.id, result or _NOTHING)
    if task.state == TaskState.FAILED:
        return history.TaskFailed(task.id, error or TaskError("Failed", "The task failed."))
    return history.TaskCancelled(task.id)


def end_runs(tick: Tick) -> None:
    """End the runs whose own tasks have ended: cancel what is open in them, and tell their parents."""
    ends = {end.id: end for end in tick.own_ends}
    tick.own_ends.clear()
    states = ((run, RunState(end.state), _reason(tick, run)) for run, end in ends.items())
    ended = code_runs.end(tick.connection, states, tick.now)
    tick.has_wishes = tick.has_wishes or any(run.open for run in ended)  # the agenda says that they are closing
    continued = [run.id for run in ended if run.id in tick.continuing]
    finished = [run for run in ended if run.id not in tick.continuing]
    with_children = code_runs.children(tick.connection, [run.id for run in finished if run.open])
    if with_children:
        ask_to_cancel(tick, with_children, "its parent has ended")
    tick.told.extend(
        (run.parent, run.state, told_to_parent(run, ends[run.id]))
        for run in finished
        if run.parent is not None and run.id not in tick.resetting
    )
    if continued:
        _continue(tick, continued)


def _reason(tick: Tick, run: bytes) -> str | None:
    if run in tick.continuing:
        return code_runs.CONTINUED
    return code_runs.RESET if run in tick.resetting else None


def told_to_parent(run: EndedRun, end: OwnEnd) -> Fact:
    """Return what a parent learns of the end of its child."""
    if run.state == RunState.SUCCESS:
        return history.ChildCompleted(run.child_id, end.result or _NOTHING)
    if run.state == RunState.CANCELLED:
        return history.ChildCancelled(run.child_id)
    if end.state == TaskState.CANCELLED:
        return history.ChildFailed(run.child_id, TaskError("RunTimedOut", "The run took longer than it may."))
    return history.ChildFailed(run.child_id, end.error or TaskError("Failed", "The run failed."))


def _continue(tick: Tick, ids: Sequence[bytes]) -> None:
    """Start the runs in which others go on, with the signals that those have not taken."""
    signals = histories.signals(tick.connection, ids)
    new: list[NewCodeRun] = []
    for old in code_runs.predecessors(tick.connection, ids, tick.now):
        command = tick.continuing.pop(old.id)
        started = history.RunStarted(old.workflow, old.version, command.payload, old.queue, old.parent, old.id)
        left = dict(command.signals)
        untaken: list[history.SignalReceived] = []
        for signal in signals.get(old.id, ()):
            left[signal.name] = left.get(signal.name, 0) - 1
            if left[signal.name] < 0:
                untaken.append(signal)
        new.append(
            NewCodeRun(
                successor_id(old.id),
                [started, *untaken],
                old.timeout,
                old.position,
                old.child_id,
                old.detached,
                msgspec.json.encode(old.tags).decode(),
                old.pinned,
                parent=old.parent,
            )
        )
    code_runs.start(tick.connection, new, tick.now)
    code_runs.pass_keys(tick.connection, [(run.started.continued_from or b"", run.id) for run in new])


def close_runs(tick: Tick, limit: int) -> None:
    """Cancel a slice of what is open in runs that have ended."""
    closing = code_runs.closing(tick.connection, limit)
    tasks = runs.open_tasks(tick.connection, closing, limit) if closing else []
    if tasks:
        cancel_tasks(tick, tasks)
    if len(tasks) < limit:
        code_runs.closed(tick.connection, closing)
