"""A leader in memory, for code workflows only. It applies commands as the real leader does in Postgres."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from orchestrator.domain.code import commands, history, resets
from orchestrator.domain.code.activation import Activation, Query, QueryResult
from orchestrator.domain.code.attributes import attributes_of
from orchestrator.domain.code.ends import (
    ENCODED_NONE,
    PARENT_ASKS,
    PARENT_ENDED,
    REQUESTED,
    CommandsByKind,
    carried_over,
    ends_too_early,
    ignores_cancel,
    kept_of_refused,
)
from orchestrator.domain.code.history import Event
from orchestrator.domain.code.other_runs import (
    CANCEL,
    QUERY,
    Target,
    has_ended,
    is_wait,
    not_found,
    settled,
    unknown_signal,
)
from orchestrator.domain.code.promises import Resolution, resolutions
from orchestrator.domain.ids import derived_id, successor_id
from orchestrator.domain.runs import TIMED_OUT, Nesting
from orchestrator.domain.states import RunState
from orchestrator.domain.tasks.task import TaskError
from orchestrator.errors import NotFound, UnknownHandler
from orchestrator.sdk.code.engine import Engine
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.settings import Settings
from orchestrator.testing.memory_run import Run, fact_for_parent

_TIMEOUT = b"time"
"""Marks planned timeouts of a run, in place of an id."""


class MemoryLeader:
    """Keeps histories, applies commands, and advances the clock on request."""

    def __init__(self, engine: Engine, find: Callable[[str, int | None], CodeWorkflow[..., Any]], now: float) -> None:
        self._engine = engine
        self._find = find
        self.now = now
        self.grace = Settings.run_timeout_grace
        self.nesting = Nesting()
        self.runs: dict[bytes, Run] = {}
        self._due: list[tuple[float, bool, int, bytes, Run, history.Fact | None]] = []
        """Planned events: time, is a timeout, serial number, id that must be open then, run, fact (None for a
        timeout)."""
        self._queries: list[tuple[Run, commands.SignalRun]] = []
        """Queries between runs that are not answered yet."""
        self._serial = itertools.count()

    def start(
        self,
        started: history.RunStarted,
        run_id: bytes,
        parent: Run | None = None,
        detached: bool = False,
        timeout: float | None = None,
        terminates: bool = False,
    ) -> Run:
        run = self.runs[run_id] = Run(run_id, parent, detached, terminates)
        self.append(run, started)
        self._set_timeout(run, timeout)
        return run

    def _set_timeout(self, run: Run, timeout: float | None) -> None:
        run.timeout = timeout
        if timeout is not None:
            self._set_deadline(run, self.now + timeout)

    def _set_deadline(self, run: Run, deadline: float) -> None:
        run.deadline = deadline
        heapq.heappush(self._due, (deadline, True, next(self._serial), _TIMEOUT, run, None))

    def _time_out(self, run: Run) -> None:
        """Ask a run to cancel itself after its timeout; end it after its grace period."""
        if run.timed_out:
            self.end(run, commands.CancelRun())
            return
        run.timed_out = True
        self.append(run, history.RunCancelRequested(TIMED_OUT))
        self._set_deadline(run, self.now + self.grace)

    def append(self, run: Run, item: history.HistoryItem) -> None:
        run.history.append(Event(len(run.history) + 1, self.now, item))

    def activate(self, run: Run, queries: list[Query] | None = None) -> list[QueryResult]:
        """Show new events to the code and apply its commands. An ended run only answers queries."""
        if run.end is not None:
            started, events = run.started, history.seen_events(run.history)
            activation = Activation(
                run.id, started.workflow, started.version, 0, len(run.history), events, 0, queries or []
            )
            return self._engine.activate(activation, run.id, run.attempt).answers if events else []
        run.attempt += 1
        has_unseen_facts = run.has_unseen_facts
        activation = run.activation(queries or [])
        report = self._engine.activate(activation, run.id, run.attempt)
        if report.missing:
            run.applied = 0
            activation = run.activation(queries or [])
            report = self._engine.activate(activation, run.id, run.attempt)
        run.stuck = report.stuck
        run.places = report.waiting.places if report.waiting is not None else run.places
        last = report.commands[-1] if report.commands else None
        if isinstance(last, commands.EndCommand) and ends_too_early(report, run.history[report.through :]):
            run.applied = 0
            self.append(run, history.ActivationApplied(0, ended=report.through))
            self._apply(run, kept_of_refused(report))
        elif report.stuck is None:
            run.applied, run.shown = run.attempt if activation.events else run.applied, report.through
            if has_unseen_facts:
                self.append(run, history.ActivationApplied(report.through, report.accepted))
            self._apply(run, report.commands)
            if isinstance(last, commands.EndCommand):
                self.end(run, last)
        while self._queries:
            self._answer_query(*self._queries.pop(0))
        return report.answers

    def _apply(self, run: Run, batch: Sequence[commands.Command]) -> None:
        for command in batch:
            self.append(run, record := history.record(command))
            run.note(record)
        self._carry_out(run, batch)

    def _answer_query(self, asker: Run, sent: commands.SignalRun) -> None:
        run, id = self._latest(Target(sent.run, sent.key)), sent.id or b""
        answers = [] if run is None else self.activate(run, [Query(id, sent.name.removeprefix(QUERY), sent.value)])
        fact = settled(id, not_found(Target(sent.run, sent.key)))
        if answers:
            fact = settled(id, answers[0].error, answers[0].result or ENCODED_NONE)
        elif run is not None:
            fact = settled(
                id, TaskError("WrongState", "The query cannot be answered: the code of the run did not execute.")
            )
        if asker.end is None:
            self.append(asker, fact)

    def settle(self, run: Run, task: bytes, outcome: history.TaskCompleted | history.TaskFailed) -> None:
        """Append the outcome of a task if its run still waits for it."""
        if run.tasks.pop(task, None) is not None and run.end is None:
            self.append(run, outcome)

    def plan(self, run: Run, identifier: bytes, seconds: float, fact: history.Fact) -> None:
        """Append a fact after some time, if its subject is still open then."""
        heapq.heappush(self._due, (self.now + seconds, False, next(self._serial), identifier, run, fact))

    def next_due(self) -> float | None:
        """Return the time of the next planned event, if any."""
        while self._due:
            due, _, _, identifier, run, fact = self._due[0]
            if fact is None and run.end is None and due == run.deadline:
                return due
            if due < math.inf and any(identifier in open for open in (run.timers, run.tasks, run.children)):
                return due
            heapq.heappop(self._due)
        return None

    def fire_next(self) -> bool:
        """Advance the clock to the next planned event and apply it. Return False if there is none."""
        due = self.next_due()
        if due is None:
            return False
        self.now = max(self.now, due)
        *_, identifier, run, fact = heapq.heappop(self._due)
        if fact is None:
            self._time_out(run)
            return True
        for open in (run.timers, run.tasks, run.children):
            open.pop(identifier, None)
        self.append(run, fact)
        return True

    def _carry_out(self, run: Run, batch: Sequence[commands.Command]) -> None:
        """Apply commands by type, in the same order as the real leader."""
        by_type = CommandsByKind({run.id: batch})
        facts: list[history.Fact] = []
        """Facts about the run's own commands, appended after all other effects."""
        run.tasks.update((command.task.id, command.task) for _, command in by_type.of(commands.ScheduleTask))
        for _, cancel in by_type.of(commands.CancelTask):
            if run.tasks.pop(cancel.id, None) is not None:
                facts.append(history.TaskCancelled(cancel.id))
        for _, timer in by_type.of(commands.StartTimer):
            run.timers[timer.id] = timer.due(self.now)
            self.plan(run, timer.id, run.timers[timer.id] - self.now, history.TimerFired(timer.id))
        for _, cancelled_timer in by_type.of(commands.CancelTimer):
            run.timers.pop(cancelled_timer.id, None)
        run.promises.update((promise.id, promise.name) for _, promise in by_type.of(commands.CreatePromise))
        for _, cancelled_promise in by_type.of(commands.CancelPromise):
            self._drop_promise(run, cancelled_promise.id)
        for early in [resolution for resolution in run.early if resolution.name in run.promises.values()]:
            run.early.remove(early)
            self.settle_promise(run, early)
        for _, child in by_type.of(commands.StartChildRun):
            refused = self._start_child(run, child)
            facts.extend([history.ChildFailed(child.id, refused)] if refused is not None else [])
        for _, cancelled_child in by_type.of(commands.CancelChildRun):
            self.cancel(run.children.get(cancelled_child.id), PARENT_ASKS)
        for _, wait in by_type.of(commands.CreatePromise):
            if is_wait(wait.name) and wait.id in run.promises and (end := self._end_of(wait)) is not None:
                del run.promises[wait.id]
                self.append(run, end)
        self._queries += [(run, sent) for _, sent in by_type.of(commands.SignalRun) if sent.name.startswith(QUERY)]
        signals = (sent for _, sent in by_type.of(commands.SignalRun) if not sent.name.startswith(QUERY))
        outcomes = [(sent.id, self._send(sent)) for sent in signals]
        for id, problem in outcomes:
            if id is not None and not isinstance(batch[-1], commands.EndCommand):
                self.append(run, settled(id, problem))
        for fact in facts:
            self.append(run, fact)

    def _send(self, sent: commands.SignalRun) -> TaskError | None:
        """Deliver a signal or cancel request to the latest run in a chain. Return the error if that run has ended."""
        target = Target(sent.run, sent.key)
        run = self._latest(target)
        if run is None:
            return not_found(target)
        if run.end is not None:
            is_done = sent.name == CANCEL and run.status == RunState.CANCELLED
            return None if is_done else has_ended("cancel" if sent.name == CANCEL else "signal", target, run.status)
        if sent.name == CANCEL:
            self.cancel(run, REQUESTED)
            return None
        try:
            self._find(run.started.workflow, None)._signature.check_signal(sent.name)
        except UnknownHandler as error:
            return unknown_signal(str(error))
        except NotFound:  # the workflow is mocked
            pass
        self.append(run, history.SignalReceived(sent.name, sent.value))
        return None

    def _latest(self, target: Target) -> Run | None:
        run = self.runs.get(target.run)
        while run is not None and run.next is not None:
            run = run.next
        return run

    def _end_of(self, wait: commands.CreatePromise) -> history.PromiseSettled | None:
        """Return the fact about the end of another run that a run waits for; None while that run is open."""
        target = Target.of_wait(wait.name)
        run = self._latest(target)
        if run is None:
            return settled(wait.id, not_found(target))
        return None if run.end is None else run.settles(wait.id)

    def settle_promise(self, run: Run, resolution: Resolution) -> bool:
        """Settle the oldest open promise of a name, or else keep the resolution. Return False if it is too late."""
        name = resolution.name
        for identifier, open_name in run.promises.items():
            if open_name == name:
                del run.promises[identifier]
                run.settled.add(name)
                self.append(run, resolution.of(identifier))
                return True
        if name in run.settled or any(early.name == name for early in run.early):
            return False
        run.early.append(resolution)
        return True

    def _drop_promise(self, run: Run, identifier: bytes) -> None:
        """Drop a promise. A resolution that the code has not seen counts for the next promise of its name."""
        if identifier in run.promises:
            run.settled.add(run.promises.pop(identifier))
            return
        items = [event.what for event in run.history]
        resolved = [item for item in items if isinstance(item, history.PromiseSettled) and item.id == identifier]
        for early in resolutions(resolved, (item for item in items if isinstance(item, history.PromiseCreated))):
            if early.name in run.promises.values():
                self.settle_promise(run, early)
            else:
                run.early.append(early)

    def _start_child(self, run: Run, command: commands.StartChildRun) -> TaskError | None:
        try:
            workflow = self._find(command.workflow, command.version)
        except NotFound as error:
            return TaskError("NotFound", str(error))
        depth = run.depth + 1
        if depth > self.nesting.depth:
            return TaskError("InvalidWorkflow", self.nesting.too_deep(command.workflow, depth))
        queue = command.queue or run.started.queue
        started = history.RunStarted(workflow.name, workflow.version, command.payload, queue, run.id)
        child = self.start(started, command.id, run, command.detached, command.timeout, command.terminates)
        run.children[command.id] = child
        return None

    def cancel(self, run: Run | None, reason: str) -> None:
        if run is not None and run.end is None:
            self.append(run, history.RunCancelRequested(reason))

    def reset(self, run: Run, to: int) -> Run:
        """Start a run that repeats another one up to an event. That one, if open, ends and continues as the new run."""
        identifier = derived_id(run.id, "reset", len(self.runs))
        begins = resets.reset(run.id, run.history, identifier, to, self.now)
        new = self.runs[identifier] = Run(identifier, None, run.detached, run.terminates)
        for event in begins.copy:
            new.history.append(event)
            new.note(event.what)
        self._set_timeout(new, run.timeout)
        new.promises = {promise.id: promise.name for promise in begins.promises}
        new.settled = set(begins.settled)
        new.early = list(run.early) if run.end is None else []
        for old_id, new_id in begins.handed_over.items():
            self._hand_over(run, old_id, new, new_id)
        for fact in begins.facts:
            self.append(new, fact)
        if run.end is None:
            run.continue_as(new)
            self._close(run, commands.CancelRun())
        return new

    def _hand_over(self, old: Run, old_id: bytes, new: Run, new_id: bytes) -> None:
        """Let a run wait for the detached child of another run. The child may already have ended."""
        child = old.children.pop(old_id, None) or self.runs[old_id]
        while child.next is not None:
            child = child.next
        child.parent, child.child_id = new, new_id
        if child.end is None:
            new.children[new_id] = child
        else:
            self.append(new, fact_for_parent(new_id, child.end, child.timed_out))

    def end(self, run: Run, end: commands.EndCommand) -> None:
        """End a run and notify its parent, or start its continuation."""
        self._close(run, end)
        if isinstance(end, commands.ContinueRun):
            self._continue(run, end)
            return
        parent = run.parent
        if parent is None or parent.end is not None or parent.children.pop(run.child_id, None) is None:
            return
        self.append(parent, fact_for_parent(run.child_id, end, run.timed_out))

    def _notify_waiters(self, ended: Run) -> None:
        for run in list(self.runs.values()):
            for identifier, name in list(run.promises.items()):
                if run.end is None and is_wait(name) and self._latest(Target.of_wait(name)) is ended:
                    del run.promises[identifier]
                    self.append(run, ended.settles(identifier))

    def _close(self, run: Run, end: commands.EndCommand) -> None:
        run.end = end
        run.tasks.clear()
        run.timers.clear()
        for child in run.children.values():
            if not child.terminates and not child.detached:
                self.cancel(child, PARENT_ENDED)
        if not isinstance(end, commands.ContinueRun):
            self._notify_waiters(run)
        for child in run.children.values():
            if child.terminates and child.end is None:
                child.terminated = True
                self.end(child, commands.CancelRun())

    def _continue(self, run: Run, end: commands.ContinueRun) -> None:
        old = run.started
        attributes = attributes_of(event.what for event in run.history)
        text = msgspec.json.encode(attributes).decode() if attributes else ""
        started = history.RunStarted(
            *(old.workflow, old.version, end.payload, old.queue, old.parent, run.id),
            attributes=text,
            first=old.first or run.id,
        )
        new = self.start(started, successor_id(run.id), run.parent, run.detached, terminates=run.terminates)
        run.continue_as(new)
        new.timeout, new.timed_out = run.timeout, run.timed_out
        if run.deadline is not None:
            self._set_deadline(new, run.deadline)
        remaining = carried_over(run.history, end)
        for fact in remaining.facts:
            self.append(new, fact)
        promises = [event.what for event in run.history if isinstance(event.what, history.PromiseCreated)]
        new.early = [*resolutions(remaining.settled, promises), *run.early]
        if ignores_cancel(run.history, end, run.history[0].at):
            self.end(new, commands.CancelRun())
