"""The registry of loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tests.chaos.real.client import Client

Load = Callable[["Client"], None]
LOADS: Final[dict[str, tuple[Load, int]]] = {}
"""Every load by name, with its weight."""
ONLY_IF_NAMED: Final = 0
"""Weight of a load that runs only if `--loads` names it."""
LENGTHS: Final = (0.0, 0.0, 0.0, 0.01, 0.05, 0.3)
"""Durations of most tasks, in seconds."""


def load(weight: int) -> Callable[[Load], Load]:
    """Register a load with its weight."""

    def register(function: Load) -> Load:
        LOADS[function.__name__] = function, weight
        return function

    return register
