"""The cost of a function in calls, which does not depend on machine load."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls_of(function: Callable[[], object]) -> Counter[str]:
    """Count the Python calls (`call`) and C calls (`c_call`) that a function makes."""
    calls: Counter[str] = Counter()

    def count(_: FrameType, event: str, __: Any) -> None:
        calls[event] += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls
