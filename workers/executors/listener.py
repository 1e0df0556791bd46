"""Forwards the output, progress and end of an execution to the logs and progress of its task."""

from __future__ import annotations

import asyncio
import time

from orchestrator.domain.redaction import scrub
from orchestrator.transport.codec import LogLine, ProgressMark
from orchestrator.workers.reporting.lines import MAX_LINE_LENGTH, blocks
from orchestrator.workers.running.job import Job, Stage
from orchestrator.workers.running.task_runtime import Outbox


class Listener:
    """Receives the output, progress and end of an execution."""

    def __init__(self, job: Job, outbox: Outbox, limit: asyncio.Timeout) -> None:
        self._job = job
        self._outbox = outbox
        self._limit = limit

    def log(self, line: str, *, level: str = "info") -> None:
        if self._job.stage is Stage.RUNNING:
            text = "\n".join(map(_split_long, blocks(scrub(line, self._job.secrets))))
            self._outbox.log_lines(self._job, LogLine(time.time(), self._job.dispatch.attempt, level, text))

    def ended(self) -> None:
        if not self._limit.expired():
            self._limit.reschedule(None)

    def progress(self, done: float, total: float | None = None, message: str = "") -> None:
        if self._job.stage is Stage.RUNNING:
            fraction = min(1.0, max(0.0, done / total if total else done))
            text = scrub(message, self._job.secrets)
            self._outbox.publish_progress(
                self._job.dispatch.id, ProgressMark(self._job.dispatch.attempt, fraction, text)
            )


def _split_long(block: str) -> str:
    """Split a line that is too long into several. Whole lines stay as they are."""
    if len(block) <= MAX_LINE_LENGTH:
        return block
    return "\n".join([block[start : start + MAX_LINE_LENGTH] for start in range(0, len(block), MAX_LINE_LENGTH)])
