"""The entry point to OpenTelemetry, whether or not it is installed.

Our processes (`orchestrator scheduler`, `worker`, `api`) export spans if the extra `otel` is installed and the standard
variables name a receiver (`OTEL_EXPORTER_OTLP_ENDPOINT`), or if the application has set a tracer provider. A program
that enqueues is not configured: the spans of its calls go wherever its other spans go.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from orchestrator.trace_context import parse, set_trace
from orchestrator.tracing.switch import Sent, Untraced, exporting, has_provider

if TYPE_CHECKING:
    from orchestrator.tracing.spans import Spans

LAST_SPANS = 2.0
"""Seconds for sending the last spans when a process ends."""
_UNTRACED = Untraced()


def sending(operation: str, name: str, queue: str = "", *, count: int | None = None) -> AbstractContextManager[Sent]:
    """Return a context manager for a call that creates tasks or runs: a span, if this program uses OpenTelemetry.

    Everything created inside belongs to that span (`trace_context.current_trace`).
    """
    if not has_provider():
        return _UNTRACED
    from orchestrator.tracing.calls import traced_sending  # needs OpenTelemetry, which the program has loaded

    return traced_sending(operation, name, queue, count)


def serving(method: str, route: str, trace: str | None) -> AbstractContextManager[object]:
    """Return a context manager for serving a request. Tasks created inside belong to its span, or else to `trace`."""
    parsed = parse(trace)
    if parsed is not None:
        set_trace(str(parsed))
    if not has_provider():
        return _UNTRACED
    from orchestrator.tracing.calls import traced_request

    return traced_request(method, route)


def begin_tracing(role: str, instance: str = "") -> Spans | None:
    """Start exporting spans from one of our processes, if configured. Return the tracer.

    Call this after the last fork, and after importing the application, which may set a provider.
    """
    if not exporting():
        return None
    from orchestrator.tracing.export import spans_of  # loads OpenTelemetry's SDK

    return spans_of(role, instance)


def enter(trace: str) -> object:
    """Make the current thread or coroutine work for a span of another process. Return a token for `leave`."""
    set_trace(trace)
    if "opentelemetry.trace" not in sys.modules:
        return None
    from orchestrator.tracing.calls import attach

    return attach(trace)


def leave(token: object) -> None:
    set_trace(None)
    if token is not None:
        from orchestrator.tracing.calls import detach

        detach(token)
