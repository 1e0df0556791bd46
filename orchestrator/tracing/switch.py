"""Whether a process exports spans, by OpenTelemetry's standard variables, and the stand-ins without OpenTelemetry."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib.util import find_spec

from orchestrator.telemetry import get_logger

log = get_logger("tracing")

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_REQUIRED_MODULES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
_SUPPORTED_PROTOCOL = "http/protobuf"
_PROVIDER_IS_NAMED = "OTEL_PYTHON_TRACER_PROVIDER" in os.environ
"""This variable names a provider, which the first call for the provider loads."""


def exporting() -> bool:
    """Return whether this process should export spans. Log the reason if it cannot although it should."""
    if is_disabled(os.environ):
        return False
    if has_provider():
        return True
    endpoint = next((name for name in _ENDPOINTS if os.environ.get(name)), None)
    if endpoint is None:
        return False
    for name in _PROTOCOLS:
        protocol = os.environ.get(name)
        if protocol and protocol != _SUPPORTED_PROTOCOL:
            log.warning("tracing.off: %s is %s; only %s is supported", name, protocol, _SUPPORTED_PROTOCOL)
            return False
    if not all(map(_is_installed, _REQUIRED_MODULES)):
        log.warning(
            "tracing.off: %s is set, and the extra otel is not installed: pip install 'durable-orchestrator[otel]'",
            endpoint,
        )
        return False
    return True


def is_disabled(environ: Mapping[str, str]) -> bool:
    """Return whether the operator has disabled spans."""
    return (
        environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        or environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() == "none"
    )


def has_provider() -> bool:
    """Return whether the application has set its own tracer provider."""
    api = sys.modules.get("opentelemetry.trace")
    if not _PROVIDER_IS_NAMED and getattr(api, "_TRACER_PROVIDER", api) is None:  # OpenTelemetry needs ten calls
        return False
    return api is not None and not isinstance(api.get_tracer_provider(), api.ProxyTracerProvider)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


class Sent:
    """A call that creates tasks or runs, without a span."""

    def created(self, identifier: bytes) -> None:
        """Record the id of the created task or run."""


class Untraced(AbstractContextManager[Sent]):
    """The context manager used without spans."""

    def __init__(self) -> None:
        self._sent = Sent()

    def __enter__(self) -> Sent:
        return self._sent

    def __exit__(self, *_: object) -> None:
        return None
