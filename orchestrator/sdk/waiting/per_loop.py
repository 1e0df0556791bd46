"""What an event loop has for itself, in the process that runs it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from orchestrator.sdk.waiting.per_process import PerProcess

T = TypeVar("T")


class PerLoop(Generic[T]):
    """Something that each event loop makes when it first needs it. Loops that are closed are forgotten."""

    def __init__(self, make: Callable[[asyncio.AbstractEventLoop], T]) -> None:
        self._make = make
        self._made: PerProcess[dict[asyncio.AbstractEventLoop, T]] = PerProcess(dict)

    def __call__(self) -> T:
        """Return what the running loop has."""
        loop, made = asyncio.get_running_loop(), self._made()
        found = made.get(loop)
        if found is None:
            for other in list(made):  # those of other threads come and go
                if other.is_closed():
                    made.pop(other, None)
            found = made[loop] = self._make(loop)
        return found
