"""What something costs, however busy the machine is: how many functions it calls."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls_of(function: Callable[[], object]) -> Counter[str]:
    """Return how many functions of Python (`call`) and of C (`c_call`) a function calls."""
    calls: Counter[str] = Counter()

    def count(_: FrameType, event: str, __: Any) -> None:
        calls[event] += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls
