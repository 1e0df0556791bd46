"""Apply the commands of workflow code: the batches that activations report.

A batch is applied only if it comes from the current attempt of the run's turn task, and so only once, even if it is
reported twice or late. All batches of a tick are applied together, with one statement per kind of command.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from orchestrator.domain.code import commands, history
from orchestrator.domain.code.activation import Activated, Violation, json_text
from orchestrator.domain.code.attributes import Scalar
from orchestrator.domain.code.commands import Command
from orchestrator.domain.code.ends import (
    ENCODED_NONE,
    PARENT_ASKS,
    REFUSABLE_ENDS,
    CommandsByKind,
    end_of,
    ends_too_early,
    kept_of_refused,
    with_seen,
)
from orchestrator.domain.code.history import HistoryItem
from orchestrator.domain.runs import Nesting
from orchestrator.domain.states import RunState, TaskState
from orchestrator.domain.tasks.task import Succeeded, TaskError
from orchestrator.scheduler.code import other_runs
from orchestrator.scheduler.code.requests import give_up_promises, meet_promises
from orchestrator.scheduler.code.runs import CodeRuns, ask_to_cancel, mark_stuck, reply
from orchestrator.scheduler.runs.creation import create_runs, full_trees
from orchestrator.scheduler.tasks.creation import cancel_tasks, create_enqueued
from orchestrator.scheduler.transaction import Transaction
from orchestrator.store.code import expectations
from orchestrator.store.code import runs as code_runs
from orchestrator.store.code.expectations import NewPromise, PromiseAnswer
from orchestrator.store.code.taken_turns import Turn, suspend
from orchestrator.store.code.turns import (
    ALL_EVENTS,
    LastTurn,
    append_last,
    once_refused,
    unseen_messages,
    with_messages,
)
from orchestrator.store.runs import ancestry
from orchestrator.store.runs import transitions as runs
from orchestrator.store.runs.creation import NewRun
from orchestrator.store.tasks import transitions
from orchestrator.store.tasks.transitions import AttemptEnd, Moved, Success


def apply_activations(
    tx: Transaction,
    code: CodeRuns,
    reports: Sequence[tuple[str, Activated]],
    inline_result: int,
    *,
    are_next: bool = False,
) -> None:
    """Apply the reports of activations.

    With `are_next`, workers took the turns on their own: these were never dispatched, and use no slot.
    """
    turns: list[Turn] = []
    ends: list[tuple[str, Activated]] = []
    stuck: list[tuple[bytes, int, Violation]] = []
    absent: list[transitions.Requeue] = []
    batches: dict[bytes, Sequence[Command]] = {}
    for worker, report in reports:
        if report.missing:
            absent.append(transitions.Requeue(report.id, report.attempt, code.pause(report.id, report.attempt)))
        elif report.stuck is not None:
            stuck.append((report.id, report.attempt, report.stuck))
        elif report.commands and isinstance(report.commands[-1], commands.EndCommand):
            ends.append((worker, report))
            batches[report.id] = report.commands
        else:
            turns.append(turn_of(worker, report))
            batches[report.id] = report.commands
    accepted: set[bytes] = set()
    answers = [answer for _, report in reports for answer in report.answers]
    if turns:
        moved = _as_counted(suspend(tx.connection, turns, tx.now), are_next)
        tx.result.note(moved, by_worker=True)
        accepted.update(task.id for task in moved)
        code.took_turn(tx, [task.id for task in moved], {answer.id for answer in answers})
    if ends:
        before, refused, unfit = _append_last(tx, [report for _, report in ends])
        if refused:
            late = [item for item in ends if item[1].id in refused]
            batches.update((report.id, kept_of_refused(report)) for _, report in late)
            accepted |= _refuse_ends(tx, code, late, batches, are_next)
        stuck += unfit
        if refused or unfit:
            open_ = refused.union(run for run, _, _ in unfit)
            ends = [item for item in ends if item[1].id not in open_]
        accepted |= _end_turn_tasks(tx, ends, before, inline_result, are_next)
    if absent:
        code.queries.requeue(tx.result, ((row.id, row.attempt) for row in absent))
        tx.result.wake.delayed |= any(row.delay > 0 for row in absent)
        tx.result.note(transitions.requeue(tx.connection, absent, tx.now), by_worker=True)
    if stuck:
        code.queries.forget(tx.result, [run for run, _, _ in stuck])
        mark_stuck(tx, stuck)
    tx.result.code.preferred_workers.update((report.awaits, worker) for worker, report in reports if report.awaits)
    carry_out(tx, code, {run: batch for run, batch in batches.items() if run in accepted})
    code.answer(tx, [PromiseAnswer(answer.id, answer.result, answer.error) for answer in answers])


def _as_counted(moved: list[Moved], are_next: bool) -> list[Moved]:
    """Return turn tasks as if they had been pending, if they were never counted as in flight."""
    return [task._replace(before=TaskState.PENDING) for task in moved] if are_next else moved


def turn_of(worker: str, report: Activated, follows: Succeeded | None = None) -> Turn:
    seen = report.cached == report.attempt
    events: list[HistoryItem] = [] if follows is None else [history.TaskCompleted(follows.id, follows.result)]
    if seen:
        events.append(history.ActivationApplied(report.through, report.accepted))
    events.extend(history.record(command) for command in report.commands)
    opened = sum(isinstance(command, _OPENING) for command in report.commands)
    waiting = None if report.waiting is None else json_text(report.waiting)
    return Turn(
        *(report.id, report.attempt, report.through, seen, report.cached, worker, events, opened),
        waiting=waiting,
        version=report.version,
        follows=report.follows or None,
        at=report.at,
    )


_OPENING = (commands.ScheduleTask, commands.StartChildRun)


def _append_last(
    tx: Transaction, reports: Sequence[Activated]
) -> tuple[dict[bytes, int], set[bytes], list[tuple[bytes, int, Violation]]]:
    """Record the last batches of runs whose code has ended.

    Return the runs with the number of their last event before; the runs whose end is refused because of messages that
    the code has not seen; and the runs that are stuck.
    """
    current: dict[bytes, Activated] = {}
    for report in reports:
        if report.id not in current or current[report.id].attempt <= report.attempt:
            current[report.id] = report
    before = append_last(tx.connection, [_last_turn(report) for report in current.values()], tx.now)
    late = {run: report for run, report in current.items() if run not in before}
    if not late:
        return before, set(), []
    unseen = unseen_messages(tx.connection, ((run, report.through) for run, report in late.items()))
    waiting = with_messages(tx.connection, list(late))
    refused = {run for run in unseen if ends_too_early(late[run], unseen[run], has_messages=run in waiting)}
    old = [run for run, report in late.items() if report.refusals < 0]
    unfit = once_refused(tx.connection, old) if old else []
    stuck = [(run, late[run].attempt, _OUTDATED) for run in unfit]
    counts = [_last_turn(late[run])._replace(through=ALL_EVENTS) for run in late.keys() - refused - {*unfit}]
    return before | (append_last(tx.connection, counts, tx.now) if counts else {}), refused, stuck


_OUTDATED = Violation(
    0,
    "WorkerOutdated",
    "A worker of the previous release cannot replay this history, in which the end of the run was refused because of "
    "unseen messages. Update the workers.",
)


def _last_turn(report: Activated) -> LastTurn:
    records = [history.record(command) for command in report.commands]
    events = [history.ActivationApplied(report.through, report.accepted), *records]
    may_wait = isinstance(_end_command(report), REFUSABLE_ENDS) or report.refusals < 0
    return LastTurn(report.id, report.attempt, report.through if may_wait else ALL_EVENTS, events)


def _end_command(report: Activated) -> commands.EndCommand:
    last = report.commands[-1]
    assert isinstance(last, commands.EndCommand)
    return last


def _refuse_ends(
    tx: Transaction,
    code: CodeRuns,
    reports: Sequence[tuple[str, Activated]],
    kept: Mapping[bytes, Sequence[Command]],
    are_next: bool,
) -> set[bytes]:
    """Replay code that ended before it saw some messages. The history records the refused end and the `kept` commands.

    Return the runs whose turns were current.
    """
    turns = [
        Turn(
            *(report.id, report.attempt, 0, False, 0, worker),
            events=[history.ActivationApplied(0, ended=report.through), *map(history.record, kept[report.id])],
            opened=sum(isinstance(command, _OPENING) for command in kept[report.id]),
        )
        for worker, report in reports
    ]
    moved = _as_counted(suspend(tx.connection, turns, tx.now), are_next)
    tx.result.note(moved, by_worker=True)
    code.took_turn(tx, [task.id for task in moved], {answer.id for _, report in reports for answer in report.answers})
    return {task.id for task in moved}


def _end_turn_tasks(
    tx: Transaction,
    reports: Sequence[tuple[str, Activated]],
    before: Mapping[bytes, int],
    inline_result: int,
    are_next: bool,
) -> set[bytes]:
    """End the turn tasks of runs whose code has ended. The runs end with them."""
    successes: list[Success] = []
    endings: dict[TaskState, list[AttemptEnd]] = {TaskState.FAILED: [], TaskState.CANCELLED: []}
    errors: dict[bytes, TaskError] = {}
    continuing: dict[bytes, commands.ContinueRun] = {}
    for worker, report in reports:
        last = _end_command(report)
        turn_task = end_of(report.id, last)
        if turn_task.error is not None:
            errors[turn_task.id] = turn_task.error
            reason = turn_task.error.kind if turn_task.state == TaskState.FAILED else "cancelled"
            ending = AttemptEnd(turn_task.id, report.attempt, reason, turn_task.error.to_json(), worker=worker)
            endings[TaskState(turn_task.state)].append(ending._replace(duration=report.duration))
        else:
            successes.append(
                Success(turn_task.id, report.attempt, turn_task.result or ENCODED_NONE, report.duration, worker)
            )
        if isinstance(last, commands.ContinueRun):
            continuing[turn_task.id] = with_seen(last, report.through)
    moved: list[Moved] = []
    if successes:
        moved += transitions.succeed(tx.connection, successes, tx.now)
    for state, rows in endings.items():
        if rows:
            moved += transitions.end(tx.connection, state, rows, tx.now)
    moved = _as_counted(moved, are_next)
    tx.result.note(
        moved,
        results={row.id: row.result for row in successes if row.id not in continuing},
        errors=errors,
        by_worker=True,
        inline_result=inline_result,
    )
    accepted = {task.id for task in moved}
    tx.result.runs.continuing.update((run, command) for run, command in continuing.items() if run in accepted)
    seen = ((report.id, report.through) for _, report in reports if report.id in accepted)
    tx.result.runs.last_seen.update((run, through) for run, through in seen if before.get(run, 0) > through)
    return accepted


def _child(run: bytes, command: commands.StartChildRun) -> NewRun:
    started = history.RunStarted(
        command.workflow, command.version or 0, command.payload, command.queue or "default", run
    )
    return code_runs.new_run(command.id, [started], pinned=command.pinned)._replace(
        name=command.name or command.workflow,
        timeout=command.timeout,
        parent_run=run,
        parent_position=command.ordinal,
        detached=command.detached,
        terminates=command.terminates,
    )


def carry_out(tx: Transaction, code: CodeRuns, batches: Mapping[bytes, Sequence[Command]]) -> None:
    """Carry out the commands of accepted batches."""
    requested = CommandsByKind(batches)
    children = [_child(run, command) for run, command in requested.of(commands.StartChildRun)]
    parents = Counter(child.parent_run for child in children)
    outliving = {
        run: {"total": parents[run], "opened": parents[run]}
        for run, batch in batches.items()
        if parents[run] and isinstance(batch[-1], commands.EndCommand)
    }
    if outliving:
        runs.count(tx.connection, outliving)
    create_enqueued(tx, [command.task for _, command in requested.of(commands.ScheduleTask)])
    if cancelled := [command.id for _, command in requested.of(commands.CancelTask)]:
        cancel_tasks(tx, cancelled)
    if timers := requested.of(commands.StartTimer):
        now = tx.now.timestamp()
        expectations.start_timers(tx.connection, [(run, timer.id, timer.due(now)) for run, timer in timers])
        tx.result.wake.delayed = True
    if cancelled_timers := [(run, command.id) for run, command in requested.of(commands.CancelTimer)]:
        expectations.forget_timers(tx.connection, cancelled_timers)
    promises, waits = other_runs.split(
        [NewPromise(run, item.id, item.name, item.ordinal) for run, item in requested.of(commands.CreatePromise)]
    )
    given_up = [(run, command.id) for run, command in requested.of(commands.CancelPromise)]
    if promises:
        expectations.create_promises(tx.connection, promises)
    if given_up:
        give_up_promises(tx, given_up)
    if promises:
        gone_promises = set(given_up)
        meet_promises(tx, [item for item in promises if (item.run, item.id) not in gone_promises])
    if children:
        _start_children(tx, code.nesting, children)
    if cancelled := [command.id for _, command in requested.of(commands.CancelChildRun)]:
        ask_to_cancel(tx, code_runs.latest(tx.connection, cancelled).values(), PARENT_ASKS)
    if waits := [item for item in waits if (item.run, item.id) not in given_up]:
        other_runs.wait(tx, code, waits)
    if signals := requested.of(commands.SignalRun):
        ending = {run for run, batch in batches.items() if batch and isinstance(batch[-1], commands.EndCommand)}
        other_runs.send(tx, code, signals, ending)
    if changed := _attributes(requested):
        code_runs.set_attributes(tx.connection, changed)
    reply(tx, [PromiseAnswer(item.id, item.result, item.error) for _, item in requested.of(commands.AnswerUpdate)])


def _attributes(requested: CommandsByKind) -> dict[bytes, dict[str, Scalar | None]]:
    """Return the attributes set by the code of each run; None for removed ones."""
    changed: dict[bytes, dict[int, tuple[str, Scalar | None]]] = defaultdict(dict)
    for run, item in requested.of(commands.SetState):
        if item.attribute:
            changed[run][item.ordinal] = item.key, msgspec.json.decode(item.attribute)
    for run, command in requested.of(commands.ClearState):
        if command.is_attribute:
            changed[run][command.ordinal] = command.key, None
    return {run: dict(by_ordinal[ordinal] for ordinal in sorted(by_ordinal)) for run, by_ordinal in changed.items()}


def _start_children(tx: Transaction, nesting: Nesting, new_runs: Sequence[NewRun]) -> None:
    """Start child runs. Those that are nested too deeply, or are too many, fail."""
    parent_depths = ancestry.roots_and_depths(
        tx.connection, {child.parent_run for child in new_runs if child.parent_run is not None}
    )
    children = [_with_depth(child, parent_depths) for child in new_runs]
    refused = {
        child.id: nesting.too_deep(child.workflow or "", child.depth)
        for child in children
        if child.depth is not None and child.depth > nesting.depth
    }
    full = full_trees(tx, [child for child in children if child.id not in refused], nesting)
    for child in children:
        if child.root in full:
            refused.setdefault(child.id, nesting.too_many(child.workflow or ""))
        if child.id in refused and child.parent_run is not None:
            failed = history.ChildFailed(child.id, TaskError("InvalidWorkflow", refused[child.id]))
            tx.result.runs.child_ended(child.parent_run, RunState.FAILED, failed)
    create_runs(tx, [child for child in children if child.id not in refused])


def _with_depth(child: NewRun, places: Mapping[bytes, tuple[bytes, int]]) -> NewRun:
    root, depth = places.get(child.parent_run or b"", (None, -1))
    return child._replace(root=root, depth=depth + 1)
