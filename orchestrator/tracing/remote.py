"""Spans of other processes, as OpenTelemetry wants them."""

from __future__ import annotations

from typing import Any

from opentelemetry import context
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, get_current_span, set_span_in_context

from orchestrator.trace_context import Trace, parse


def span_context(trace: Trace) -> SpanContext:
    """Return the context of a span of another process."""
    return SpanContext(int(trace.trace_id, 16), int(trace.span_id, 16), True, TraceFlags(int(trace.flags, 16)))


def context_of(trace: str | None) -> Context | None:
    """Return a context in which such a span is the current one.

    None stands for the context as it is: there is no such span, or OpenTelemetry has one already.
    """
    parts = parse(trace)
    if parts is None or get_current_span().get_span_context().is_valid:
        return None
    return set_span_in_context(NonRecordingSpan(span_context(parts)))


def context_below(trace: str | None) -> Context:
    """Return a context with this span and nothing else; an empty one if there is none."""
    parts = parse(trace)
    return Context() if parts is None else set_span_in_context(NonRecordingSpan(span_context(parts)), Context())


def attach(trace: str) -> object:
    """Make a span of another process the current one; return what `detach` takes."""
    return context.attach(context_below(trace))


def detach(token: Any) -> None:
    """Make what was current before that the current one again."""
    context.detach(token)
