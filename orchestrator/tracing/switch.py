"""Whether a process exports spans, by the standard variables of OpenTelemetry; and what stands where there are none."""

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
_PARTS = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
_SPOKEN = "http/protobuf"
_IS_NAMED = "OTEL_PYTHON_TRACER_PROVIDER" in os.environ
"""The first that asks for the provider loads it."""


def exporting() -> bool:
    """Say whether this process is to make spans; where that cannot be, say why."""
    if is_disabled(os.environ):
        return False
    if has_provider():
        return True
    endpoint = next((name for name in _ENDPOINTS if os.environ.get(name)), None)
    if endpoint is None:
        return False
    for name in _PROTOCOLS:
        protocol = os.environ.get(name)
        if protocol and protocol != _SPOKEN:
            log.warning("tracing.off: %s is %s; only %s is supported", name, protocol, _SPOKEN)
            return False
    if not all(map(_is_installed, _PARTS)):
        log.warning(
            "tracing.off: %s is set, and the extra otel is not installed: pip install 'durable-orchestrator[otel]'",
            endpoint,
        )
        return False
    return True


def is_disabled(environ: Mapping[str, str]) -> bool:
    """Say whether the operator wants no spans."""
    return (
        environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        or environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() == "none"
    )


def has_provider() -> bool:
    """Say whether the application has set a tracer provider of its own."""
    api = sys.modules.get("opentelemetry.trace")
    if not _IS_NAMED and getattr(api, "_TRACER_PROVIDER", api) is None:  # as it finds out in ten calls itself
        return False
    return api is not None and not isinstance(api.get_tracer_provider(), api.ProxyTracerProvider)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


class Sent:
    """A call that creates tasks or runs. This one has no span."""

    def created(self, identifier: bytes) -> None:
        """Say which task or run it is that is created."""


class Untraced(AbstractContextManager[Sent]):
    """What stands around such a call where there are no spans."""

    def __init__(self) -> None:
        self._sent = Sent()

    def __enter__(self) -> Sent:
        return self._sent

    def __exit__(self, *_: object) -> None:
        return None
