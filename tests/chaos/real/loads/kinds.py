"""How a kind of load is registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tests.chaos.real.client import Client

Load = Callable[["Client"], None]
LOADS: Final[dict[str, tuple[Load, int]]] = {}
"""Every kind by name, with its weight."""
ONLY_IF_NAMED: Final = 0
"""The weight of what is left out, unless somebody names it: `--loads`."""
LENGTHS: Final = (0.0, 0.0, 0.0, 0.01, 0.05, 0.3)
"""Seconds that most tasks take."""


def load(weight: int) -> Callable[[Load], Load]:
    """Register a kind of load."""

    def register(function: Load) -> Load:
        LOADS[function.__name__] = function, weight
        return function

    return register
