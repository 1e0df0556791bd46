"""Waiting for a condition instead of sleeping."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from orchestrator.testing import executor_stage

__all__ = ["eventually"]
T = TypeVar("T")


def eventually(
    condition: Callable[[], T | None],
    what: str = "the awaited condition",
    timeout: float = 60.0,
    *,
    every: float = 0.01,
) -> T:
    """Return the condition's first true value, as `orchestrator.testing` does.

    Between two looks, leave the processor for twice the time of a look to those that are waited for.
    """

    def look() -> T | None:
        began = time.perf_counter()
        if not (found := condition()):
            time.sleep(min(0.1, 2 * (time.perf_counter() - began)))
        return found

    return executor_stage.eventually(look, what, timeout, every=every)
