"""Do what waits in Postgres: requests, schedules, runs, cancellations, due tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from orchestrator.scheduler.code.ends import close_runs
from orchestrator.scheduler.code.runs import CodeRuns, fire_timers
from orchestrator.scheduler.fleet.view import Fleet
from orchestrator.scheduler.flow import requests as flow_requests
from orchestrator.scheduler.isolation import attempt
from orchestrator.scheduler.news import News
from orchestrator.scheduler.remembering import Remembering
from orchestrator.scheduler.requests import Requests
from orchestrator.scheduler.runs.advance import Runs
from orchestrator.scheduler.runs.backlog import Backlog
from orchestrator.scheduler.runs.cancels import Cancels
from orchestrator.scheduler.schedules import extend_backfills, fire_schedules
from orchestrator.scheduler.tasks.timers import expire, fail_unknown, fire_due, release_crowded, release_known
from orchestrator.scheduler.transaction import Transaction
from orchestrator.settings import Settings
from orchestrator.store.tasks import waiting
from orchestrator.store.tasks.waiting import AgendaProbe

_CONTESTED = 0.05
"""Seconds before the next look at a key that somebody's open transaction may be taking."""


Part = Callable[[News, int], object]
"""A part of a tick, which is given how many rows it may work on."""


@dataclass
class Agenda(Remembering):
    """Remembers what waits, from one tick to the next."""

    settings: Settings
    fleet: Fleet
    code: CodeRuns
    backlog: Backlog
    runs: Runs
    cancels: Cancels
    requests: Requests
    _agenda: AgendaProbe | None = None
    _next_part: int = 0
    """Which of those who wait in the line of runs come first, where there is no time for all of them."""
    was_empty: bool = False
    """There was nothing to do in the last tick, by what the tick before it has left."""

    def rolled_back(self) -> None:
        """What was done waits again."""
        self._agenda = None

    def run(self, tx: Transaction, news: News, found: AgendaProbe | None) -> float:
        """Do what waits, and note what waits next; return how many seconds that can wait.

        `found` is what waited when the transaction began, if the tick is one that looks at everything.
        """

        def do(what: str, part: Part) -> None:
            attempt(tx, news, what, part, self.settings.batch)

        fleet, runs, wakeups = self.fleet, self.runs, news.wakeups
        thorough = found is not None
        agenda = found or self._agenda
        self.was_empty = False
        if agenda is not None and not thorough and self._is_empty(agenda, news, tx.now):
            self.was_empty = True
            return self._until_next(agenda, tx.now)
        asked = wakeups.has_requests or wakeups.runs_to_begin or wakeups.handed_back
        if agenda is None or asked or (thorough and wakeups.has_advanced):
            agenda = waiting.probe_agenda(tx.connection)
        if thorough:
            self.backlog.free_older(tx, news)
        if agenda.inbox:
            do("apply requests", lambda fresh, limit: self.requests.apply(tx, fresh, limit))
            agenda = waiting.probe_agenda(tx.connection)
        if _is_due(agenda.next_due, tx.now):
            do("fire schedules", lambda fresh, limit: fire_schedules(tx, fresh, self.cancels, limit))
            agenda = waiting.probe_agenda(tx.connection)
        if agenda.backfills and thorough:
            do("go on with backfills", lambda fresh, limit: extend_backfills(tx, fresh, limit))
            agenda = waiting.probe_agenda(tx.connection)
        if agenda.cancelling_runs:
            runs.advance(tx, news)  # what ended in this tick is counted before it is asked what is left
            do("cancel runs", lambda fresh, limit: self.cancels.go_on(tx, fresh, 5 * limit))
        self._plan(tx, agenda, do)
        if agenda.closing_runs:
            do("cancel what ended runs have left", lambda fresh, limit: close_runs(tx, fresh, limit))
        runs.advance(tx, news)
        if agenda.held and thorough:
            do("release tasks", lambda fresh, limit: release_known(tx, fresh, fleet, limit))
        if fleet.capabilities.crowds:
            do("find places for tasks", lambda fresh, limit: release_crowded(tx, fresh, fleet, news.over(), limit))
        if thorough:
            do("free stuck runs", lambda fresh, limit: self.code.free_stuck(tx, fresh, limit))
        if _is_due(agenda.next_due, tx.now):
            do("make due tasks ready", lambda _, limit: fire_due(tx, limit))
            do("fire timers", lambda fresh, limit: self._fire_timers(tx, fresh, limit))
            do("expire tasks", lambda fresh, limit: expire(tx, fresh, limit))
            if fleet.is_in_view:  # otherwise nobody can say what is known
                do("fail unknown tasks", lambda fresh, limit: fail_unknown(tx, fresh, fleet, limit))
            runs.advance(tx, news)
        busy = agenda.is_busy or _is_due(agenda.next_due, tx.now)
        if busy or wakeups.delayed or wakeups.has_requests or wakeups.runs_to_begin or wakeups.runs_to_expand:
            agenda = waiting.probe_agenda(tx.connection)
        self._agenda = agenda
        return max(self._until_next(agenda, tx.now), _CONTESTED if wakeups.contested else 0.0)

    def _plan(self, tx: Transaction, agenda: AgendaProbe, do: Callable[[str, Part], None]) -> None:
        """Let runs go on that wait. Whatever takes all the time of a tick comes last in the next one."""
        runs = self.runs
        parts: list[tuple[bool, str, Part]] = [
            (agenda.untold_runs, "tell runs what has waited", lambda fresh, _: runs.catch_up(tx, fresh)),
            (agenda.pending_runs, "begin runs", lambda fresh, limit: runs.begin(tx, fresh, limit)),
            (agenda.expanding_runs, "create tasks of fan-outs", lambda fresh, limit: runs.expand(tx, fresh, limit)),
        ]
        waiting = [(place, what, part) for place, (waits, what, part) in enumerate(parts) if waits]
        waiting.sort(key=lambda one: (one[0] - self._next_part) % len(parts))
        tx.budget.evaluated.clear()
        tx.budget.read_nodes = 0
        for _, what, part in waiting:
            do(what, part)
        if waiting:
            self._next_part = (waiting[0][0] + 1) % len(parts) if tx.budget.is_spent else 0

    def _is_empty(self, agenda: AgendaProbe, news: News, now: datetime) -> bool:
        """Say whether there is nothing to do, and nothing to look for."""
        wakeups = news.wakeups
        asked = (
            wakeups.has_requests or wakeups.runs_to_begin or wakeups.delayed or wakeups.contested or wakeups.handed_back
        )
        asked |= wakeups.runs_to_expand
        waits = agenda.is_busy or _is_due(agenda.next_due, now) or bool(self.fleet.capabilities.crowds)
        return not (asked or waits or news.tasks.moved or news.runs)

    def _fire_timers(self, tx: Transaction, news: News, limit: int) -> None:
        late = self.cancels.time_out(tx, limit, self.settings.run_timeout_grace)
        flow_requests.tell(tx, news, self.runs, fire_timers(tx, news, self.backlog, late, limit))

    def _until_next(self, agenda: AgendaProbe, now: datetime) -> float:
        if agenda.is_busy:
            return 0.0
        due_in = self.settings.safety_scan
        if agenda.next_due is not None:
            due_in = min(due_in, max(0.0, (agenda.next_due - now).total_seconds()))
        return due_in


def _is_due(due: datetime | None, now: datetime) -> bool:
    return due is not None and due <= now
