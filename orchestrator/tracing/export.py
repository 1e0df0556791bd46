"""The export of spans over OTLP, by the standard variables of OpenTelemetry.

A thread of the SDK sends them in batches. While the receiver cannot be reached, they are kept up to a limit
(`OTEL_BSP_MAX_QUEUE_SIZE`) and then dropped: nobody waits for it.
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

_LOUD = ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal", "opentelemetry.sdk.trace.export")
"""Loggers that say of each batch that it could not be sent; ours says it once."""


def spans_of(role: str, instance: str) -> Spans:
    """Return the tracer of this process: of the application's provider, or of one that is set now."""
    if has_provider():
        provider = trace.get_tracer_provider()
        flush = getattr(provider, "force_flush", None)
        return Spans(provider, _Flush(flush)) if flush is not None else Spans(provider)
    resource: dict[str, str] = {"service.instance.id": instance} if instance else {}
    if not os.environ.get("OTEL_SERVICE_NAME") and "service.name=" not in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    ):
        resource["service.name"] = f"orchestrator-{role}"
    for name in _LOUD:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    own = TracerProvider(resource=Resource.create(resource), shutdown_on_exit=False)
    own.add_span_processor(BatchSpanProcessor(_Exporter()))
    trace.set_tracer_provider(own)
    return Spans(own, _Flush(own.force_flush))


class _Exporter(SpanExporter):
    """Sends spans, and says once when that does not work, and once when it does again."""

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
        """Say that nothing waits here."""
        return self._otlp.force_flush(timeout_millis)


class _Flush:
    """Sends what is ready in a thread, one at a time: a receiver that does not answer keeps nobody else."""

    def __init__(self, flush: Callable[[], object]) -> None:
        self._flush = flush
        self._thread: threading.Thread | None = None

    def __call__(self, seconds: float) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._flush, name="spans", daemon=True)
            self._thread.start()
        self._thread.join(seconds)
