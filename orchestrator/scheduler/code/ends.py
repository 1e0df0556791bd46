"""End code runs together with their turn tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from orchestrator.domain.code import history
from orchestrator.domain.code.commands import ContinueRun
from orchestrator.domain.code.ends import PARENT_ENDED, carried_over, ignores_cancel
from orchestrator.domain.code.promises import Resolution, resolutions
from orchestrator.domain.ids import successor_id
from orchestrator.domain.runs import CONTINUED, RESET, RunChanges, TurnTaskEnd
from orchestrator.domain.states import RunState
from orchestrator.scheduler.code.requests import begin_with
from orchestrator.scheduler.code.runs import ask_to_cancel
from orchestrator.scheduler.runs.creation import create_runs
from orchestrator.scheduler.tasks.creation import cancel_tasks
from orchestrator.scheduler.transaction import Transaction
from orchestrator.store.code import expectations as store
from orchestrator.store.code import histories
from orchestrator.store.code import keys as run_keys
from orchestrator.store.code import runs as code_runs
from orchestrator.store.runs import cancels, transitions
from orchestrator.store.runs.creation import NewRun
from orchestrator.store.runs.transitions import RunRow


class RunEnd(NamedTuple):
    """A run that ends together with its turn task."""

    turn_task: TurnTaskEnd
    continuing: ContinueRun | None
    """The command that continues the run as new, if any."""
    is_reset: bool
    """The run ends because a reset repeats it in a new run."""
    last_seen: int | None = None
    """The last event that the code has seen, if there are later ones."""

    @property
    def changes(self) -> RunChanges:
        """Return the changes to store until the run can be ended."""
        return RunChanges(turn_task_end=self.turn_task, continuing=self.continuing, last_seen=self.last_seen)

    @property
    def has_successor(self) -> bool:
        """Whether another run continues with the events of this one."""
        return self.continuing is not None or self.is_reset

    @property
    def reason(self) -> str | None:
        """Return why the run ended, for display, unless its code simply ended."""
        if self.continuing is not None:
            return CONTINUED
        return RESET if self.is_reset else None


def end_runs(tx: Transaction, ends: Sequence[RunEnd]) -> list[RunRow]:
    """End runs with ended turn tasks, start their successors, and cancel their open tasks and children."""
    continuing = {end.turn_task.id: end.continuing for end in ends if end.continuing is not None}
    successors = _successors(tx, continuing) if continuing else {}
    ended = transitions.end(
        tx.connection, [(end.turn_task.id, RunState(end.turn_task.state), end.reason) for end in ends], tx.now
    )
    if not ended:
        return []
    code_runs.forget(tx.connection, [run.id for run in ended])
    if successors:
        _continue(tx, [successors[run.id] for run in ended if run.id in successors])
    ended_ids = {run.id for run in ended}
    seen = {end.turn_task.id: end.last_seen for end in ends if end.last_seen is not None and not end.has_successor}
    unseen = [(run, number) for run, number in seen.items() if run in ended_ids]
    if unseen:
        begin_with(tx, histories.late_signals(tx.connection, unseen))
    with_open = [run.id for run in ended if run.open]
    if with_open:
        tx.result.wake.requests = True  # the pending work reports them as closing
        # A child may have continued in this tick too, so this comes after the start of successors.
        children = code_runs.children(tx.connection, with_open)
        ask_to_cancel(tx, [child.id for child in children if not child.terminates], PARENT_ENDED)
        cancels.mark_cancelling(tx.connection, [child.id for child in children if child.terminates], code=True)
    return ended


class _Successor(NamedTuple):
    """The new run that continues another."""

    predecessor: bytes
    new: NewRun
    resolutions: list[Resolution]
    """Answers to promises that the code has not seen."""


def _successors(tx: Transaction, continuing: Mapping[bytes, ContinueRun]) -> dict[bytes, _Successor]:
    """Return the successors of runs, with all messages that the code of the old runs has not seen."""
    ids = list(continuing)
    messages = histories.read_since(tx.connection, [(run, end.seen) for run, end in continuing.items()])
    carried = {run: carried_over(messages.get(run, []), end) for run, end in continuing.items()}
    settled = [run for run in ids if carried[run].settled]
    created = histories.promises(tx.connection, settled) if settled else {}
    carried_resolutions = {run: resolutions(carried[run].settled, created.get(run, ())) for run in ids}
    for answer in store.of_runs(tx.connection, ids):
        if answer.number:
            carried_resolutions[answer.run].append(answer.what)
    successors: dict[bytes, _Successor] = {}
    for old in code_runs.predecessors(tx.connection, ids, tx.now):
        payload, begun = continuing[old.id].payload, messages[old.id][0].what
        assert isinstance(begun, history.RunStarted)
        started = history.RunStarted(
            *(old.workflow, old.version, payload, old.queue, old.parent_run, old.id),
            attributes=old.attributes or "",
            first=begun.first or old.id,
        )
        new = code_runs.new_run(successor_id(old.id), [started, *carried[old.id].facts], pinned=old.pinned)
        cancelling = old.cancelling or ignores_cancel(messages.get(old.id, []), continuing[old.id], old.began_at)
        new = old.inherited_by(new, reason=old.reason, cancelling=cancelling, begun=True)
        successors[old.id] = _Successor(old.id, new, carried_resolutions[old.id])
    return successors


def _continue(tx: Transaction, successors: Sequence[_Successor]) -> None:
    new = [successor.new for successor in successors]
    create_runs(tx, new)
    run_keys.pass_to_successors(tx.connection, [(successor.predecessor, successor.new.id) for successor in successors])
    kept = [kept for successor in successors for kept in store.numbered(successor.new.id, successor.resolutions)]
    if kept:
        store.store_resolutions(tx.connection, kept)
    tx.result.wake.requests |= any(run.cancelling for run in new)  # the pending work reports it


def close_runs(tx: Transaction, limit: int) -> None:
    """Cancel a slice of the open tasks of ended runs."""
    closing = code_runs.closing(tx.connection, limit)
    tasks = cancels.open_tasks(tx.connection, closing, limit) if closing else []
    if tasks:
        cancel_tasks(tx, tasks)
    if len(tasks) < limit:
        code_runs.closed(tx.connection, closing)
