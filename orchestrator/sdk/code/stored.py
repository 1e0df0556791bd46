"""What a history names in the payload store, read for the code that is shown it."""

from __future__ import annotations

from typing import get_args

from orchestrator.domain.code.history import EndRecord, Event
from orchestrator.domain.sealed import changed
from orchestrator.payloads.keeping import read_encoded
from orchestrator.references import whole_reference

_NEVER_SHOWN = get_args(EndRecord)
"""How a run ended: no code looks at that again, and only who compares everything reads it."""


def read_event(event: Event, *, everything: bool = False) -> Event:
    """Return an event whose stored values have been read: code must not meet an outage in the middle of a turn."""
    if isinstance(event.what, _NEVER_SHOWN) and not everything:
        return event
    what = changed(event.what, _content, lambda error: error)
    return event if what is event.what else Event(event.number, event.at, what)


def _content(_: bytes, data: bytes) -> bytes:
    stored = whole_reference(data)
    return data if stored is None else read_encoded(stored)
