"""The way to OpenTelemetry, whether or not it is installed.

A process of ours (`orchestrator scheduler`, `worker`, `api`) exports spans where the extra `otel` is installed and the
standard variables name a receiver (`OTEL_EXPORTER_OTLP_ENDPOINT`), or where its application has set a tracer provider
of its own. A program that enqueues is left as it is: the spans of its calls go where its other spans go.
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
"""Seconds that the last spans have to be sent when a process ends."""
_UNTRACED = Untraced()


def sending(operation: str, name: str, queue: str = "", *, count: int | None = None) -> AbstractContextManager[Sent]:
    """Return what stands around a call that creates tasks or runs: a span, if this program uses OpenTelemetry.

    Whatever is created inside belongs to that span (`trace_context.current_trace`).
    """
    if not has_provider():
        return _UNTRACED
    from orchestrator.tracing.calls import traced_sending  # needs OpenTelemetry, which the program has loaded

    return traced_sending(operation, name, queue, count)


def serving(method: str, route: str, trace: str | None) -> AbstractContextManager[object]:
    """Return what stands around a request that is served: what is created inside belongs to its span, or to `trace`."""
    found = parse(trace)
    if found is not None:
        set_trace(str(found))
    if not has_provider():
        return _UNTRACED
    from orchestrator.tracing.calls import traced_request

    return traced_request(method, route)


def begin_tracing(role: str, instance: str = "") -> Spans | None:
    """Begin to export spans from a process of ours, if that is configured; return the tracer.

    It is to be called after the last fork, and after the application was imported, which may have set a provider.
    """
    if not exporting():
        return None
    from orchestrator.tracing.export import spans_of  # loads OpenTelemetry's SDK

    return spans_of(role, instance)


def enter(trace: str) -> object:
    """Have what the current thread or coroutine does belong to a span of another process; return what `leave` takes."""
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
