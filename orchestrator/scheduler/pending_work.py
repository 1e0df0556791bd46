"""Do what waits in Postgres: requests, schedules, runs, cancellations, due tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from orchestrator.scheduler.code.ends import close_runs
from orchestrator.scheduler.code.other_runs import look_after
from orchestrator.scheduler.code.runs import CodeRuns, fire_timers
from orchestrator.scheduler.fleet.view import Fleet
from orchestrator.scheduler.isolation import attempt
from orchestrator.scheduler.requests import Requests
from orchestrator.scheduler.runs.advance import Runs
from orchestrator.scheduler.runs.backlog import LOOKS_EVERY, Backlog
from orchestrator.scheduler.runs.cancels import Cancels
from orchestrator.scheduler.schedules import FirePace, extend_backfills, fire_schedules
from orchestrator.scheduler.tasks.timers import expire, fail_unknown, fire_due, release_crowded, release_known
from orchestrator.scheduler.tick_result import CommitHooks
from orchestrator.scheduler.transaction import Transaction
from orchestrator.settings import Settings
from orchestrator.store.tasks import waiting
from orchestrator.store.tasks.waiting import PendingWorkProbe

_CONTESTED = 0.05
"""Seconds before the next look at a key that an open transaction may be taking."""

Part = Callable[[Transaction, int], object]
"""A part of a tick, which is given how many rows it may work on."""


@dataclass
class PendingWork(CommitHooks):
    """Remembers what waits, from one tick to the next."""

    settings: Settings
    fleet: Fleet
    code: CodeRuns
    backlog: Backlog
    runs: Runs
    cancels: Cancels
    requests: Requests
    _pending_work: PendingWorkProbe | None = None
    _next_part: int = 0
    """The order of waiting runs, if there is no time for all of them."""
    _pace: FirePace = field(default_factory=FirePace)
    _has_fired: bool = False
    """The last tick fired schedules."""
    was_empty: bool = False
    """There was nothing to do in the last tick, by what the tick before it has left."""

    def rolled_back(self) -> None:
        """After a rollback, all work is pending again. The next tick fires schedules: it looks for the one that failed,
        if any."""
        self._pending_work, self._has_fired = None, False

    def run(self, tx: Transaction, found: PendingWorkProbe | None, *, somebody_waits: bool = False) -> float:
        """Do what waits, and note what waits next; return how many seconds that can wait.

        `found` is what waited when the transaction began, if the tick is one that looks at everything. If
        `somebody_waits`, because a report or an enqueue came in, no schedules are fired in two ticks in a row.
        """

        def do(what: str, part: Part) -> None:
            attempt(tx, what, part, self.settings.batch)

        if tx.shard is not None:
            self.backlog.look_for_room(tx)
        fleet, runs = self.fleet, self.runs
        thorough = found is not None
        pending_work = found or self._pending_work
        self.was_empty = False
        if pending_work is not None and not thorough and self._is_empty(pending_work, tx):
            self.was_empty = True
            return self._until_next(pending_work, tx.now)
        wake = tx.result.wake
        is_old = wake.requests or wake.runs_to_begin or wake.handed_back or (thorough and wake.advanced)
        if pending_work is None or is_old:
            pending_work = waiting.probe_pending_work(tx.connection)
        if thorough:
            self.backlog.free_older(tx)
        if pending_work.inbox:
            do("apply requests", self.requests.apply)
            pending_work = waiting.probe_pending_work(tx.connection)
        self._has_fired = _is_due(pending_work.next_fire, tx.now) and not (self._has_fired and somebody_waits)
        if self._has_fired:
            do("fire schedules", lambda tx, limit: fire_schedules(tx, self.cancels, self._pace, limit))
            pending_work = waiting.probe_pending_work(tx.connection)
        if pending_work.backfills and thorough:
            do("go on with backfills", extend_backfills)
            pending_work = waiting.probe_pending_work(tx.connection)
        if pending_work.cancelling_runs:
            runs.advance(tx)  # what ended in this tick is counted before it is asked what is left
            do("cancel runs", lambda tx, limit: self.cancels.go_on(tx, 5 * limit))
        self._plan(tx, pending_work, do)
        if pending_work.closing_runs:
            do("cancel what ended runs have left", close_runs)
        runs.advance(tx)
        if pending_work.held and thorough:
            do("release tasks", lambda tx, limit: release_known(tx, fleet, limit))
        if fleet.capabilities.holds:
            over = list(tx.result.over())
            do("find places for tasks", lambda tx, limit: release_crowded(tx, fleet, over, limit))
        if thorough:
            do("free stuck runs", self.code.free_stuck)
            if self.code.looked_to is not None:
                do("look after waits for runs", lambda tx, _: look_after(tx, self.code))
        if _is_due(pending_work.next_due, tx.now):
            do("make due tasks ready", fire_due)
            do("fire timers", self._fire_timers)
            do("expire tasks", expire)
            if fleet.is_in_view:  # otherwise the known names are incomplete
                do("fail unknown tasks", lambda tx, limit: fail_unknown(tx, fleet, limit))
            runs.advance(tx)
        busy = pending_work.is_busy or _is_due(pending_work.next_of_all, tx.now)
        if busy or wake.delayed or wake.requests or wake.runs_to_begin or wake.runs_to_expand:
            pending_work = waiting.probe_pending_work(tx.connection)
        self._pending_work = pending_work
        return max(self._until_next(pending_work, tx.now), _CONTESTED if wake.contested else 0.0)

    def _plan(self, tx: Transaction, pending_work: PendingWorkProbe, do: Callable[[str, Part], None]) -> None:
        """Let runs go on that wait. Whatever takes all the time of a tick comes last in the next one."""
        runs = self.runs
        parts: list[tuple[bool, str, Part]] = [
            (pending_work.pending_changes, "notify runs of pending changes", lambda tx, _: runs.catch_up(tx)),
            (pending_work.pending_runs, "begin runs", runs.begin),
            (pending_work.expanding_runs, "create tasks of fan-outs", runs.expand),
        ]
        waiting = [(place, what, part) for place, (waits, what, part) in enumerate(parts) if waits]
        waiting.sort(key=lambda one: (one[0] - self._next_part) % len(parts))
        tx.budget.evaluated.clear()
        tx.budget.read_nodes = 0
        for _, what, part in waiting:
            do(what, part)
        if waiting:
            self._next_part = (waiting[0][0] + 1) % len(parts) if tx.budget.is_spent else 0

    def _is_empty(self, pending_work: PendingWorkProbe, tx: Transaction) -> bool:
        """Say whether there is nothing to do, and nothing to look for."""
        wake = tx.result.wake
        asked = wake.requests or wake.runs_to_begin or wake.handed_back or wake.delayed or wake.runs_to_expand
        waits = pending_work.is_busy or _is_due(pending_work.next_of_all, tx.now) or self.fleet.capabilities.holds
        return not (asked or wake.contested or waits or tx.result.runs)

    def _fire_timers(self, tx: Transaction, limit: int) -> None:
        late = self.cancels.time_out(tx, limit, self.settings.run_timeout_grace)
        for run, facts in fire_timers(tx, self.backlog, late, limit).items():
            tx.result.runs.flow_learns(run, *facts)
        self.runs.advance(tx)

    def _until_next(self, pending_work: PendingWorkProbe, now: datetime) -> float:
        if pending_work.is_busy:
            return 0.0
        due_in = self.settings.safety_scan
        if self.backlog.parked_lanes:
            due_in = min(due_in, LOOKS_EVERY.total_seconds())
        if (due := pending_work.next_of_all) is not None:
            due_in = min(due_in, max(0.0, (due - now).total_seconds()))
        return due_in


def _is_due(due: datetime | None, now: datetime) -> bool:
    return due is not None and due <= now
