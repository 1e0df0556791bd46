"""The worker's half of an activation: find the workflow in memory or replay it, run it, report what it commands."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from orchestrator.domain.code.activation import Activated, Activation, QueryResult, Violation
from orchestrator.domain.code.commands import Command
from orchestrator.domain.tasks.task import TaskError
from orchestrator.errors import DeterminismViolation, NotDeterministic
from orchestrator.sdk.code.commander import Commander
from orchestrator.sdk.code.live_run import LiveRun
from orchestrator.sdk.code.locations import waiting
from orchestrator.sdk.code.workflow import CodeWorkflow

FindWorkflow = Callable[[str, int | None], CodeWorkflow[..., Any]]


class _Cached:
    """A flow that waits for more events, and the attempt that left it so."""

    __slots__ = ("attempt", "flow")

    def __init__(self, flow: LiveRun, attempt: int) -> None:
        self.flow = flow
        self.attempt = attempt


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
        flow = self._take(activation)
        if flow is None:
            return Activated(identifier, attempt, time.monotonic() - begun, missing=True)
        commander = flow.commander
        self._running[identifier, attempt] = Running(commander)
        kept = False
        cached = attempt if activation.events else activation.cached
        try:
            batch, answers = self._run(flow, activation)
            kept = not commander.ended and not commander.spoilt
            return Activated(
                identifier,
                attempt,
                time.monotonic() - begun,
                max(commander.number, commander.ledger.shown) if commander.ended else activation.through,
                batch,
                answers=answers,
                cached=cached,
                waiting=waiting(commander, flow.handlers.open_updates()) if kept and activation.events else None,
                version=flow.workflow.version,
            )
        except (DeterminismViolation, NotDeterministic) as error:
            stuck = commander.ledger.violation or Violation(commander.number, type(error).__name__, str(error))
            no = TaskError("WrongState", f"The code cannot be asked, for it does not fit the history: {stuck.message}")
            answers = [QueryResult(query.id, error=no) for query in activation.queries]
            return Activated(identifier, attempt, time.monotonic() - begun, stuck=stuck, answers=answers)
        finally:
            if kept:
                self._keep(activation.run_id, flow, cached)
            else:
                flow.close()
            self._running.pop((identifier, attempt), None)  # the same may have been sent twice

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
        """Evict all runs."""
        for run_id in list(self._cache):
            self.evict(run_id)

    def _run(self, flow: LiveRun, activation: Activation) -> tuple[list[Command], list[QueryResult]]:
        batch = flow.advance(activation.events, whole=activation.after == 0)
        return batch, [flow.answer(query) for query in activation.queries]

    def _take(self, activation: Activation) -> LiveRun | None:
        """Take the run out of the cache if it is there as the leader thinks; None if everything has to be sent."""
        with self._lock:
            cached = self._cache.pop(activation.run_id, None)
        if activation.after and cached is not None and cached.attempt == activation.cached:
            return cached.flow
        if cached is not None:
            cached.flow.close()
        if activation.after:
            return None
        workflow = self._find(activation.workflow, activation.version)
        return LiveRun(workflow, activation.run_id, self.limit, self.largest)

    def _keep(self, run_id: bytes, flow: LiveRun, attempt: int) -> None:
        """Put a run into the cache, and the one out of it that has waited longest."""
        with self._lock:
            others = [self._cache.pop(run_id)] if run_id in self._cache else []
            mine = _Cached(flow, attempt)
            newest = max([mine, *others], key=lambda one: one.attempt)  # an attempt that was given up may come late
            self._cache[run_id] = newest
            if len(self._cache) > self._capacity:
                others.append(self._cache.popitem(last=False)[1])
        for cached in (mine, *others):
            if cached is not newest:
                cached.flow.close()
