"""A leader in memory: it does with commands what the real one does in Postgres, for runs of code workflows only."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Any, get_args

from orchestrator.domain.code import commands, history, resets
from orchestrator.domain.code.activation import Activation, Answer, Query, Violation
from orchestrator.domain.code.ends import child_outcome, end_of, run_state
from orchestrator.domain.code.history import Event
from orchestrator.domain.code.promises import Resolution, resolutions
from orchestrator.domain.code.succession import carried_over, ignores_cancel
from orchestrator.domain.ids import derived_id, successor_id
from orchestrator.domain.runs.verdict import TIMED_OUT
from orchestrator.domain.tasks.task import NewTask, TaskError
from orchestrator.errors import NotFound
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.settings import Settings

_FACTS = get_args(history.Fact)
_TIME = b"time"
"""Stands where something is planned that the run's own time brings about."""


class Run:
    """One run and everything that is open in it."""

    def __init__(self, run_id: bytes, parent: Run | None, detached: bool) -> None:
        self.id = run_id
        self.parent = parent
        self.detached = detached
        self.child_id = run_id
        """The id under which the parent waits for it; a run that continues another takes over its id."""
        self.history: list[Event] = []
        self.tasks: dict[bytes, NewTask] = {}
        self.timers: dict[bytes, float] = {}
        self.promises: dict[bytes, str] = {}
        self.early: list[Resolution] = []
        """What was said of promises that the code has not made yet."""
        self.settled: set[str] = set()
        """Names of promises that are not open any more."""
        self.children: dict[bytes, Run] = {}
        self.answers: dict[bytes, commands.AnswerUpdate] = {}
        self.state: dict[str, bytes] = {}
        self.end: commands.EndCommand | None = None
        self.next: Run | None = None
        """The run that goes on from this one."""
        self.timeout: float | None = None
        """Seconds that it has in all."""
        self.deadline: float | None = None
        """When its time is up, or its grace, if it has been told so."""
        self.timed_out = False
        self.stuck: Violation | None = None
        self.places: list[str] = []
        """Where its code waits."""
        self.attempt = 0
        self.applied = 0
        """The last attempt with events whose report was applied."""
        self.shown = 0
        """The number of the last event that the code has been shown."""

    @property
    def started(self) -> history.RunStarted:
        what = self.history[0].what
        assert isinstance(what, history.RunStarted)
        return what

    @property
    def has_news(self) -> bool:
        """Say whether there is a fact that the code has not been shown."""
        return self.end is None and any(is_fact(event) for event in self.history[self.shown :])


class MemoryLeader:
    """Keeps histories, applies batches, and moves the clock when it is told to."""

    def __init__(self, engine: Engine, find: Callable[[str, int | None], CodeWorkflow[..., Any]], now: float) -> None:
        self._engine = engine
        self._find = find
        self.now = now
        self.grace = Settings.run_timeout_grace
        self.runs: dict[bytes, Run] = {}
        self._due: list[tuple[float, int, Run, bytes, history.Fact | None]] = []
        """What happens when: the run, what must still be open in it by then, and the fact; none for its own time."""
        self._serial = itertools.count()

    def start(
        self,
        started: history.RunStarted,
        run_id: bytes,
        parent: Run | None = None,
        detached: bool = False,
        timeout: float | None = None,
    ) -> Run:
        """Begin a run."""
        run = self.runs[run_id] = Run(run_id, parent, detached)
        self.append(run, started)
        self._give_time(run, timeout)
        return run

    def _give_time(self, run: Run, timeout: float | None) -> None:
        run.timeout = timeout
        if timeout is not None:
            self._set_deadline(run, self.now + timeout)

    def _set_deadline(self, run: Run, deadline: float) -> None:
        run.deadline = deadline
        heapq.heappush(self._due, (deadline, next(self._serial), run, _TIME, None))

    def _time_out(self, run: Run) -> None:
        """Ask a run to cancel itself because its time is up; when its grace is over, too, end it."""
        if run.timed_out:
            self._end(run, commands.CancelRun())
            return
        run.timed_out = True
        self.append(run, history.RunCancelRequested(TIMED_OUT))
        self._set_deadline(run, self.now + self.grace)

    def append(self, run: Run, what: history.HistoryItem) -> None:
        """Append an event to a run's history."""
        run.history.append(Event(len(run.history) + 1, self.now, what))

    def activate(self, run: Run, queries: list[Query] | None = None) -> list[Answer]:
        """Let the code see what is new, and apply what it commands."""
        run.attempt += 1
        has_news = run.has_news
        activation = self._activation(run, queries or [])
        report = self._engine.activate(activation, run.id, run.attempt)
        if report.missing:
            run.applied = 0
            activation = self._activation(run, queries or [])
            report = self._engine.activate(activation, run.id, run.attempt)
        run.stuck = report.stuck
        run.places = report.waiting.places if report.waiting is not None else run.places
        if report.stuck is None:
            run.applied = run.attempt if activation.events else run.applied
            run.shown = report.through
            if has_news:
                self.append(run, history.ActivationApplied(report.through))
            for command in report.commands:
                self.append(run, history.record(command))
                self.apply(run, command)
        return report.answers

    def settle(self, run: Run, task: bytes, outcome: history.TaskCompleted | history.TaskFailed) -> None:
        """Take what came of a task, if anybody still waits for it."""
        if run.tasks.pop(task, None) is not None and run.end is None:
            self.append(run, outcome)

    def plan(self, run: Run, identifier: bytes, seconds: float, fact: history.Fact) -> None:
        """Let a fact become known after some time, if what it is about is still open then."""
        heapq.heappush(self._due, (self.now + seconds, next(self._serial), run, identifier, fact))

    def next_due(self) -> float | None:
        """Return when the next thing happens by itself."""
        while self._due:
            due, _, run, identifier, fact = self._due[0]
            if fact is None and run.end is None and due == run.deadline:
                return due
            if due < math.inf and any(identifier in open for open in (run.timers, run.tasks, run.children)):
                return due
            heapq.heappop(self._due)
        return None

    def fire_next(self) -> bool:
        """Move the clock to the next thing that happens by itself, and let it; False if there is none."""
        due = self.next_due()
        if due is None:
            return False
        self.now = max(self.now, due)
        _, _, run, identifier, fact = heapq.heappop(self._due)
        if fact is None:
            self._time_out(run)
            return True
        for open in (run.timers, run.tasks, run.children):
            open.pop(identifier, None)
        self.append(run, fact)
        return True

    def _activation(self, run: Run, queries: list[Query]) -> Activation:
        whole = run.applied == 0
        events = run.history if whole else [event for event in run.history[run.shown :] if is_fact(event)]
        return Activation(
            run.id,
            run.started.workflow,
            run.started.version,
            after=0 if whole else run.shown,
            through=len(run.history),
            events=list(events),
            cached=run.applied,
            queries=queries,
        )

    def apply(self, run: Run, command: commands.Command) -> None:
        """Do what a command asks for."""
        match command:
            case commands.ScheduleTask(task=task):
                run.tasks[task.id] = task
            case commands.CancelTask(id=id):
                if run.tasks.pop(id, None) is not None:
                    self.append(run, history.TaskCancelled(id))
            case commands.StartTimer(id=id, seconds=seconds, since=since):
                run.timers[id] = since + seconds
                self.plan(run, id, since + seconds - self.now, history.TimerFired(id))
            case commands.CancelTimer(id=id):
                run.timers.pop(id, None)
            case commands.CreatePromise(id=id, name=name):
                run.promises[id] = name
                early = next((one for one in run.early if one.name == name), None)
                if early is not None:
                    run.early.remove(early)
                    self.settle_promise(run, early)
            case commands.CancelPromise(id=id):
                self._give_up_promise(run, id)
            case commands.StartChildRun():
                self._start_child(run, command)
            case commands.CancelChildRun(id=id):
                self.cancel(run.children.get(id))
            case commands.SetState() | commands.ClearState():
                self._note_state(run, history.record(command))
            case commands.SignalRun(run=target, name=name, value=value):
                self._pass_on(self.runs.get(target), history.SignalReceived(name, value))
            case commands.AnswerUpdate(id=id):
                run.answers[id] = command
            case commands.CompleteRun() | commands.FailRun() | commands.CancelRun() | commands.ContinueRun():
                self._end(run, command)
            case _:
                pass  # operations and patches are remembered by their record alone

    def _pass_on(self, run: Run | None, signal: history.SignalReceived) -> None:
        """Hand a signal to the run in which another one goes on; one that has ended does not hear it."""
        while run is not None and run.next is not None:
            run = run.next
        if run is not None and run.end is None:
            self.append(run, signal)

    def settle_promise(self, run: Run, resolution: Resolution) -> bool:
        """Settle the oldest open promise of a name, or keep what was said; False if that comes too late."""
        name = resolution.name
        for identifier, open_name in run.promises.items():
            if open_name == name:
                del run.promises[identifier]
                run.settled.add(name)
                self.append(run, resolution.of(identifier))
                return True
        if name in run.settled or any(one.name == name for one in run.early):
            return False
        run.early.append(resolution)
        return True

    def _give_up_promise(self, run: Run, identifier: bytes) -> None:
        """Forget a promise; what was said of it, and the code has not heard, counts for the next of its name."""
        if identifier in run.promises:
            run.settled.add(run.promises.pop(identifier))
            return
        whats = [event.what for event in run.history]
        said = [what for what in whats if isinstance(what, history.PromiseSettled) and what.id == identifier]
        for late in resolutions(said, (what for what in whats if isinstance(what, history.PromiseCreated))):
            if late.name in run.promises.values():
                self.settle_promise(run, late)
            else:
                run.early.append(late)

    @staticmethod
    def _note_state(run: Run, what: history.HistoryItem) -> None:
        match what:
            case history.StateSet(key=key, value=value):
                run.state[key] = value
            case history.StateCleared(key=key):
                run.state.pop(key, None)

    def _start_child(self, run: Run, command: commands.StartChildRun) -> None:
        try:
            found = self._find(command.workflow, command.version)
        except NotFound as error:
            self.append(run, history.ChildFailed(command.id, TaskError("NotFound", str(error))))
            return
        queue = command.queue or run.started.queue
        started = history.RunStarted(found.name, found.version, command.payload, queue, run.id)
        run.children[command.id] = self.start(started, command.id, run, command.detached, command.timeout)

    def cancel(self, run: Run | None) -> None:
        """Ask a run to cancel itself."""
        if run is not None and run.end is None:
            self.append(run, history.RunCancelRequested())

    def reset(self, run: Run, to: int) -> Run:
        """Start a run that repeats another one up to an event; if that is open, it ends, and goes on in the new one."""
        identifier = derived_id(run.id, "reset", len(self.runs))
        begins = resets.reset(run.id, run.history, identifier, to, self.now)
        new = self.runs[identifier] = Run(identifier, None, run.detached)
        for event in begins.copy:
            new.history.append(event)
            self._note_state(new, event.what)
        self._give_time(new, run.timeout)
        new.promises = {promise.id: promise.name for promise in begins.promises}
        new.settled = set(begins.settled)
        new.early = list(run.early) if run.end is None else []
        for old_id, new_id in begins.handed_over.items():
            self._hand_over(run, old_id, new, new_id)
        for fact in begins.facts:
            self.append(new, fact)
        if run.end is None:
            self._put_in_place(new, run)
            self._close(run, commands.CancelRun())
        return new

    def _hand_over(self, old: Run, old_id: bytes, new: Run, new_id: bytes) -> None:
        """Let a run wait for the detached child of another; it may have ended when nobody listened."""
        child = old.children.pop(old_id, None) or self.runs[old_id]
        while child.next is not None:
            child = child.next
        child.parent, child.child_id = new, new_id
        if child.end is None:
            new.children[new_id] = child
        else:
            self.append(new, fact_for_parent(new_id, child.end, child.timed_out))

    def _end(self, run: Run, end: commands.EndCommand) -> None:
        self._close(run, end)
        if isinstance(end, commands.ContinueRun):
            self._continue(run, end)
            return
        parent = run.parent
        if parent is None or parent.end is not None or parent.children.pop(run.child_id, None) is None:
            return
        self.append(parent, fact_for_parent(run.child_id, end, run.timed_out))

    def _close(self, run: Run, end: commands.EndCommand) -> None:
        """End a run, and what is open in it."""
        run.end = end
        run.tasks.clear()
        run.timers.clear()
        for child in run.children.values():
            if not child.detached:
                self.cancel(child)

    def _put_in_place(self, new: Run, old: Run) -> None:
        """Let a run go on where another one ends: who waits for that, waits for it."""
        old.next = new
        new.parent, new.child_id = old.parent, old.child_id
        if old.parent is not None and old.child_id in old.parent.children:
            old.parent.children[old.child_id] = new

    def _continue(self, run: Run, end: commands.ContinueRun) -> None:
        old = run.started
        started = history.RunStarted(old.workflow, old.version, end.payload, old.queue, old.parent, run.id)
        new = self.start(started, successor_id(run.id), run.parent, run.detached)
        self._put_in_place(new, run)
        new.timeout, new.timed_out = run.timeout, run.timed_out
        if run.deadline is not None:
            self._set_deadline(new, run.deadline)
        left = carried_over(run.history, end)
        for fact in left.facts:
            self.append(new, fact)
        made = [event.what for event in run.history if isinstance(event.what, history.PromiseCreated)]
        new.early = [*resolutions(left.settled, made), *run.early]
        if ignores_cancel(run.history, end, run.history[0].at):
            self._end(new, commands.CancelRun())


def fact_for_parent(child: bytes, end: commands.EndCommand, timed_out: bool = False) -> history.Fact:
    """Return what the parent of a run learns of its end."""
    own = end_of(child, end)
    return child_outcome(child, run_state(own, timed_out), own)


def is_fact(event: Event) -> bool:
    """Say whether an event is one that the code is shown."""
    return isinstance(event.what, _FACTS)
