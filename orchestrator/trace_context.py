"""The current span as a W3C traceparent, and span ids that need not be communicated.

    00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01
    version, trace (16 bytes), span (8 bytes), flags: 01 if it is recorded

OpenTelemetry is not required: a process without it still passes traces on. The span ids of runs and attempts are
derived from the ids of runs and tasks. So the scheduler and all workers compute the same parent of a child, and the
same previous attempt, without exchanging them.
"""

from __future__ import annotations

import re
import sys
from contextvars import ContextVar
from hashlib import blake2b
from typing import NamedTuple

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
LENGTH = 55
"""The length of a traceparent of version 00, the format that is stored and sent."""

_current: ContextVar[str | None] = ContextVar("orchestrator_trace", default=None)
"""The current span, if OpenTelemetry does not know it."""


class Trace(NamedTuple):
    """A traceparent, in parts."""

    trace_id: str
    span_id: str
    flags: str

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"


def parse(text: str | None) -> Trace | None:
    """Parse a traceparent. Return None if it is invalid: such a header is ignored."""
    match = _TRACEPARENT.fullmatch(text) if text is not None else None
    if text is None or match is None or (text.startswith("00") and match[4] is not None):
        return None
    return Trace(match[1], match[2], match[3])


def is_trace(text: str) -> bool:
    """Return whether a text is a traceparent in the format that is stored and sent."""
    return len(text) == LENGTH and text.startswith("00-") and parse(text) is not None


# -- the current span


def current_trace() -> str | None:
    """Return the current span: that of OpenTelemetry, if the program uses it and there is one."""
    api = sys.modules.get("opentelemetry.trace")
    if api is not None and hasattr(api, "get_current_span"):  # otherwise it is being imported
        span = api.get_current_span()
        if span is not api.INVALID_SPAN and (context := span.get_span_context()).is_valid:
            return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 0xFF:02x}"
    return _current.get()


def set_trace(trace: str | None) -> None:
    """Set the span of the current thread or coroutine, or None."""
    _current.set(trace)


def log_fields() -> dict[str, str]:
    """Return the log fields of the current span."""
    trace = current_trace()
    return {} if trace is None else fields_of(trace)


def fields_of(trace: str) -> dict[str, str]:
    """Return the log fields of a span."""
    return {"trace_id": trace[3:35], "span_id": trace[36:52]}


# -- derived ids


def run_span(run: bytes) -> str:
    """Return the span id of a run: the second half of the run's id. `store/tasks/row.py` computes it, too."""
    return run[8:].hex()


def attempt_span(task: bytes, attempt: int) -> str:
    """Return the span id of an attempt."""
    return blake2b(task + attempt.to_bytes(4, "big"), digest_size=8).hexdigest()


def own_trace(identifier: bytes) -> str:
    """Return the trace id of a task or run without a parent span."""
    return blake2b(identifier, digest_size=16).hexdigest()


def below(trace: str, span: str) -> str:
    """Return the traceparent for children of another span in the same trace."""
    return f"{trace[:36]}{span}{trace[52:]}"
