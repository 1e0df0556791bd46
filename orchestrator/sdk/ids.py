"""New ids, from the clock and chance, and ids as people give them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from uuid import UUID

from orchestrator.domain.ids import time_ordered_id
from orchestrator.errors import NotFound
from orchestrator.sdk.checks import shown

_AT_ONCE = 64
"""Ids for which there is enough of it."""


def new_id() -> bytes:
    """Return a new id, later in order than those before it."""
    return time_ordered_id(time.time_ns() // 1_000_000, os.urandom(10))


def parse_id(what: str, value: str | UUID) -> bytes:
    """Return an id as bytes, or say that this is none."""
    try:
        return (value if isinstance(value, UUID) else UUID(value)).bytes
    except (ValueError, TypeError, AttributeError):
        raise NotFound(f"{shown(value)} is not the id of a {what}: expected a UUID.") from None


def new_ids() -> Iterator[bytes]:
    """Yield new ids, as many as are asked for; chance is fetched for many at once."""
    while True:
        noise = os.urandom(10 * _AT_ONCE)
        for start in range(0, len(noise), 10):
            yield time_ordered_id(time.time_ns() // 1_000_000, noise[start : start + 10])
