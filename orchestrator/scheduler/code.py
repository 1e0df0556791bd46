"""Workflows as code: send activations out, apply what comes back, tell runs what happened.

All of it is batched over the runs of one tick. A batch of commands is applied only if it comes from the current attempt
of the run's own task, so it is applied once, whatever is reported twice or late.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from orchestrator.domain import commands, history
from orchestrator.domain.activation import Activated, Activation, Query, Violation
from orchestrator.domain.commands import Command
from orchestrator.domain.history import Fact
from orchestrator.domain.ids import successor_id, to_text
from orchestrator.domain.states import RunState, TaskState
from orchestrator.domain.task import NewTask, TaskError
from orchestrator.scheduler.fleet import Fleet
from orchestrator.scheduler.tasks import adopt_children, cancel_tasks, error_json
from orchestrator.scheduler.tick import OwnEnd, Tick
from orchestrator.store import code_runs, expectations, histories, runs, transitions
from orchestrator.store.code_runs import EndedRun, NewCodeRun
from orchestrator.store.expectations import Answered, NewPromise
from orchestrator.store.histories import Turn, What
from orchestrator.store.transitions import Claimed, Ending, Moved, Success
from orchestrator.telemetry import get_logger
from orchestrator.transport.codec import LARGEST_MESSAGE, Ended, encode
from orchestrator.transport.keys import private_queue

log = get_logger("scheduler")

LARGEST_HISTORY = LARGEST_MESSAGE // 2
"""Bytes of a history that can still be sent to a worker."""
_NOTHING = b"\xc0"
_CANCELLED = TaskError("Cancelled", "Cancelled by request.")


class CodeRuns:
    """What the leader remembers of runs of code between two ticks: queries on their way, and who was there."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._queries: dict[bytes, dict[bytes, Query]] = defaultdict(dict)
        self._members: frozenset[str] = frozenset()

    def ask(self, tick: Tick, queries: Iterable[tuple[bytes, Query]]) -> None:
        """Have queries answered by the code of runs. One may be lost with a worker; who gets no answer asks again."""
        asked = list(queries)
        free = code_runs.wake(tick.connection, [run for run, _ in asked])
        refused: list[Answered] = []
        for run, query in asked:
            if run in free:
                self._queries[run][query.id] = query
            else:
                error = TaskError("WrongState", f"Run {to_text(run)} cannot be asked: it has ended, or is stuck.")
                refused.append(Answered(query.id, None, error))
        reply(tick, refused)

    def free_stuck(self, tick: Tick, limit: int) -> None:
        """Let stuck runs try again whenever a worker has come or gone: the code may be another now."""
        members = frozenset(self._fleet.beats)
        if members == self._members or not self._fleet.is_in_view:
            return
        self._members = members
        known = sorted({name for _, name in self._fleet.known()})
        freed = code_runs.free(tick.connection, limit, workflows=known) if known else []
        if freed:
            log.info("%d stuck runs try again: the fleet has changed", len(freed))

    # -- out

    def equip(self, tick: Tick) -> None:
        """Put the events to be shown into the claimed activations, and send each to the worker that has its code."""
        claimed = {task.id: task for task in tick.claimed if task.is_activation}
        if not claimed:
            return
        at_home = {run: self._is_at_home(task) for run, task in claimed.items()}
        equipped: dict[bytes, Claimed] = {}
        too_long: list[tuple[bytes, int, Violation]] = []
        for found in histories.unseen(tick.connection, {run: not home for run, home in at_home.items()}):
            queries = list(self._queries.pop(found.id, {}).values())
            activation = Activation(
                found.id, found.workflow, found.version, found.after, found.through, found.events, found.cached, queries
            )
            task, payload = claimed[found.id], encode(activation)
            if len(payload) > LARGEST_HISTORY:
                too_long.append((found.id, task.attempt, _too_long(len(payload))))
                continue
            worker = task.worker if at_home[found.id] and found.after else None
            equipped[found.id] = task._replace(payload=payload, worker=worker)
        tick.claimed = [
            equipped.get(task.id, task) for task in tick.claimed if task.id not in {r for r, _, _ in too_long}
        ]
        if too_long:
            stick(tick, too_long)

    def _is_at_home(self, task: Claimed) -> bool:
        """Say whether the worker that has a run's code in memory can take it on."""
        if task.worker is None or task.alone:
            return False
        beat = self._fleet.beats.get(task.worker)
        return beat is not None and not (beat.draining or beat.doubtful) and beat.running < beat.slots

    @staticmethod
    def stream(task: Claimed) -> str:
        """Return the queue into whose stream a claimed task goes."""
        return private_queue(task.worker) if task.is_activation and task.worker is not None else task.queue


def _too_long(size: int) -> Violation:
    return Violation(
        0,
        "HistoryTooLong",
        f"The history has {size:,} bytes, and at most {LARGEST_HISTORY:,} can be sent to a worker. "
        f"Let the workflow continue_as_new earlier.",
    )


# -- back


def apply_activations(tick: Tick, reports: Sequence[tuple[str, Activated]], inline_result: int) -> None:
    """Apply what the code of runs has commanded."""
    turns: list[Turn] = []
    ends: list[tuple[str, Activated]] = []
    stuck: list[tuple[bytes, int, Violation]] = []
    absent: list[transitions.Again] = []
    batches: dict[bytes, list[Command]] = {}
    for worker, report in reports:
        if report.missing:
            absent.append(transitions.Again(report.id, report.attempt))
        elif report.stuck is not None:
            stuck.append((report.id, report.attempt, report.stuck))
        elif report.commands and isinstance(report.commands[-1], commands.End):
            ends.append((worker, report))
            batches[report.id] = report.commands
        else:
            turns.append(_turn(worker, report))
            batches[report.id] = report.commands
    accepted: set[bytes] = set()
    if turns:
        moved = histories.suspend(tick.connection, turns, tick.now)
        tick.note(moved, by_worker=True)
        accepted.update(task.id for task in moved)
    if ends:
        accepted |= _end_own_tasks(tick, ends, inline_result)
    if absent:
        tick.note(transitions.again(tick.connection, absent, tick.now), by_worker=True)
    if stuck:
        stick(tick, stuck)
    _carry_out(tick, {run: batch for run, batch in batches.items() if run in accepted})
    answers = [answer for _, report in reports for answer in report.answers]
    reply(tick, [Answered(answer.id, answer.result, answer.error) for answer in answers])


def _turn(worker: str, report: Activated) -> Turn:
    seen = report.cached == report.attempt
    events: list[What] = [history.ActivationApplied(report.through)] if seen else []
    events.extend(history.record(command) for command in report.commands)
    opened = sum(isinstance(command, _OPENING) for command in report.commands)
    return Turn(report.id, report.attempt, report.through, seen, report.cached, worker, events, opened)


_OPENING = (commands.ScheduleTask, commands.StartChildRun)


def _end_own_tasks(tick: Tick, reports: Sequence[tuple[str, Activated]], inline_result: int) -> set[bytes]:
    """End the own tasks of runs whose code has ended, as it did, and record its last batch; the runs end with them."""
    successes: list[Success] = []
    endings: dict[TaskState, list[Ending]] = {TaskState.FAILED: [], TaskState.CANCELLED: []}
    errors: dict[bytes, TaskError] = {}
    events: dict[bytes, list[What]] = {}
    for worker, report in reports:
        last = report.commands[-1]
        if isinstance(last, commands.FailRun):
            errors[report.id] = last.error
            ending = Ending(report.id, report.attempt, last.error.kind, error_json(last.error), worker=worker)
            endings[TaskState.FAILED].append(ending._replace(duration=report.duration))
        elif isinstance(last, commands.CancelRun):
            errors[report.id] = _CANCELLED
            ending = Ending(report.id, report.attempt, "cancelled", error_json(_CANCELLED), worker=worker)
            endings[TaskState.CANCELLED].append(ending._replace(duration=report.duration))
        else:
            if isinstance(last, commands.ContinueRun):
                tick.continuing[report.id] = last
            result = last.result if isinstance(last, commands.CompleteRun) else _NOTHING
            successes.append(Success(report.id, report.attempt, result, report.duration, worker))
        records = [history.record(command) for command in report.commands]
        events[report.id] = [history.ActivationApplied(report.through), *records]
    moved: list[Moved] = []
    if successes:
        moved += transitions.succeed(tick.connection, successes, tick.now)
    for state, rows in endings.items():
        if rows:
            moved += transitions.end(tick.connection, state, rows, tick.now)
    tick.note(
        moved,
        results={row.id: row.result for row in successes if row.id not in tick.continuing},
        errors=errors,
        by_worker=True,
        inline_result=inline_result,
    )
    accepted = {task.id for task in moved}
    if accepted:
        histories.append(
            tick.connection, {run: some for run, some in events.items() if run in accepted}, tick.now, wake=False
        )
    return accepted


class _Wanted:
    """What the batches of a tick ask for, by kind, so that each kind is one statement."""

    def __init__(self) -> None:
        self.tasks: list[NewTask] = []
        self.cancelled_tasks: list[bytes] = []
        self.timers: list[tuple[bytes, bytes, float]] = []
        self.forgotten_timers: list[tuple[bytes, bytes]] = []
        self.promises: list[NewPromise] = []
        self.forgotten_promises: list[tuple[bytes, bytes]] = []
        self.children: list[NewCodeRun] = []
        self.cancelled_children: list[bytes] = []
        self.answers: list[Answered] = []

    def add(self, run: bytes, command: Command) -> None:
        """Take a command of a run that goes on."""
        match command:
            case commands.ScheduleTask(task=task):
                self.tasks.append(task)
            case commands.CancelTask(id=id):
                self.cancelled_tasks.append(id)
            case commands.StartTimer(id=id, seconds=seconds, since=since):
                self.timers.append((run, id, since + seconds))
            case commands.CancelTimer(id=id):
                self.forgotten_timers.append((run, id))
            case commands.CreatePromise(id=id, name=name, ordinal=ordinal):
                self.promises.append(NewPromise(run, id, name, ordinal))
            case commands.CancelPromise(id=id):
                self.forgotten_promises.append((run, id))
            case commands.StartChildRun():
                self.children.append(_child(run, command))
            case commands.CancelChildRun(id=id):
                self.cancelled_children.append(id)
            case commands.AnswerUpdate(id=id, result=result, error=error):
                self.answers.append(Answered(id, result, error))
            case _:
                pass  # operations, state and patches are remembered by their record alone

    def add_last(self, run: bytes, command: Command) -> int:
        """Take a command of a run that ends with it: only what outlives the run counts; return what is counted."""
        if isinstance(command, commands.StartChildRun) and command.detached:
            self.children.append(_child(run, command))
            return 1
        if isinstance(command, commands.AnswerUpdate):
            self.answers.append(Answered(command.id, command.result, command.error))
        return 0


def _child(run: bytes, command: commands.StartChildRun) -> NewCodeRun:
    started = history.RunStarted(
        command.workflow, command.version or 0, command.payload, command.queue or "default", run
    )
    return NewCodeRun(command.id, [started], command.timeout, command.ordinal, None, command.detached)


def _carry_out(tick: Tick, batches: Mapping[bytes, Sequence[Command]]) -> None:
    """Do what the accepted batches ask for."""
    wanted = _Wanted()
    outliving: dict[bytes, dict[str, int]] = {}
    for run, batch in batches.items():
        if batch and isinstance(batch[-1], commands.End):
            counted = sum(wanted.add_last(run, command) for command in batch)
            if counted:
                outliving[run] = {"total": counted, "opened": counted}
        else:
            for command in batch:
                wanted.add(run, command)
    if outliving:
        runs.count(tick.connection, outliving)
    if wanted.tasks:
        adopt_children(tick, wanted.tasks)
    if wanted.cancelled_tasks:
        cancel_tasks(tick, wanted.cancelled_tasks)
    if wanted.timers:
        expectations.start_timers(tick.connection, wanted.timers)
        tick.delayed = True
    if wanted.forgotten_timers:
        expectations.forget_timers(tick.connection, wanted.forgotten_timers)
    if wanted.promises:
        expectations.create_promises(tick.connection, wanted.promises)
    if wanted.forgotten_promises:
        expectations.forget_promises(tick.connection, wanted.forgotten_promises)
    if wanted.children:
        code_runs.start(tick.connection, wanted.children, tick.now)
        tick.delayed = tick.delayed or any(child.timeout is not None for child in wanted.children)
    if wanted.cancelled_children:
        ask_to_cancel(tick, wanted.cancelled_children, "its parent asks for it")
    reply(tick, wanted.answers)


# -- facts


def tell(tick: Tick, facts: Mapping[bytes, Sequence[Fact]]) -> set[bytes]:
    """Tell runs what happened; return those that were open to hear it."""
    return histories.append(tick.connection, facts, tick.now) if facts else set()


def ask_to_cancel(tick: Tick, ids: Iterable[bytes], reason: str) -> None:
    """Ask runs to cancel themselves."""
    tell(tick, {run: [history.RunCancelRequested(reason)] for run in ids})


def fire_timers(tick: Tick, limit: int) -> None:
    """Tell runs of a slice of the timers that are due, and of their own time if that is up."""
    facts: dict[bytes, list[Fact]] = defaultdict(list)
    for run, timer in expectations.fire_timers(tick.connection, tick.now, limit):
        facts[run].append(history.TimerFired(timer))
    for run in code_runs.time_out(tick.connection, tick.now, limit):
        facts[run].append(history.RunCancelRequested(runs.TIMED_OUT))
    tell(tick, facts)


def reply(tick: Tick, answers: Sequence[Answered]) -> None:
    """Answer requests, durably, and tell whoever waits."""
    if answers:
        expectations.answer(tick.connection, answers, tick.now)
        for answer in answers:
            state = RunState.FAILED if answer.error is not None else RunState.SUCCESS
            tick.ended.append(Ended(answer.id, state, answer.result, answer.error))


def stick(tick: Tick, reasons: Sequence[tuple[bytes, int, Violation]]) -> None:
    """Note that the code of runs cannot go on, for people to see. They have not failed."""
    rows = [(run, attempt, violation_json(violation)) for run, attempt, violation in reasons]
    moved = code_runs.stick(tick.connection, rows)
    tick.note(moved, by_worker=True)
    messages = {run: violation.message for run, _, violation in reasons}
    for task in moved:
        log.error("run %s is stuck: %s", to_text(task.id), messages[task.id])


def violation_json(violation: Violation) -> str:
    """Return why a run is stuck as it is stored."""
    fields = {name: getattr(violation, name) for name in violation.__struct_fields__}
    return msgspec.json.encode(fields).decode()


# -- ends


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
    states = (
        (run, RunState(end.state), code_runs.CONTINUED if run in tick.continuing else None) for run, end in ends.items()
    )
    ended = code_runs.end(tick.connection, states, tick.now)
    tick.has_wishes = tick.has_wishes or any(run.open for run in ended)  # the agenda says that they are closing
    continued = [run.id for run in ended if run.id in tick.continuing]
    finished = [run for run in ended if run.id not in tick.continuing]
    with_children = code_runs.children(tick.connection, [run.id for run in finished if run.open])
    if with_children:
        ask_to_cancel(tick, with_children, "its parent has ended")
    tick.told.extend(
        (run.parent, run.state, _told_to_parent(run, ends[run.id])) for run in finished if run.parent is not None
    )
    if continued:
        _continue(tick, continued)


def _told_to_parent(run: EndedRun, end: OwnEnd) -> Fact:
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
