"""Waiting for something to become true, instead of sleeping and hoping."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(
    condition: Callable[[], T | None], what: str = "what was waited for", timeout: float = 60.0, *, every: float = 0.01
) -> T:
    """Return the condition's first true value; fail if there is none in `timeout` seconds, saying what never came."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout:g} s; the last value was {value!r}")
        time.sleep(every)
    return value
