"""The worker's part of an activation: take the workflow from memory or replay it, run it, and report its commands."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec

from orchestrator.domain.code import history
from orchestrator.domain.code.activation import Activated, Activation, QueryResult, Violation
from orchestrator.domain.code.commands import Command
from orchestrator.domain.code.history import EndRecord, Event
from orchestrator.domain.sealed import changed
from orchestrator.domain.tasks.task import TaskError
from orchestrator.errors import DeterminismViolation, InvalidWorkflow, NotDeterministic
from orchestrator.payloads.keeping import read_encoded
from orchestrator.references import whole_reference
from orchestrator.sdk.code.commander import Commander
from orchestrator.sdk.code.live_run import LiveRun
from orchestrator.sdk.code.recording import Recording
from orchestrator.sdk.code.scope import waiting
from orchestrator.sdk.code.workflow import CodeWorkflow
from orchestrator.sdk.code.workflow_class import workflow_of

FindWorkflow = Callable[[str, int | None], CodeWorkflow[..., Any]]


_EVENTS_PER_TURN = 10
"""Events per turn that a replayed run takes before it may follow a task: a dropped next turn costs another replay."""


class _Cached:
    """A run in memory that waits for more events, and the attempt after which it was kept."""

    __slots__ = ("attempt", "flow", "is_next", "last_attempt", "last_event", "may_follow", "shown_at", "turns")

    def __init__(self, flow: LiveRun, replayed: int = 0) -> None:
        self.flow = flow
        self.attempt = 0
        self.last_attempt = 0
        """The last attempt, which may have answered only queries."""
        self.last_event = 0
        """The number of the last event of the history, if nothing was added since."""
        self.shown_at = 0.0
        """The time when the code last received an event, by this process's clock."""
        self.may_follow = False
        self.is_next = False
        """Whether the last turn ran ahead of the leader (`follow`). The leader drops such a turn if it has sent
        another."""
        self.turns = -(replayed // _EVENTS_PER_TURN)

    def update(self, activation: Activation, report: Activated, since: float) -> None:
        self.attempt, self.last_attempt, self.last_event = report.cached, report.attempt, activation.through
        if activation.events:
            self.shown_at = since
            self.last_event += 1 + len(report.commands)  # the marker and the records
        self.turns += 1
        self.may_follow = activation.may_follow and self.turns > 0


class Running:
    """A running activation: its thread, and the observations of the watchdog."""

    __slots__ = ("commander", "looked_at", "seen", "since", "thread", "watched")

    def __init__(self, commander: Commander) -> None:
        self.commander = commander
        self.thread = threading.get_ident()
        self.seen = (-1, 0)
        self.since = 0.0
        """The CPU time of the thread when the watchdog last saw progress."""
        self.watched = 0.0
        self.looked_at = 0.0


class Engine:
    """Runs activations in any thread. Caches the `capacity` most recently active runs."""

    def __init__(self, find: FindWorkflow, limit: int, capacity: int = 1000, *, largest: int | None = None) -> None:
        self._find = find
        self.limit = limit
        """The maximum size in bytes of a value that stays in the history."""
        self.largest = largest
        """The maximum size of a value if there is a payload store. None means that there is none."""
        self._capacity = capacity
        self._cache: OrderedDict[bytes, _Cached] = OrderedDict()
        self._lock = threading.Lock()
        self._running: dict[tuple[bytes, int], Running] = {}

    def __len__(self) -> int:
        return len(self._cache)

    def __contains__(self, run_id: bytes) -> bool:
        return run_id in self._cache

    def activate(self, activation: Activation, identifier: bytes, attempt: int) -> Activated:
        """Show the events to the run's code, and return its commands. Raise NotFound for an unknown workflow."""
        since = time.monotonic()
        cached = self._take(activation)
        if cached is None:
            return Activated(identifier, attempt, time.monotonic() - since, missing=True)
        cached.is_next = False
        cached.flow.commander.leader_reports = activation.tells
        return self._show(cached, activation, identifier, attempt, since)

    def _show(
        self, cached: _Cached, activation: Activation, identifier: bytes, attempt: int, since: float
    ) -> Activated:
        """Show the events to a run taken from the cache, and return it to the cache if it waits for more."""
        flow = cached.flow
        commander = flow.commander
        self._running[identifier, attempt] = Running(commander)
        keep = False
        try:
            batch, answers = self._run(flow, activation)
            keep = not commander.ended and not commander.is_dirty
            report = Activated(
                identifier,
                attempt,
                time.monotonic() - since,
                max(commander.number, commander.ledger.shown) if commander.ended else activation.through,
                batch,
                answers=answers,
                cached=attempt if activation.events else activation.cached,
                waiting=waiting(commander, flow.handlers.open_updates(), flow.handlers.argument_names)
                if keep and activation.events
                else None,
                version=flow.workflow.version,
                awaits=commander.awaits,
                accepted=flow.handlers.take_accepted(),
                refusals=commander.ledger.refusals,
                holds=True,
            )
            cached.update(activation, report, since)
            return report
        except (DeterminismViolation, NotDeterministic) as error:
            stuck = commander.ledger.violation or Violation(commander.number, type(error).__name__, str(error))
            unanswerable = TaskError(
                "WrongState",
                f"The query cannot be answered, because the code does not match the history: {stuck.message}",
            )
            answers = [QueryResult(query.id, error=unanswerable) for query in activation.queries]
            return Activated(identifier, attempt, time.monotonic() - since, stuck=stuck, answers=answers)
        finally:
            if keep:
                self._keep(activation.run_id, cached)
            else:
                flow.close()
            self._running.pop((identifier, attempt), None)  # the same activation may have been sent twice

    def may_follow(self, run_id: bytes, task: bytes) -> bool:
        """Return whether the run is cached, waits only for this task, and may be shown its success immediately."""
        cached = self._cache.get(run_id)
        return cached is not None and cached.may_follow and cached.flow.commander.awaits == task

    def follow(
        self, run_id: bytes, task: bytes, result: bytes, begin: Callable[[int], object], not_before: float = 0.0
    ) -> Activated | None:
        """Show the success of a task to the waiting code, before the leader does. It must become the next event.

        `begin` is called with the number of the attempt. The event's time is at least `not_before`, by the leader's
        clock. Return None if the code is no longer here or cannot continue: then the leader sends a turn.
        """
        with self._lock:  # no activation from the leader can change it now
            cached = self._cache.pop(run_id) if self.may_follow(run_id, task) else None
        if cached is None:
            return None
        since, cached.is_next = time.monotonic(), True
        commander = cached.flow.commander
        attempt, number = cached.last_attempt + 1, cached.last_event + 1
        at = round(max(commander.now + since - cached.shown_at, not_before), 6)
        event = Event(number, at, history.TaskCompleted(task, result))
        name, version = cached.flow.workflow.name, cached.flow.workflow.version
        activation = Activation(
            *(run_id, name, version, commander.number, number, [event]), cached=cached.attempt, may_follow=True
        )
        begin(attempt)
        report = self._show(cached, activation, run_id, attempt, since)
        return None if report.stuck is not None else msgspec.structs.replace(report, follows=task, at=at)

    def running(self, identifier: bytes, attempt: int) -> Running | None:
        """Return the activation of this attempt while its code runs."""
        return self._running.get((identifier, attempt))

    def evict(self, run_id: bytes) -> None:
        """Remove a run from memory. Its next activation replays it."""
        with self._lock:
            cached = self._cache.pop(run_id, None)
        if cached is not None:
            cached.flow.close()

    def close(self) -> None:
        for run_id in list(self._cache):
            self.evict(run_id)

    def _run(self, flow: LiveRun, activation: Activation) -> tuple[list[Command], list[QueryResult]]:
        batch = flow.advance(activation.events, whole=activation.after == 0)
        return batch, [flow.answer(query) for query in activation.queries]

    def _take(self, activation: Activation) -> _Cached | None:
        """Take the run out of the cache. Return None if it is not in the state that the leader expects."""
        with self._lock:
            cached = self._cache.pop(activation.run_id, None)
        if activation.after and cached is not None and cached.attempt == activation.cached:
            return cached
        if cached is not None:
            cached.flow.close()
        if activation.after:
            return None
        workflow = self._find(activation.workflow, activation.version)
        return _Cached(LiveRun(workflow, activation.run_id, self.limit, self.largest), len(activation.events))

    def _keep(self, run_id: bytes, current: _Cached) -> None:
        """Put a run into the cache. Evict the least recently used one if the cache is full."""
        with self._lock:
            evicted = [self._cache.pop(run_id)] if run_id in self._cache else []
            # An abandoned attempt may finish late, and a next turn after a turn that the leader has sent.
            newest = max([current, *evicted], key=lambda entry: (entry.attempt, not entry.is_next))
            self._cache[run_id] = newest
            if len(self._cache) > self._capacity:
                evicted.append(self._cache.popitem(last=False)[1])
        for cached in (current, *evicted):
            if cached is not newest:
                cached.flow.close()


_END_RECORDS = get_args(EndRecord)
"""Records of a run's end. The code never sees them; only an exact comparison reads them."""


def replay(
    workflow: CodeWorkflow[..., Any] | type[Any],
    history: Recording | str | Path,
    *,
    strict: bool = False,
    exactly: bool = False,
    in_order: bool = False,
) -> list[Command]:
    """Run a workflow's code against the history of a run, and return all its commands.

    `history` is a recording, its JSON, or a path to a file with that JSON. Values in the payload store are read from
    there. Raise DeterminismViolation if the code does not fit the history. `strict` also raises if the code lacks a
    command of the history. `exactly` also compares its result, its state, the lengths of timers, and the arguments of
    `continue_as_new`. `in_order` also compares the order of commands of different kinds, such as a task and a timer. A
    live run accepts all of these differences.
    """
    workflow = _registered(workflow)
    recording = history if isinstance(history, Recording) else Recording.from_json(history)
    settings = workflow._client.settings
    flow = LiveRun(workflow, recording.run_id, settings.max_payload, settings.largest_value)
    ledger = flow.commander.ledger
    trace = ledger.trace = []
    ledger.compares_values = exactly
    ledger.in_order = in_order
    try:
        flow.advance([read_event(event, everything=exactly) for event in recording.events], whole=True)
        if ledger.end is not None and not flow.commander.ended:
            ledger.violate(
                len(recording.events),
                "RunEndMismatch",
                f"Run end mismatch: history has {type(ledger.end).__name__} and the code still waits for "
                f"{flow.commander.waiting_for() or 'a signal'}.",
            )
        if strict or exactly:
            ledger.check_met()
    finally:
        flow.close()
    return trace


def _registered(target: object) -> CodeWorkflow[..., Any]:
    workflow = workflow_of(target)
    if not isinstance(workflow, CodeWorkflow):
        raise InvalidWorkflow(f"replay: expected a workflow or a class below @app.workflow, found {target!r:.100}.")
    return workflow


def read_event(event: Event, *, everything: bool = False) -> Event:
    """Load an event's values from the payload store, so that the code meets no outage in the middle of a turn."""
    if isinstance(event.what, _END_RECORDS) and not everything:
        return event
    what = changed(event.what, _load, lambda error: error)
    return event if what is event.what else Event(event.number, event.at, what)


def _load(_: bytes, data: bytes) -> bytes:
    stored = whole_reference(data)
    return data if stored is None else read_encoded(stored)
