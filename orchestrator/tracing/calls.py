"""Spans of calls that create tasks and runs, made by whatever tracer provider the program has."""

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
"""Of messaging, in the words of the conventions."""


class _Traced(Sent):
    """A call with a span of its own."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def created(self, identifier: bytes) -> None:
        self._span.set_attribute("messaging.message.id", str(UUID(bytes=identifier)))


@contextmanager
def traced_sending(operation: str, name: str, queue: str, count: int | None) -> Iterator[Sent]:
    """Have a span stand around a call; an exception is noted in it by its type, for its text may hold arguments."""
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
    """Have a span stand around a request that is served."""
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
            span.set_attribute("error.type", type(error).__name__)  # most of these are mistakes of the caller
            raise


def failed(span: Span, kind: str) -> None:
    """Note in a span that it ended with an error of this type."""
    span.set_attribute("error.type", kind)
    span.set_status(trace.Status(trace.StatusCode.ERROR, kind))


def span_context(trace: Trace) -> SpanContext:
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
