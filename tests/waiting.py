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

    Between two checks, sleep twice as long as a check took, to leave the processor to other processes.
    """

    def check() -> T | None:
        began = time.perf_counter()
        if not (found := condition()):
            time.sleep(min(0.1, 2 * (time.perf_counter() - began)))
        return found

    return executor_stage.eventually(check, what, timeout, every=every)
