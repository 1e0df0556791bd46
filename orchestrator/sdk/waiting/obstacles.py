"""Why a task or run does not end, for callers that wait for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from orchestrator.domain.ids import to_text
from orchestrator.errors import Unavailable
from orchestrator.telemetry import get_logger

log = get_logger("client")

_ASK_AGAIN = 5.0
"""Seconds in which one waiter asks for all."""
_SAY_AGAIN = 60.0
"""Seconds between two warnings to a caller that still waits."""


class ObstacleLog:
    """Logs what is in the way of one of those that are waited for; nothing is said twice in a minute."""

    def __init__(self, find: Callable[[bytes], list[str]]) -> None:
        """`find` says what keeps something from its end."""
        self._find = find
        self._ask_at = 0.0
        self._told: dict[str, float] = {}

    def look(self, identifier: bytes) -> None:
        """Ask for the obstacle, at most once in a while, and log it."""
        now = time.monotonic()
        if now < self._ask_at:
            return
        self._ask_at = now + _ASK_AGAIN
        with contextlib.suppress(Unavailable):
            for obstacle in self._find(identifier):
                if now - self._told.get(obstacle, -_SAY_AGAIN) >= _SAY_AGAIN:
                    log.warning("client.waiting id=%s: %s", to_text(identifier), obstacle)
                    self._told[obstacle] = now
