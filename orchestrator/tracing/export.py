"""The export of spans over OTLP, configured by OpenTelemetry's standard variables.

A thread of the SDK sends spans in batches. While the receiver is down, spans are kept up to a limit
(`OTEL_BSP_MAX_QUEUE_SIZE`) and then dropped, so that nothing waits for the receiver.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from orchestrator.telemetry import Outage, get_logger
from orchestrator.tracing.spans import Spans
from orchestrator.tracing.switch import has_provider

log = get_logger("tracing")

_NOISY_LOGGERS = ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal", "opentelemetry.sdk.trace.export")
"""Loggers that report every batch that could not be sent. Our logger reports the outage once."""


def spans_of(role: str, instance: str) -> Spans:
    """Return the tracer of this process, with the application's provider or with a new one."""
    if has_provider():
        provider = trace.get_tracer_provider()
        flush = getattr(provider, "force_flush", None)
        return Spans(provider, _Flusher(flush)) if flush is not None else Spans(provider)
    resource: dict[str, str] = {"service.instance.id": instance} if instance else {}
    if not os.environ.get("OTEL_SERVICE_NAME") and "service.name=" not in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    ):
        resource["service.name"] = f"orchestrator-{role}"
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    provider = TracerProvider(resource=Resource.create(resource), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_Exporter()))
    trace.set_tracer_provider(provider)
    return Spans(provider, _Flusher(provider.force_flush))


class _Exporter(SpanExporter):
    """Sends spans, and logs the start and the end of an outage once."""

    def __init__(self) -> None:
        self._otlp = OTLPSpanExporter()
        self._outage = Outage(log, "The receiver of spans", "they are dropped")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._otlp.export(spans)
        if result is SpanExportResult.SUCCESS:
            self._outage.worked()
        else:
            self._outage.failed("it could not be reached, or refused them")
        return result

    def shutdown(self) -> None:
        self._otlp.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Flush the OTLP exporter."""
        return self._otlp.force_flush(timeout_millis)


class _Flusher:
    """Flushes spans in a single thread, so that a receiver that does not answer blocks nobody."""

    def __init__(self, flush: Callable[[], object]) -> None:
        self._flush = flush
        self._thread: threading.Thread | None = None

    def __call__(self, seconds: float) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._flush, name="spans", daemon=True)
            self._thread.start()
        self._thread.join(seconds)
