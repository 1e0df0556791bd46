"""Reset code runs: start runs that repeat others up to one of their events (`domain/code/resets.py`).

Everything happens in the tick that takes the request. The old run ends if it is open; the new run gets its history,
promises, chosen id and detached children. An open run goes on in its successor, like a run that continues as new:
parent, senders and waiting clients follow the new run. A run that had already ended stays unchanged. The new run's id
is derived from the request, so a repeated request creates one run.
"""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from orchestrator.domain.code import history
from orchestrator.domain.code.ends import child_outcome
from orchestrator.domain.code.history import Event, Outcome
from orchestrator.domain.code.promises import Resolution
from orchestrator.domain.code.resets import ResetBeginning, reset
from orchestrator.domain.ids import derived_id, run_log_fields, successor_id, to_text
from orchestrator.domain.runs import TIMED_OUT, TurnTaskEnd
from orchestrator.domain.tasks.task import TaskError
from orchestrator.errors import WrongState
from orchestrator.scheduler.code import other_runs
from orchestrator.scheduler.code.runs import CodeRuns, reply
from orchestrator.scheduler.runs.advance import Runs
from orchestrator.scheduler.runs.creation import create_runs
from orchestrator.scheduler.tasks.creation import cancel_now
from orchestrator.scheduler.transaction import Transaction
from orchestrator.store import payloads
from orchestrator.store.code import expectations, histories, resets
from orchestrator.store.code import keys as run_keys
from orchestrator.store.code import runs as code_runs
from orchestrator.store.code.expectations import NewPromise, PromiseAnswer, StoredResolution
from orchestrator.store.code.resets import Handover, ResetRun
from orchestrator.store.inbox import Request
from orchestrator.store.runs import transitions as store
from orchestrator.store.runs.creation import NewRun
from orchestrator.telemetry import get_logger

log = get_logger("scheduler")

MAX_EVENTS = 20_000
"""Events of histories copied in one tick, unless a single history has more."""


class _Planned(NamedTuple):
    """A reset that can be carried out."""

    head: ResetRun
    new: bytes
    begins: ResetBeginning
    timeout: float | None


def reset_runs(tx: Transaction, runs: Runs, items: Sequence[Request]) -> set[int]:
    """Start runs that repeat others up to an event. Return the requests that must wait for a later tick."""
    last = code_runs.latest(tx.connection, {item.target for item in items})
    heads = resets.heads(tx.connection, {*last, *last.values()})
    chosen: dict[bytes, Request] = {}
    parents: set[bytes | None] = set()
    waiting: set[int] = set()
    answers: list[PromiseAnswer] = []
    room = MAX_EVENTS
    for item in items:
        run = item.target
        if (refusal := _refusal(run, last[run], heads)) is not None:
            answers.append(PromiseAnswer(_request(item), None, refusal))
        elif (
            run in chosen or run in parents or heads[run].parent_run in chosen or (chosen and heads[run].events > room)
        ):
            waiting.add(item.id)  # parents and children are not reset in the same tick, but one after another
        else:
            chosen[run] = item
            parents.add(heads[run].parent_run)
            room -= heads[run].events
    planned: list[_Planned] = []
    updates: list[bytes] = []
    found = histories.read_all(tx.connection, chosen) if chosen else {}
    for run, item in chosen.items():
        events, head = found.get(run, []), heads[run]
        if len(events) < head.events:  # retention is deleting the run right now
            answers.append(PromiseAnswer(_request(item), None, _not_found(run)))
            continue
        new = successor_id(run) if head.open else derived_id(_request(item), "reset")
        to, reason = item.body["to"], item.body["reason"]
        try:
            begins = reset(run, events, new, to, tx.now.timestamp(), reason)
        except WrongState as error:
            answers.append(PromiseAnswer(_request(item), None, TaskError("WrongState", str(error))))
            continue
        planned.append(_Planned(head, new, begins, head.timeout or _timeout_of(events)))
        answers.append(PromiseAnswer(_request(item), msgspec.msgpack.encode(to_text(new))))
        updates += [event.what.id for event in events[to:] if isinstance(event.what, history.UpdateRequested)]
        ids, as_what = run_log_fields(run), (to, to_text(new), reason or "no reason")
        log.info("run.reset run=%s history_event=%d new_run=%s reason=%s", *ids.values(), *as_what, extra=ids)
    if planned:
        ending = [plan.head.id for plan in planned if plan.head.open]
        kept = expectations.of_runs(tx.connection, ending)
        _end(tx, runs, ending)
        _start(tx, runs.code, planned, last)
        _keep(tx, planned, kept)
    if updates:  # the new run has no answers to them
        expectations.forget_answers(tx.connection, updates)
    reply(tx, answers)
    return waiting


def _refusal(run: bytes, last: bytes, heads: Mapping[bytes, ResetRun]) -> TaskError | None:
    """Return why a run cannot be reset at any event; None if it can."""
    if run not in heads:
        return _not_found(run)
    if last != run and last in heads and heads[last].open:
        return TaskError(
            "WrongState",
            f"Run {to_text(run)} continued as run {to_text(last)}, which is open: reset that one. The run was reset "
            f"before, or its code continued as a new run.",
        )
    return None


def _not_found(run: bytes) -> TaskError:
    return TaskError("NotFound", f"No run of a workflow as code has the id {to_text(run)}.")


def _timeout_of(events: Sequence[Event]) -> float | None:
    """Return the timeout of a run that has timed out, in seconds."""
    for event in events:
        if event.what == history.RunCancelRequested(TIMED_OUT):
            return event.at - events[0].at
    return None


def _end(tx: Transaction, runs: Runs, ids: list[bytes]) -> None:
    """End open runs by their turn tasks, like all code runs. Their open tasks are cancelled later, in slices."""
    if ids:
        cancel_now(tx, ids)  # a request could cancel the new runs instead
        runs.advance(tx, resetting=ids)


def _start(tx: Transaction, code: CodeRuns, planned: Sequence[_Planned], last: Mapping[bytes, bytes]) -> None:
    """Start the new runs, and move everything that belongs to the old ones."""
    ends, handed_over = _hand_over_children(tx, planned)
    started = create_runs(tx, [_new_run(plan, ends[plan.new]) for plan in planned])
    planned = [plan for plan in planned if plan.new in started]
    for plan in planned:
        payloads.copy_keepers(tx.connection, plan.head.id, plan.new)  # the history refers to them
    promises, waits = other_runs.split(
        [
            NewPromise(plan.new, promise.id, promise.name, promise.ordinal)
            for plan in planned
            for promise in plan.begins.promises
        ]
    )
    expectations.create_promises(tx.connection, promises)
    if waits:
        other_runs.wait(tx, code, waits)
    run_keys.pass_to_successors(tx.connection, [(last[plan.head.id], plan.new) for plan in planned])
    if handed_over:
        store.count(tx.connection, handed_over)


def _keep(tx: Transaction, planned: Sequence[_Planned], kept: Sequence[StoredResolution]) -> None:
    """Keep answers for the new runs to promises that the old runs have not created."""
    early: dict[bytes, list[Resolution]] = defaultdict(list)
    for item in kept:
        if item.number:
            early[item.run].append(item.what)
    rows: list[StoredResolution] = []
    for plan in planned:
        rows += [StoredResolution(plan.new, 0, Resolution(name)) for name in plan.begins.settled]
        rows += expectations.numbered(plan.new, early[plan.head.id])
    if rows:
        expectations.store_resolutions(tx.connection, rows)


def _new_run(plan: _Planned, ends: Sequence[Outcome]) -> NewRun:
    head, begins = plan.head, plan.begins
    new = code_runs.new_run(
        plan.new,
        [*(event.what for event in begins.copy), *begins.facts, *ends],
        version=head.version,
        pinned=head.pinned,
        times=[event.at for event in begins.copy],
    )
    new = head.inherited_by(new, timeout=plan.timeout, begun=head.begun, shown=begins.shown)
    if head.open:
        return new
    # The parent of a run that had ended knows of its end.
    return new._replace(parent_run=None, parent_position=None, child_id=None, schedule=None, lane=None, lane_limit=None)


def _hand_over_children(
    tx: Transaction, planned: Sequence[_Planned]
) -> tuple[dict[bytes, list[Outcome]], dict[bytes, dict[str, int]]]:
    """Make the new runs wait for detached children of the old ones.

    Return the ends of children that have already ended, and the counter changes, by new run.
    """
    facts: dict[bytes, list[Outcome]] = defaultdict(list)
    counters: dict[bytes, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    handovers = [
        Handover(plan.head.id, old, plan.new, new) for plan in planned for old, new in plan.begins.handed_over.items()
    ]
    found = (
        {child.successor_child: child for child in resets.hand_over_children(tx.connection, handovers)}
        if handovers
        else {}
    )
    for handover in handovers:
        child = found.get(handover.successor_child)
        if child is None:
            gone = TaskError("NotFound", "The child was pruned, or a different run waits for it.")
            facts[handover.successor].append(history.ChildFailed(handover.successor_child, gone))
        elif child.task_state is not None:
            turn_task = TurnTaskEnd(child.id, child.task_state, child.result, child.error)
            facts[handover.successor].append(child_outcome(handover.successor_child, child.state, turn_task))
        else:
            for run, by in ((handover.run, -1), (handover.successor, 1)):
                counters[run]["total"] += by
                counters[run]["opened"] += by
    return facts, counters


def _request(item: Request) -> bytes:
    return base64.b64decode(item.body["request"])
