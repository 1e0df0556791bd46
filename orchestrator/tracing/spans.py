"""Spans made by our own processes: of attempts, dispatches and runs.

Their ids derive from the ids of tasks and runs (`trace_context.py`). A tracer of OpenTelemetry's SDK takes ids from a
generator, which is replaced by `_ChosenIds`. With a provider of another make, the ids are whatever it generates.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opentelemetry.context import attach
from opentelemetry.trace import Link, Span, SpanKind, TracerProvider, set_span_in_context

from orchestrator.trace_context import Trace, attempt_span, own_trace, run_span, set_trace
from orchestrator.tracing.calls import SCOPE, SYSTEM, context_below, failed, span_context

Attributes = Mapping[str, str | int | float | bool]


class Spans:
    """Creates the spans of one process."""

    def __init__(self, provider: TracerProvider, flush: Callable[[float], None] = lambda _: None) -> None:
        self._tracer = provider.get_tracer(SCOPE)
        self._ids: _ChosenIds | None = None
        self.flush = flush
        """Sends finished spans in a thread, and waits up to so many seconds."""
        generator = getattr(self._tracer, "id_generator", None)
        if isinstance(generator, _ChosenIds):
            self._ids = generator
        elif generator is not None:
            self._ids = _ChosenIds(generator)
            self._tracer.id_generator = self._ids  # type: ignore[attr-defined]

    def attempt(
        self, trace: str | None, task: bytes, attempt: int, name: str, *, is_turn: bool, attributes: Attributes
    ) -> Span:
        """Begin the span of an attempt, below the span that created its task, with a link to the previous attempt.

        The attempts of a turn task are turns of a workflow's code. They get no links.
        """
        trace_id = own_trace(task) if trace is None else trace[3:35]
        links: list[Link] = []
        if attempt > 1 and not is_turn and self._ids is not None:
            before = Trace(trace_id, attempt_span(task, attempt - 1), "01" if trace is None else trace[53:])
            links.append(Link(span_context(before), {"orchestrator.attempt": attempt - 1}))
        operation = "turn" if is_turn else "run"
        return self._start(
            f"{operation} {name}",
            trace,
            attempt_span(task, attempt),
            own_trace_id=trace_id,
            kind=SpanKind.CONSUMER,
            attributes=_messaging_attributes("process", operation, name, attributes),
            links=links,
        )

    @staticmethod
    def trace_of(span: Span) -> str:
        context = span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 0xFF:02x}"

    @staticmethod
    def enter(span: Span) -> object:
        """Make a span of this process current. Return a token for `entry.leave`."""
        set_trace(Spans.trace_of(span))
        return attach(set_span_in_context(span))

    @staticmethod
    def end(span: Span, error: str | None) -> None:
        """End a span, with the type of its error, if any."""
        if error is not None:
            failed(span, error)
        span.end()

    def dispatch(self, trace: str, name: str, began: float, ended: float, attributes: Attributes) -> None:
        """Record the span of a dispatch, from the moment when its task was ready until it was sent."""
        span = self._start(
            f"dispatch {name}",
            trace,
            began=began,
            kind=SpanKind.CLIENT,
            attributes=_messaging_attributes("send", "dispatch", name, attributes),
        )
        span.end(_nanoseconds(max(began, ended)))

    def run(
        self, trace: str, run: bytes, name: str, began: float, ended: float, error: str | None, attributes: Attributes
    ) -> None:
        """Record the span of an ended run. A run without a parent span has its own span id in `trace`."""
        own = run_span(run)
        is_root = trace[36:52] == own
        span = self._start(
            f"workflow {name}",
            None if is_root else trace,
            own,
            own_trace_id=trace[3:35],
            began=began,
            kind=SpanKind.INTERNAL,
            attributes={"orchestrator.name": name, **attributes},
        )
        if error is not None:
            failed(span, error)
        span.end(_nanoseconds(max(began, ended)))

    def root_of_run(self, run: bytes, name: str) -> str:
        """Return the traceparent of a run without a parent span, sampled if the sampler says so."""
        trace = Trace(own_trace(run), run_span(run), "01")
        sampler = getattr(self._tracer, "sampler", None)
        if sampler is not None:
            sampled = sampler.should_sample(None, int(trace.trace_id, 16), f"workflow {name}", SpanKind.INTERNAL)
            trace = trace._replace(flags="01" if sampled.decision.is_sampled() else "00")
        return str(trace)

    def _start(
        self,
        name: str,
        trace: str | None,
        span_id: str | None = None,
        *,
        kind: SpanKind,
        attributes: Attributes,
        own_trace_id: str | None = None,
        began: float | None = None,
        links: Sequence[Link] = (),
    ) -> Span:
        if self._ids is not None:
            self._ids.choose(own_trace_id if trace is None else None, span_id)
        try:
            return self._tracer.start_span(
                name,
                context=context_below(trace),
                kind=kind,
                attributes=attributes,
                links=links,
                start_time=None if began is None else _nanoseconds(began),
                record_exception=False,
                set_status_on_exception=False,
            )
        finally:
            if self._ids is not None:
                self._ids.choose(None, None)


class _ChosenIds:
    """An id generator that returns the ids chosen by the current thread, and otherwise random ones."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._chosen = threading.local()

    def choose(self, trace_id: str | None, span_id: str | None) -> None:
        """Set the ids of this thread's next span; None for a random id."""
        self._chosen.trace_id, self._chosen.span_id = trace_id, span_id

    def generate_trace_id(self) -> int:
        chosen = getattr(self._chosen, "trace_id", None)
        return self._generator.generate_trace_id() if chosen is None else int(chosen, 16)

    def generate_span_id(self) -> int:
        chosen = getattr(self._chosen, "span_id", None)
        return self._generator.generate_span_id() if chosen is None else int(chosen, 16)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)


def _messaging_attributes(
    operation_type: str, operation: str, name: str, attributes: Attributes
) -> dict[str, str | int | float | bool]:
    return {
        "messaging.system": SYSTEM,
        "messaging.operation.type": operation_type,
        "messaging.operation.name": operation,
        "orchestrator.name": name,
        **attributes,
    }


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
