"""The spans of attempts, where this process makes some; and, whether or not, the trace that their code belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.domain.ids import to_text
from orchestrator.domain.tasks.outcomes import AttemptReport
from orchestrator.domain.tasks.task import Failed, Lost, Returned
from orchestrator.tracing.entry import enter, leave
from orchestrator.workers.running.job import Job

if TYPE_CHECKING:
    from orchestrator.tracing.spans import Spans


class AttemptSpans:
    """Knows the tracer, if spans are exported."""

    def __init__(self, spans: Spans | None = None) -> None:
        self._spans = spans
        self.makes_any = spans is not None
        """Else only the code of a task that is traced already belongs to something."""

    def begin(self, job: Job) -> object:
        """Have what the current thread or coroutine does belong to an attempt; return what `leave` takes."""
        if self._spans is not None:
            return self._begin(self._spans, job)
        return None if job.trace is None else enter(job.trace)

    def _begin(self, spans: Spans, job: Job) -> object:
        task = job.dispatch
        about: dict[str, str | int] = {
            "messaging.destination.name": task.queue,
            "messaging.message.id": to_text(task.id),
            "orchestrator.attempt": task.attempt,
        }
        if task.run_id is not None:
            about["orchestrator.run.id"] = to_text(task.run_id)
        job.span = spans.attempt(
            task.trace, task.id, task.attempt, task.name, is_turn=task.is_turn_task, attributes=about
        )
        job.trace = spans.trace_of(job.span)
        return spans.enter(job.span)

    def leave(self, job: Job, token: object) -> None:
        """Have it belong to nothing any more."""
        if job.trace is not None:
            leave(token)

    def ended(self, job: Job, report: AttemptReport) -> None:
        """End the span of an attempt whose end is being reported. It says what failed, and no text of that."""
        span, job.span = job.span, None
        if span is None or self._spans is None:
            return
        if job.step:
            span.set_attributes({"orchestrator.workflow": job.step["workflow"], "orchestrator.step": job.step["step"]})
        kind = report.error.kind if isinstance(report, Failed) else "WorkerLost" if isinstance(report, Lost) else None
        if isinstance(report, Returned):
            span.set_attribute("orchestrator.outcome", "returned")
        self._spans.end(span, kind)
