"""Do what waits in Postgres: requests, schedules, runs, cancellations, due tasks."""

from __future__ import annotations

from datetime import datetime

from orchestrator.scheduler.code.ends import close_runs
from orchestrator.scheduler.code.runs import CodeRuns, fire_timers
from orchestrator.scheduler.fleet.view import Fleet
from orchestrator.scheduler.isolation import attempt
from orchestrator.scheduler.requests import apply_inbox
from orchestrator.scheduler.runs.advance import advance_runs, begin_runs, catch_up, expand_runs
from orchestrator.scheduler.runs.cancels import cancel_runs, time_out
from orchestrator.scheduler.schedules import extend_backfills, fire_schedules
from orchestrator.scheduler.tasks.timers import expire, fail_unknown, fire_due, release_crowded, release_known
from orchestrator.scheduler.tick import Tick
from orchestrator.settings import Settings
from orchestrator.store.tasks import waiting
from orchestrator.store.tasks.waiting import Agenda

_NOTHING = Agenda(inbox=False, pending_runs=False, cancelling_runs=False, next_due=None, held=False)

_CONTESTED = 0.05
"""Seconds before the next look at a key that somebody's open transaction may be taking."""


class Errands:
    """Remembers what waits, from one tick to the next."""

    def __init__(self, settings: Settings, fleet: Fleet, code: CodeRuns) -> None:
        self._settings = settings
        self._fleet = fleet
        self._code = code
        self._agenda = _NOTHING

    def run(self, tick: Tick, found: Agenda | None) -> float:
        """Do what waits, and note what waits next; return how many seconds that can wait.

        `found` is what waited when the transaction began, if the tick is one that looks at everything.
        """
        limit = self._settings.batch
        thorough = found is not None
        agenda = found or self._agenda
        if tick.has_wishes or tick.runs_to_begin or (thorough and tick.has_advanced):
            agenda = waiting.agenda(tick.connection)
        if thorough:
            tick.backlog.free_older(tick)
        if agenda.inbox:
            attempt(tick, "apply requests", lambda: apply_inbox(tick, limit))
            agenda = waiting.agenda(tick.connection)
        if _is_due(agenda.next_due, tick.now):
            attempt(tick, "time runs out", lambda: time_out(tick, limit))
            attempt(tick, "fire schedules", lambda: fire_schedules(tick, limit))
            agenda = waiting.agenda(tick.connection)
        if agenda.backfills and thorough:
            attempt(tick, "go on with backfills", lambda: extend_backfills(tick, limit))
            agenda = waiting.agenda(tick.connection)
        if agenda.cancelling_runs:
            attempt(tick, "cancel runs", lambda: cancel_runs(tick, 5 * limit))
        if agenda.untold_runs:
            attempt(tick, "tell runs what has waited", lambda: catch_up(tick))
        if agenda.pending_runs:
            attempt(tick, "begin runs", lambda: begin_runs(tick, limit))
        if agenda.expanding_runs:
            attempt(tick, "create tasks of fan-outs", lambda: expand_runs(tick, limit))
        if agenda.closing_runs:
            attempt(tick, "cancel what ended runs have left", lambda: close_runs(tick, limit))
        advance_runs(tick)
        if agenda.held and thorough:
            attempt(tick, "release tasks", lambda: release_known(tick, self._fleet, limit))
        if self._fleet.knowers.crowds:
            attempt(tick, "find places for tasks", lambda: release_crowded(tick, self._fleet, limit))
        if thorough:
            attempt(tick, "free stuck runs", lambda: self._code.free_stuck(tick, limit))
        if _is_due(agenda.next_due, tick.now):
            attempt(tick, "make due tasks ready", lambda: fire_due(tick, limit))
            grace = self._settings.run_timeout_grace
            attempt(tick, "fire timers", lambda: fire_timers(tick, limit, grace))
            attempt(tick, "expire tasks", lambda: expire(tick, limit))
            if self._fleet.is_in_view:  # otherwise nobody can say what is known
                attempt(tick, "fail unknown tasks", lambda: fail_unknown(tick, self._fleet, limit))
            advance_runs(tick)
        busy = agenda.is_busy or _is_due(agenda.next_due, tick.now)
        if busy or tick.delayed or tick.has_wishes or tick.runs_to_begin:
            agenda = waiting.agenda(tick.connection)
        self._agenda = agenda
        return max(self._until_next(agenda, tick.now), _CONTESTED if tick.contested else 0.0)

    def _until_next(self, agenda: Agenda, now: datetime) -> float:
        if agenda.is_busy:
            return 0.0
        patience = self._settings.safety_scan
        if agenda.next_due is not None:
            patience = min(patience, max(0.0, (agenda.next_due - now).total_seconds()))
        return patience


def _is_due(due: datetime | None, now: datetime) -> bool:
    return due is not None and due <= now
