"""The components of a leader and one transaction, without the leader's loop."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection

from orchestrator.domain.tasks.outcomes import Report
from orchestrator.scheduler.code.runs import CodeRuns
from orchestrator.scheduler.dag.plans import Dags
from orchestrator.scheduler.fleet.view import Fleet
from orchestrator.scheduler.flow.plans import Flows
from orchestrator.scheduler.limits import LaneService
from orchestrator.scheduler.requests import Requests
from orchestrator.scheduler.runs.advance import Runs
from orchestrator.scheduler.runs.backlog import Backlog
from orchestrator.scheduler.runs.cancels import Cancels, retry_tasks
from orchestrator.scheduler.runs.triggers import Triggers
from orchestrator.scheduler.tasks.creation import cancel_tasks
from orchestrator.scheduler.tasks.locked import LockedTasks, Reported
from orchestrator.scheduler.tasks.reports import Reports
from orchestrator.scheduler.tick_result import TickResult
from orchestrator.scheduler.transaction import Transaction
from orchestrator.store.tasks.revival import Revived
from orchestrator.transport.signing import OFF


class Parts:
    """The components that one tick uses."""

    def __init__(self, connection: Connection, now: datetime) -> None:
        self.tx = Transaction(connection, now)
        backlog, lanes = Backlog(), LaneService()
        dags = Dags(backlog, 1_000_000, 1_000)
        fleet = Fleet(5.0)
        code, triggers = CodeRuns(fleet, backlog), Triggers(dags)
        self.runs = Runs(dags, Flows(1_000_000), triggers, code, backlog)
        self.cancels = Cancels(self.runs, backlog)
        self._reports = Reports(code, 2, 100, OFF, 300.0, LockedTasks())
        self._requests = Requests(self.runs, self.cancels, triggers, code, backlog, lanes, fleet, self._reports)

    @property
    def result(self) -> TickResult:
        return self.tx.result

    def report(self, *reports: Report) -> None:
        self._reports.apply_reports(self.tx, [("1-0", "w", report) for report in reports])

    def judge(self, *verdicts: Reported) -> None:
        self._reports.apply_reports(self.tx, verdicts)

    def begin(self) -> None:
        self.runs.begin(self.tx, 10)

    def advance(self) -> None:
        self.runs.advance(self.tx)

    def apply_inbox(self, limit: int) -> None:
        self._requests.apply(self.tx, limit)

    def cancel(self, tasks: list[bytes]) -> None:
        cancel_tasks(self.tx, tasks)

    def cancel_runs(self, limit: int) -> None:
        self.advance()
        self.cancels.go_on(self.tx, limit)

    def retry(self, tasks: list[bytes]) -> Revived:
        return retry_tasks(self.tx, self.runs, tasks)
