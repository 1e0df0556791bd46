"""New ids, from the clock and chance."""

from __future__ import annotations

import os
import time

from orchestrator.domain.ids import time_ordered_id


def new_id() -> bytes:
    """Return a new id, later in order than those before it."""
    return time_ordered_id(time.time_ns() // 1_000_000, os.urandom(10))
