"""How much one tick may do, so that it ends well within the lease whatever is pending."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

SHARE = 0.1
"""Of the lease, the time in which a tick plans runs. Whoever has work to be handed out waits for it."""
SLICE = 5_000
"""Steps that are planned between two looks at the clock."""


@dataclass
class Budget:
    """What is left of a tick's time, and how much it does at once."""

    monotonic: Callable[[], float] = time.monotonic
    until: float = math.inf
    slice: int = SLICE
    """Steps to be planned at once; fewer after a tick that took too long."""

    @property
    def is_spent(self) -> bool:
        """Say whether what has not been begun has to wait for the next tick."""
        return self.monotonic() >= self.until
