"""Spans of calls that create tasks and runs, by the tracer provider of the program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    TraceFlags,
    get_current_span,
    set_span_in_context,
)

from orchestrator.trace_context import Trace, current_trace, parse
from orchestrator.tracing.switch import Sent

SCOPE = "orchestrator"
SYSTEM = "orchestrator"
"""The messaging system, by OpenTelemetry's conventions."""


class _Traced(Sent):
    """A call with a span of its own."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def created(self, identifier: bytes) -> None:
        self._span.set_attribute("messaging.message.id", str(UUID(bytes=identifier)))


@contextmanager
def traced_sending(operation: str, name: str, queue: str, count: int | None) -> Iterator[Sent]:
    """Wrap a call in a span. An exception is recorded by its type only, because its text may contain arguments."""
    attributes: dict[str, str | int] = {
        "messaging.system": SYSTEM,
        "messaging.operation.type": "send",
        "messaging.operation.name": operation,
        "orchestrator.name": name,
    }
    if queue:
        attributes["messaging.destination.name"] = queue
    if count is not None:
        attributes["messaging.batch.message_count"] = count
    tracer = trace.get_tracer(SCOPE)
    with tracer.start_as_current_span(
        f"{operation} {name}",
        context=context_of(current_trace()),
        kind=SpanKind.PRODUCER,
        attributes=attributes,
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        try:
            yield _Traced(span)
        except BaseException as error:
            failed(span, type(error).__name__)
            raise


@contextmanager
def traced_request(method: str, route: str) -> Iterator[None]:
    """Wrap a served request in a span."""
    tracer = trace.get_tracer(SCOPE)
    with tracer.start_as_current_span(
        f"{method} {route}",
        context=context_of(current_trace()),
        kind=SpanKind.SERVER,
        attributes={"http.request.method": method, "http.route": route},
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        try:
            yield
        except BaseException as error:
            span.set_attribute("error.type", type(error).__name__)  # mostly mistakes of the caller
            raise


def failed(span: Span, kind: str) -> None:
    """Record in a span that it ended with an error of this type."""
    span.set_attribute("error.type", kind)
    span.set_status(trace.Status(trace.StatusCode.ERROR, kind))


def span_context(trace: Trace) -> SpanContext:
    return SpanContext(int(trace.trace_id, 16), int(trace.span_id, 16), True, TraceFlags(int(trace.flags, 16)))


def context_of(trace: str | None) -> Context | None:
    """Return a context in which the given span is current.

    None leaves the context unchanged: there is no such span, or OpenTelemetry already has a current one.
    """
    parts = parse(trace)
    if parts is None or get_current_span().get_span_context().is_valid:
        return None
    return set_span_in_context(NonRecordingSpan(span_context(parts)))


def context_below(trace: str | None) -> Context:
    """Return a new context with only this span, or an empty one."""
    parts = parse(trace)
    return Context() if parts is None else set_span_in_context(NonRecordingSpan(span_context(parts)), Context())


def attach(trace: str) -> object:
    """Make a span of another process current. Return a token for `detach`."""
    return context.attach(context_below(trace))


def detach(token: Any) -> None:
    """Restore the span that was current before."""
    context.detach(token)
