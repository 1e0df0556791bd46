"""New ids, made from the clock and random bytes, and the parsing of ids that users provide."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from uuid import UUID

from orchestrator.domain.ids import time_ordered_id
from orchestrator.errors import NotFound
from orchestrator.sdk.checks import for_message

_BATCH = 64
"""Ids whose random bytes are fetched in one system call."""


def new_id() -> bytes:
    """Return a new id. Ids sort by the time of their creation."""
    return time_ordered_id(time.time_ns() // 1_000_000, os.urandom(10))


def parse_id(what: str, value: str | UUID) -> bytes:
    """Return an id as bytes. Raise NotFound if the value is not a UUID."""
    try:
        return (value if isinstance(value, UUID) else UUID(value)).bytes
    except (ValueError, TypeError, AttributeError):
        raise NotFound(f"{for_message(value)} is not the id of a {what}: expected a UUID.") from None


def new_ids() -> Iterator[bytes]:
    """Yield new ids without end. Random bytes are fetched for many ids at once."""
    while True:
        noise = os.urandom(10 * _BATCH)
        for start in range(0, len(noise), 10):
            yield time_ordered_id(time.time_ns() // 1_000_000, noise[start : start + 10])
