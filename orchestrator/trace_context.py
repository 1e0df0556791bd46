"""Which span the current code belongs to, as a W3C traceparent; and ids of spans that nobody has to be told.

    00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01
    version, trace (16 bytes), span (8 bytes), flags: 01 if it is recorded

This needs no OpenTelemetry: a process without it passes traces on all the same. The ids of the spans of runs and
attempts derive from those of the runs and tasks, so that the scheduler, the workers and whatever comes of them agree on
them: a child has its parent, and an attempt the one before it, without a word between them.
"""

from __future__ import annotations

import re
import sys
from contextvars import ContextVar
from hashlib import blake2b
from typing import NamedTuple

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
LENGTH = 55
"""Characters of a traceparent of version 00, which is what is stored and sent."""

_current: ContextVar[str | None] = ContextVar("orchestrator_trace", default=None)
"""The span around the current code, where OpenTelemetry does not know it."""


class Trace(NamedTuple):
    """A traceparent, in parts."""

    trace_id: str
    span_id: str
    flags: str

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"


def parse(text: str | None) -> Trace | None:
    """Return a traceparent in parts, or None where it is none: such a header is to be ignored."""
    found = _TRACEPARENT.fullmatch(text) if text is not None else None
    if text is None or found is None or (text.startswith("00") and found[4] is not None):
        return None
    return Trace(found[1], found[2], found[3])


def is_trace(text: str) -> bool:
    """Say whether this is a traceparent as it is stored and sent."""
    return len(text) == LENGTH and text.startswith("00-") and parse(text) is not None


# -- the current code


def current_trace() -> str | None:
    """Return the span around the current code: that of OpenTelemetry, if the program uses it and there is one."""
    api = sys.modules.get("opentelemetry.trace")
    if api is not None and hasattr(api, "get_current_span"):  # else it is being imported
        span = api.get_current_span()
        if span is not api.INVALID_SPAN and (context := span.get_span_context()).is_valid:
            return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 0xFF:02x}"
    return _current.get()


def set_trace(trace: str | None) -> None:
    """Have the current thread or coroutine belong to a span, or to none."""
    _current.set(trace)


def log_fields() -> dict[str, str]:
    """Return what a line of the log knows of the span that it was written in."""
    trace = current_trace()
    return {} if trace is None else fields_of(trace)


def fields_of(trace: str) -> dict[str, str]:
    """Return what a line of the log says of a span."""
    return {"trace_id": trace[3:35], "span_id": trace[36:52]}


# -- ids that derive from others


def run_span(run: bytes) -> str:
    """Return the id of the span of a run: the second half of its own, as `store/tasks/row.py` knows too."""
    return run[8:].hex()


def attempt_span(task: bytes, attempt: int) -> str:
    """Return the id of the span of an attempt."""
    return blake2b(task + attempt.to_bytes(4, "big"), digest_size=8).hexdigest()


def own_trace(identifier: bytes) -> str:
    """Return the id of the trace of a task or run that came of no span."""
    return blake2b(identifier, digest_size=16).hexdigest()


def below(trace: str, span: str) -> str:
    """Return the traceparent of what comes of another span of the same trace."""
    return f"{trace[:36]}{span}{trace[52:]}"
