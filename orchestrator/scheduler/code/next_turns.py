"""Apply turns that workers take on their own when a task succeeds (`domain/code/activation.py`).

Such a turn counts only if its code has seen every earlier event. Otherwise, the success is delivered in an activation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from orchestrator.domain.code import commands, history
from orchestrator.domain.code.activation import Activated
from orchestrator.domain.tasks.outcomes import Report
from orchestrator.domain.tasks.task import Succeeded
from orchestrator.scheduler.code.batches import apply_activations, carry_out, turn_of
from orchestrator.scheduler.code.runs import CodeRuns
from orchestrator.scheduler.tasks.creation import create_enqueued
from orchestrator.scheduler.transaction import Transaction
from orchestrator.store.code import histories
from orchestrator.store.code.taken_turns import NextTurn, step, take_next
from orchestrator.store.tasks.transitions import Success


class Step(NamedTuple):
    """A task that succeeded, and the turn that its worker took next, in which the code waits again."""

    worker: str
    success: Succeeded
    turn: Activated


def steps_of(
    tx: Transaction, code: CodeRuns, reports: Iterable[Report], turns: Sequence[tuple[str, Activated]]
) -> dict[bytes, Step]:
    """Return the steps among the reports, by task, except of runs with pending changes that the code has not seen."""
    following = {turn.follows: (worker, turn) for worker, turn in turns if _only_waits(turn)}
    found: dict[bytes, Step] = {}
    for report in reports:
        if isinstance(report, Succeeded) and report.id in following:
            worker, turn = following[report.id]
            if not code.has_pending_changes(tx, turn.id):
                found[report.id] = Step(worker, report, turn)
    return found


def apply_steps(tx: Transaction, code: CodeRuns, steps: Collection[Step], inline_result: int) -> None:
    """End tasks together with the turns that followed, if their code has seen every earlier event.

    Otherwise, the success is delivered like any other, and the code gets an activation.
    """
    successes = [Success(done.id, done.attempt, done.result, done.duration, worker) for worker, done, _ in steps]
    turns = [turn_of(worker, turn, done) for worker, done, turn in steps]
    moved = step(tx.connection, successes, turns, tx.now, tx.foreseen)
    ended = [task for task in moved if not task.is_turn_task]
    if children := tx.result.note_successes(ended, [done for _, done, _ in steps], inline_result):
        create_enqueued(tx, children)
    asleep = [task for task in moved if task.is_turn_task]
    tx.result.note(asleep, by_worker=True)
    accepted = {task.id for task in asleep}
    for run in accepted:  # the code has seen these changes; its commands cause new ones
        tx.result.runs.changes.pop(run, None)
    tx.result.wake.advanced |= bool(accepted)
    tx.result.outgoing.counted.extend(accepted)
    tx.result.code.preferred_workers.update((turn.awaits, worker) for worker, _, turn in steps if turn.awaits)
    code.took_turn(tx, list(accepted), ())
    carry_out(tx, code, {turn.id: turn.commands for _, _, turn in steps if turn.id in accepted})


def apply_last_turns(
    tx: Transaction, code: CodeRuns, turns: Sequence[tuple[str, Activated]], inline_result: int
) -> None:
    """Apply turns that workers took on their own and in which the code ended."""
    found: dict[bytes, tuple[str, Activated]] = {}
    next_turns: list[NextTurn] = []
    for worker, turn in turns:
        changes = tx.result.runs.changes.get(turn.id)
        if _only_waits(turn) or changes is None or changes.of_flow or code.has_pending_changes(tx, turn.id):
            continue
        match changes.facts:
            case [history.TaskCompleted(id=turn.follows) as fact]:
                found[turn.id] = worker, turn
                next_turns.append(
                    NextTurn(turn.id, turn.attempt, turn.through, turn.at, histories.encoded(fact), worker)
                )
    if not next_turns:
        return
    taken = take_next(tx.connection, next_turns, tx.now)
    for run in taken:
        del tx.result.runs.changes[run]
    apply_activations(tx, code, [found[run] for run in taken], inline_result, are_next=True)
    tx.result.wake.advanced |= bool(taken)
    tx.result.outgoing.counted.extend(taken)


def _only_waits(turn: Activated) -> bool:
    """Return whether the code waits again after a turn, and the turn yielded only commands."""
    is_end = bool(turn.commands) and isinstance(turn.commands[-1], commands.EndCommand)
    return not (is_end or turn.missing or turn.stuck is not None or turn.answers)
