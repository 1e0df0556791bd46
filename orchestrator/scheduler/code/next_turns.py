"""Apply the turns that workers take by themselves when a step succeeds: `domain/code/activation.py` says when.

A turn counts if its code has seen what comes next indeed. Where it has not, the success is told to the run like any
other, and its code is sent an activation.
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
    """A task that has succeeded, and the turn that its worker took after it, in which the code waits again."""

    worker: str
    success: Succeeded
    turn: Activated


def steps_of(
    tx: Transaction, code: CodeRuns, reports: Iterable[Report], turns: Sequence[tuple[str, Activated]]
) -> dict[bytes, Step]:
    """Return the steps among reports, by task; not of runs with pending changes, which their code has not seen."""
    following = {turn.follows: (worker, turn) for worker, turn in turns if _only_waits(turn)}
    found: dict[bytes, Step] = {}
    for report in reports:
        if isinstance(report, Succeeded) and report.id in following:
            worker, turn = following[report.id]
            if not code.has_pending_changes(tx, turn.id):
                found[report.id] = Step(worker, report, turn)
    return found


def apply_steps(tx: Transaction, code: CodeRuns, steps: Collection[Step], inline_result: int) -> None:
    """End steps, and apply the turns that followed, as far as their code has seen what comes next.

    Where it has not, the success is told to the run like any other, and its code is sent an activation.
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
    for run in accepted:  # their code has seen what happened; what the commands bring about is new
        tx.result.runs.changes.pop(run, None)
    tx.result.wake.advanced |= bool(accepted)
    tx.result.outgoing.counted.extend(accepted)
    tx.result.code.near.update((turn.awaits, worker) for worker, _, turn in steps if turn.awaits)
    code.took_turn(tx, list(accepted), ())
    carry_out(tx, code, {turn.id: turn.commands for _, _, turn in steps if turn.id in accepted})


def apply_last_turns(
    tx: Transaction, code: CodeRuns, turns: Sequence[tuple[str, Activated]], inline_result: int
) -> None:
    """Apply the turns that workers have taken when steps succeeded and in which the code has ended, likewise."""
    found: dict[bytes, tuple[str, Activated]] = {}
    given: list[NextTurn] = []
    for worker, turn in turns:
        changes = tx.result.runs.changes.get(turn.id)
        if _only_waits(turn) or changes is None or changes.of_flow or code.has_pending_changes(tx, turn.id):
            continue
        match changes.facts:
            case [history.TaskCompleted(id=turn.follows) as fact]:
                found[turn.id] = worker, turn
                given.append(NextTurn(turn.id, turn.attempt, turn.through, turn.at, histories.encoded(fact), worker))
    if not given:
        return
    taken = take_next(tx.connection, given, tx.now)
    for run in taken:
        del tx.result.runs.changes[run]
    apply_activations(tx, code, [found[run] for run in taken], inline_result, are_next=True)
    tx.result.wake.advanced |= bool(taken)
    tx.result.outgoing.counted.extend(taken)


def _only_waits(turn: Activated) -> bool:
    """Say whether the code waits again after a turn, and the turn has given nothing but commands."""
    is_end = bool(turn.commands) and isinstance(turn.commands[-1], commands.EndCommand)
    return not (is_end or turn.missing or turn.stuck is not None or turn.answers)
