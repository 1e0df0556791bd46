"""Reports that wait to be sent, and how many of them go at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from orchestrator.domain.code.activation import Activated
from orchestrator.domain.code.commands import command_size
from orchestrator.domain.tasks.outcomes import Report
from orchestrator.domain.tasks.task import Enqueued, Noted, Started, Succeeded
from orchestrator.workers.running.job import Job

BATCH = 1_000
"""Reports of one entry of the events stream, at most."""
BATCH_BYTES = 2_000_000


class PendingReport(NamedTuple):
    """A report that has not been applied yet."""

    report: Report
    job: Job | None = None
    """The job that it ends."""
    applied: Callable[[], object] | None = None
    """Called when it is applied, if somebody waits for that."""
    turn: Activated | None = None
    """The next turn that it carries."""


def without_completion(item: PendingReport) -> PendingReport:
    """Return a report without the completion of an attempt in a transaction: that may be lost.

    If it is not, Postgres knows it, and the report only ends the job here. Else no worker has the attempt from now on,
    and the task runs again.
    """
    job = item.job
    if job is None or job.completion is None:
        return item
    return item._replace(report=Started(job.dispatch.id, job.dispatch.attempt, 0.0))


def split(backlog: list[PendingReport], largest: int = BATCH_BYTES) -> tuple[list[PendingReport], list[PendingReport]]:
    """Return the part of a backlog that fits one entry, and the rest."""
    size = 0
    for place, item in enumerate(backlog):
        if isinstance(item.report, Succeeded):
            size += len(item.report.result)
            if item.turn is not None:
                size += sum(map(command_size, item.turn.commands))
        elif isinstance(item.report, Noted):
            size += len(item.report.details)
        elif isinstance(item.report, Activated):
            size += sum(map(command_size, item.report.commands))
        elif isinstance(item.report, Enqueued):
            size += sum(len(task.payload) for task in item.report.tasks)
        if place and (size > largest or place >= BATCH):
            return backlog[:place], backlog[place:]
    return backlog, []
