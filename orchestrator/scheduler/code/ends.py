"""The end of tasks in runs of code, and of the runs themselves: with their own tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from orchestrator.domain.code import history
from orchestrator.domain.code.history import Outcome
from orchestrator.domain.code.promises import Resolution, resolutions
from orchestrator.domain.code.succession import estate, is_deaf
from orchestrator.domain.ids import successor_id
from orchestrator.domain.runs.happened import OwnEnd
from orchestrator.domain.runs.verdict import RAN_TOO_LONG
from orchestrator.domain.states import RunState, TaskState
from orchestrator.domain.tasks.task import TaskError
from orchestrator.scheduler.code.runs import ask_to_cancel
from orchestrator.scheduler.tasks.creation import cancel_tasks
from orchestrator.scheduler.tick import Tick
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


def end_runs(tick: Tick, some: Sequence[OwnEnd]) -> None:
    """End the runs whose own tasks have ended: cancel what is open in them, and tell all who wait for them.

    A run that goes on in another has not ended for anyone but the clients, who follow it.
    """
    ends = {end.id: end for end in some}
    states = ((run, RunState(end.state), _reason(tick, run)) for run, end in ends.items())
    continuing = [run for run in ends if run in tick.continuing]
    heirs = _heirs(tick, continuing) if continuing else {}
    ended = code_runs.end(tick.connection, states, tick.now)
    tick.has_wishes = tick.has_wishes or any(run.open for run in ended)  # the agenda says that they are closing
    if heirs:
        _continue(tick, [heirs[run.id] for run in ended if run.id in heirs])
    # A child may have continued in this very tick, so this comes after the successors are there.
    with_children = code_runs.children(tick.connection, [run.id for run in ended if run.open])
    if with_children:
        ask_to_cancel(tick, with_children, "its parent has ended")
    over = [run for run in ended if run.id not in heirs and run.id not in tick.resetting]
    tick.told.extend(
        (run.parent, run.state, told_to_parent(run.child_id, run.state, ends[run.id]))
        for run in over
        if run.parent is not None
    )
    tick.ended.extend(_announced(tick, run, ends[run.id]) for run in ended)
    if over:
        tick.triggers.code_ended(tick, over)
    tick.code.ended(tick, {run: heirs[run].new.id if run in heirs else run for run in ends})
    for run in continuing:
        del tick.continuing[run]


def _reason(tick: Tick, run: bytes) -> str | None:
    if run in tick.continuing:
        return code_runs.CONTINUED
    return code_runs.RESET if run in tick.resetting else None


def _announced(tick: Tick, run: EndedRun, end: OwnEnd) -> Ended:
    """Return what clients hear. A success without a result tells them to look, and they find where a run goes on."""
    if run.id in tick.resetting:
        return Ended(run.id, RunState.SUCCESS)
    return Ended(run.id, run.state, end.inline, _error(run.state, end))


def told_to_parent(child: bytes, state: str, end: OwnEnd) -> Outcome:
    """Return what a parent learns of the end of its child, by the id that it knows it by."""
    if state == RunState.SUCCESS:
        return history.ChildCompleted(child, end.result or _NOTHING)
    if state == RunState.CANCELLED:
        return history.ChildCancelled(child)
    return history.ChildFailed(child, _error(state, end) or TaskError("Failed", "The run failed."))


def _error(state: str, end: OwnEnd) -> TaskError | None:
    """Return why a run ended as it did. One that was cancelled because its time was up has failed."""
    return RAN_TOO_LONG if state == RunState.FAILED and end.state == TaskState.CANCELLED else end.error


class _Heir(NamedTuple):
    """A run in which another goes on."""

    new: NewCodeRun
    resolutions: list[Resolution]
    """What people have said of promises, and the code has not learnt."""


def _heirs(tick: Tick, ids: Sequence[bytes]) -> dict[bytes, _Heir]:
    """Return the runs in which others go on, with everything that was said to those and their code has not heard."""
    said = histories.said(tick.connection, [(run, tick.continuing[run].seen) for run in ids])
    estates = {run: estate(said.get(run, []), tick.continuing[run]) for run in ids}
    settled = [run for run in ids if estates[run].settled]
    created = histories.promises(tick.connection, settled) if settled else {}
    left = {run: resolutions(estates[run].settled, created.get(run, ())) for run in ids}
    for kept in store.of_runs(tick.connection, ids):
        if kept.number:
            left[kept.run].append(kept.what)
    heirs: dict[bytes, _Heir] = {}
    for old in code_runs.predecessors(tick.connection, ids, tick.now):
        payload = tick.continuing[old.id].payload
        started = history.RunStarted(old.workflow, old.version, payload, old.queue, old.parent, old.id)
        new = NewCodeRun(
            successor_id(old.id),
            [started, *estates[old.id].facts],
            old.timeout,
            old.position,
            old.child_id,
            old.detached,
            msgspec.json.encode(old.tags).decode(),
            old.pinned,
            parent=old.parent,
            reason=old.reason,
            cancelling=old.cancelling or is_deaf(said.get(old.id, []), tick.continuing[old.id], old.began_at),
            schedule=old.schedule,
            fire_time=old.fire_time,
            name=old.name,
        )
        heirs[old.id] = _Heir(new, left[old.id])
    return heirs


def _continue(tick: Tick, heirs: Sequence[_Heir]) -> None:
    """Start the runs in which others go on."""
    new = [heir.new for heir in heirs]
    code_runs.start(tick.connection, new, tick.now)
    run_keys.pass_on(tick.connection, [(run.started.continued_from or b"", run.id) for run in new])
    kept = [kept for heir in heirs for kept in store.numbered(heir.new.id, heir.resolutions)]
    if kept:
        store.keep(tick.connection, kept)
    tick.delayed = tick.delayed or any(run.timeout is not None for run in new)
    tick.has_wishes = tick.has_wishes or any(run.cancelling for run in new)  # the agenda says so


def close_runs(tick: Tick, limit: int) -> None:
    """Cancel a slice of what is open in runs that have ended."""
    closing = code_runs.closing(tick.connection, limit)
    tasks = cancels.open_tasks(tick.connection, closing, limit) if closing else []
    if tasks:
        cancel_tasks(tick, tasks)
    if len(tasks) < limit:
        code_runs.closed(tick.connection, closing)
