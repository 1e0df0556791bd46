"""The worker's half of an activation: find the workflow in memory or replay it, run it, report what it commands."""

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
"""A run that was replayed takes a turn for every so many events before it follows a step again: if the leader drops a
next turn, that costs another replay."""


class _Cached:
    """A flow that waits for more events, and the attempt that left it so."""

    __slots__ = ("attempt", "flow", "is_next", "last_attempt", "last_event", "may_follow", "shown_at", "turns")

    def __init__(self, flow: LiveRun, replayed: int = 0) -> None:
        self.flow = flow
        self.attempt = 0
        self.last_attempt = 0
        """That may have been one that only asked queries."""
        self.last_event = 0
        """The last event of the history, if nothing has happened since."""
        self.shown_at = 0.0
        """When the code was last shown an event, by the clock of this process."""
        self.may_follow = False
        self.is_next = False
        """It was left so by a next turn. The leader drops that if it has sent a turn of the same number."""
        self.turns = -(replayed // _EVENTS_PER_TURN)

    def left(self, activation: Activation, report: Activated, begun: float) -> None:
        self.attempt, self.last_attempt, self.last_event = report.cached, report.attempt, activation.through
        if activation.events:
            self.shown_at = begun
            self.last_event += 1 + len(report.commands)  # the mark and the records
        self.turns += 1
        self.may_follow = activation.may_follow and self.turns > 0


class Running:
    """An activation whose code runs, its thread, and what the watchdog has seen of it."""

    __slots__ = ("commander", "looked_at", "seen", "since", "thread", "watched")

    def __init__(self, commander: Commander) -> None:
        self.commander = commander
        self.thread = threading.get_ident()
        self.seen = (-1, 0)
        self.since = 0.0
        """The processor time that its thread had used when it was last seen to get on."""
        self.watched = 0.0
        self.looked_at = 0.0


class Engine:
    """Runs activations, in any thread; keeps the `capacity` runs that were active last."""

    def __init__(self, find: FindWorkflow, limit: int, capacity: int = 1000, *, largest: int | None = None) -> None:
        self._find = find
        self.limit = limit
        """The largest value, in bytes, that stays in a history."""
        self.largest = largest
        """The largest one where there is a payload store; as without one, if this is None."""
        self._capacity = capacity
        self._cache: OrderedDict[bytes, _Cached] = OrderedDict()
        self._lock = threading.Lock()
        self._running: dict[tuple[bytes, int], Running] = {}

    def __len__(self) -> int:
        return len(self._cache)

    def __contains__(self, run_id: bytes) -> bool:
        return run_id in self._cache

    def activate(self, activation: Activation, identifier: bytes, attempt: int) -> Activated:
        """Show the events to the run's code, and return what it commands. Raise NotFound for an unknown workflow."""
        begun = time.monotonic()
        found = self._take(activation)
        if found is None:
            return Activated(identifier, attempt, time.monotonic() - begun, missing=True)
        found.is_next = False
        found.flow.commander.is_told = activation.tells
        return self._show(found, activation, identifier, attempt, begun)

    def _show(self, found: _Cached, activation: Activation, identifier: bytes, attempt: int, begun: float) -> Activated:
        """Show the events to code that was taken out of the cache, and put it back if it waits for more."""
        flow = found.flow
        commander = flow.commander
        self._running[identifier, attempt] = Running(commander)
        kept = False
        try:
            batch, answers = self._run(flow, activation)
            kept = not commander.ended and not commander.spoilt
            report = Activated(
                identifier,
                attempt,
                time.monotonic() - begun,
                max(commander.number, commander.ledger.shown) if commander.ended else activation.through,
                batch,
                answers=answers,
                cached=attempt if activation.events else activation.cached,
                waiting=waiting(commander, flow.handlers.open_updates(), flow.handlers.known)
                if kept and activation.events
                else None,
                version=flow.workflow.version,
                awaits=commander.awaits,
                accepted=flow.handlers.take_accepted(),
                refusals=commander.ledger.refusals,
            )
            found.left(activation, report, begun)
            return report
        except (DeterminismViolation, NotDeterministic) as error:
            stuck = commander.ledger.violation or Violation(commander.number, type(error).__name__, str(error))
            no = TaskError("WrongState", f"The code cannot be asked, for it does not fit the history: {stuck.message}")
            answers = [QueryResult(query.id, error=no) for query in activation.queries]
            return Activated(identifier, attempt, time.monotonic() - begun, stuck=stuck, answers=answers)
        finally:
            if kept:
                self._keep(activation.run_id, found)
            else:
                flow.close()
            self._running.pop((identifier, attempt), None)  # the same may have been sent twice

    def may_follow(self, run_id: bytes, task: bytes) -> bool:
        """Say whether the run is here, waits for this task alone, and may be shown its success at once."""
        found = self._cache.get(run_id)
        return found is not None and found.may_follow and found.flow.commander.awaits == task

    def follow(
        self, run_id: bytes, task: bytes, result: bytes, begin: Callable[[int], object], not_before: float = 0.0
    ) -> Activated | None:
        """Show the success of a task to the code that waits for it, as the event that must come next.

        `begin` is called with the number of the attempt; the leader's clock shows `not_before` at least. None if the
        code is elsewhere by now, or cannot go on: then the leader sends a turn.
        """
        with self._lock:  # from here on, no activation that the leader has sent meanwhile can change it
            found = self._cache.pop(run_id) if self.may_follow(run_id, task) else None
        if found is None:
            return None
        begun, found.is_next = time.monotonic(), True
        commander = found.flow.commander
        attempt, number = found.last_attempt + 1, found.last_event + 1
        at = round(max(commander.now + begun - found.shown_at, not_before), 6)
        event = Event(number, at, history.TaskCompleted(task, result))
        name, version = found.flow.workflow.name, found.flow.workflow.version
        activation = Activation(
            *(run_id, name, version, commander.number, number, [event]), cached=found.attempt, may_follow=True
        )
        begin(attempt)
        report = self._show(found, activation, run_id, attempt, begun)
        return None if report.stuck is not None else msgspec.structs.replace(report, follows=task, at=at)

    def running(self, identifier: bytes, attempt: int) -> Running | None:
        """Return the activation of this attempt, while its code runs."""
        return self._running.get((identifier, attempt))

    def evict(self, run_id: bytes) -> None:
        """Evict a run; its next activation replays it."""
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
        """Take the run out of the cache if it is there as the leader thinks; None if everything has to be sent."""
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

    def _keep(self, run_id: bytes, mine: _Cached) -> None:
        """Put a run into the cache, and the one out of it that has waited longest."""
        with self._lock:
            others = [self._cache.pop(run_id)] if run_id in self._cache else []
            # An attempt that was given up may come late, and a next turn after one that the leader has sent.
            newest = max([mine, *others], key=lambda one: (one.attempt, not one.is_next))
            self._cache[run_id] = newest
            if len(self._cache) > self._capacity:
                others.append(self._cache.popitem(last=False)[1])
        for cached in (mine, *others):
            if cached is not newest:
                cached.flow.close()


_NEVER_SHOWN = get_args(EndRecord)
"""How a run ended: code never sees it, and only an exact comparison reads it."""


def replay(
    workflow: CodeWorkflow[..., Any] | type[Any],
    history: Recording | str | Path,
    *,
    strict: bool = False,
    exactly: bool = False,
    in_order: bool = False,
) -> list[Command]:
    """Run a workflow's code against the history of a run; return all its commands.

    `history` is a recording, its JSON, or a file with that; what it names in the payload store is read there. Raise
    DeterminismViolation where the code no longer fits; with `strict`, also where it lacks a command of the history;
    with `exactly`, also where its result, its state, the length of a timer or what it continues with is another;
    with `in_order`, also where commands of different kinds have changed places, such as a task and a timer. A live run
    goes on with such code.
    """
    workflow = _registered(workflow)
    recording = history if isinstance(history, Recording) else Recording.from_json(history)
    settings = workflow._client.settings
    flow = LiveRun(workflow, recording.run_id, settings.max_payload, settings.largest_value)
    ledger = flow.commander.ledger
    trace = ledger.trace = []
    ledger.exactly = exactly
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


def _registered(given: object) -> CodeWorkflow[..., Any]:
    workflow = workflow_of(given)
    if not isinstance(workflow, CodeWorkflow):
        raise InvalidWorkflow(f"replay: expected a workflow or a class below @app.workflow, found {given!r:.100}.")
    return workflow


def read_event(event: Event, *, everything: bool = False) -> Event:
    """Return an event whose stored values have been read: code must not meet an outage in the middle of a turn."""
    if isinstance(event.what, _NEVER_SHOWN) and not everything:
        return event
    what = changed(event.what, _content, lambda error: error)
    return event if what is event.what else Event(event.number, event.at, what)


def _content(_: bytes, data: bytes) -> bytes:
    stored = whole_reference(data)
    return data if stored is None else read_encoded(stored)
