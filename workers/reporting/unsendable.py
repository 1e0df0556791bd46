"""Replaces reports that cannot be sent, so that each costs only its own task, not the worker process."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from orchestrator.domain.code.activation import Activated, QueryResult, Violation
from orchestrator.domain.ids import to_text
from orchestrator.domain.plain import REFUSALS
from orchestrator.domain.sealed import seal_struct
from orchestrator.domain.tasks.outcomes import AttemptReport, Flush
from orchestrator.domain.tasks.task import Failed, Noted, Started, Succeeded, TaskError
from orchestrator.sealing import Vault
from orchestrator.telemetry import get_logger
from orchestrator.transport.codec import encode_flush
from orchestrator.workers.reporting.kept import PendingReport

log = get_logger("worker")


def encoded(items: Sequence[PendingReport], worker: str = "", vault: Vault | None = None) -> bytes:
    """Return the message with these reports and their turns. Raise one of REFUSALS if they cannot be sent."""
    reports = [item.report for item in items]
    turns = [item.turn for item in items if item.turn is not None]
    if vault is not None:
        reports = [seal_struct(report, vault) for report in reports]
        turns = [seal_struct(turn, vault) for turn in turns]
    return encode_flush(Flush(worker, reports, turns))


def sendable(item: PendingReport, worker: str = "", vault: Vault | None = None) -> PendingReport:
    """Return a report, or in its place a failure of its own task that says why it cannot be sent.

    A turn that follows a success is dropped: the leader then sends a turn, whose own report says why.
    """
    problem = ""
    for candidate in (item, replace(item, turn=None)):
        try:
            encoded([candidate], worker, vault)
        except REFUSALS as error:
            problem = f"{type(error).__name__}: {error}"
        else:
            return candidate
    if not isinstance(item.report, AttemptReport | Noted):  # tasks were encoded before: see `Reporter.send_tasks`
        return item
    task = to_text(item.report.id)
    log.error("worker.report_unsendable task=%s: %s", task, problem, extra={"task_id": task})
    return replace(item, turn=None, report=_failure(item.report, problem))


def _failure(report: AttemptReport | Noted, problem: str) -> AttemptReport:
    if isinstance(report, Activated):
        text = f"The commands of this turn cannot be sent: {problem}. Start less in one turn, or pass smaller values."
        error = TaskError("WrongState", text)
        answers = [QueryResult(answer.id, error=error) for answer in report.answers]
        stuck = Violation(report.through, "TurnUnsendable", text)
        return Activated(report.id, report.attempt, report.duration, stuck=stuck, answers=answers)
    if isinstance(report, Succeeded | Failed):
        text = f"The end of this attempt cannot be sent: {problem}. Return or raise less, and pass smaller values."
        return Failed(report.id, report.attempt, report.duration, TaskError("PayloadError", text), retryable=False)
    return Started(report.id, report.attempt, 0.0)
