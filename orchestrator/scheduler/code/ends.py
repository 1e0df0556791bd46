"""The end of runs of code: with their turn tasks."""

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
    """A run whose turn task has ended, and that ends with it."""

    turn_task: TurnTaskEnd
    continuing: ContinueRun | None
    """How it goes on in another, if it does."""
    is_reset: bool
    """It ends because another repeats it."""
    heard: int | None = None
    """The last event that its code was shown, if more has happened."""

    @property
    def changes(self) -> RunChanges:
        """Return what is kept of it until the run can be ended."""
        return RunChanges(turn_task_end=self.turn_task, continuing=self.continuing, heard=self.heard)

    @property
    def goes_on(self) -> bool:
        """Whether another run continues with the events of this one."""
        return self.continuing is not None or self.is_reset

    @property
    def reason(self) -> str | None:
        """Return why it ended, for people to see, if that is not how its code did."""
        if self.continuing is not None:
            return CONTINUED
        return RESET if self.is_reset else None


def end_runs(tx: Transaction, ends: Sequence[RunEnd]) -> list[RunRow]:
    """End the runs whose turn tasks have ended, start those in which they go on, and cancel what is open in them."""
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
    over = {run.id for run in ended}
    heard = {end.turn_task.id: end.heard for end in ends if end.heard is not None and not end.goes_on}
    unheard = [(run, number) for run, number in heard.items() if run in over]
    if unheard:
        begin_with(tx, histories.unheard(tx.connection, unheard))
    leaving = [run.id for run in ended if run.open]
    if leaving:
        tx.result.wake.requests = True  # they are reported as closing with the pending work
        # A child may have continued in this very tick, so this comes after the successors are there.
        children = code_runs.children(tx.connection, leaving)
        ask_to_cancel(tx, [child.id for child in children if not child.terminates], PARENT_ENDED)
        cancels.mark(tx.connection, [child.id for child in children if child.terminates], code=True)
    return ended


class _Successor(NamedTuple):
    """A run in which another goes on."""

    of: bytes
    new: NewRun
    resolutions: list[Resolution]
    """Answers to promises that the code has not seen."""


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
        payload, begun = continuing[old.id].payload, said[old.id][0].what
        assert isinstance(begun, history.RunStarted)
        started = history.RunStarted(
            *(old.workflow, old.version, payload, old.queue, old.parent_run, old.id),
            attributes=old.attributes or "",
            first=begun.first or old.id,
        )
        new = code_runs.new_run(successor_id(old.id), [started, *carried[old.id].facts], pinned=old.pinned)
        cancelling = old.cancelling or ignores_cancel(said.get(old.id, []), continuing[old.id], old.began_at)
        new = old.inherited_by(new, reason=old.reason, cancelling=cancelling, begun=True)
        successors[old.id] = _Successor(old.id, new, left[old.id])
    return successors


def _continue(tx: Transaction, successors: Sequence[_Successor]) -> None:
    """Start the runs in which others go on."""
    new = [successor.new for successor in successors]
    create_runs(tx, new)
    run_keys.pass_on(tx.connection, [(successor.of, successor.new.id) for successor in successors])
    kept = [kept for successor in successors for kept in store.numbered(successor.new.id, successor.resolutions)]
    if kept:
        store.keep(tx.connection, kept)
    tx.result.wake.requests |= any(run.cancelling for run in new)  # it is reported with the pending work


def close_runs(tx: Transaction, limit: int) -> None:
    """Cancel a slice of what is open in runs that have ended."""
    closing = code_runs.closing(tx.connection, limit)
    tasks = cancels.open_tasks(tx.connection, closing, limit) if closing else []
    if tasks:
        cancel_tasks(tx, tasks)
    if len(tasks) < limit:
        code_runs.closed(tx.connection, closing)
