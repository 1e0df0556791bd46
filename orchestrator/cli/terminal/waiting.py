"""Waiting on the command line, with warnings about obstacles."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from orchestrator.cli.terminal.output import echo
from orchestrator.errors import ResultTimeout, Unavailable

_INTERVAL = 3.0
"""Seconds after which a waiter asks why, and asks again."""

T = TypeVar("T")


class ObstacleNotices:
    """Says what keeps an end from coming, when that has been waited for a while; each only once."""

    def __init__(self, obstacles: Callable[[], list[str]], say: Callable[[str], None] | None = None) -> None:
        self._obstacles = obstacles
        self._say = say or (lambda text: echo(text, colour="yellow", err=True))
        self._ask_at = time.monotonic() + _INTERVAL
        self._told: set[str] = set()

    def goes_on(self) -> None:
        """Ask what is in the way, if it is time."""
        if time.monotonic() < self._ask_at:
            return
        self._ask_at = time.monotonic() + _INTERVAL
        try:
            found = self._obstacles()
        except Unavailable:
            return  # the wait goes on, and says so itself
        for obstacle in found:
            if obstacle not in self._told:
                self._told.add(obstacle)
                self._say(f"! {obstacle}")


def wait_with_notices(wait: Callable[[float], T], obstacles: Callable[[], list[str]]) -> T:
    """Wait for an end, and say meanwhile what keeps it from coming."""
    notices = ObstacleNotices(obstacles)
    while True:
        try:
            return wait(_INTERVAL)
        except ResultTimeout:
            notices.goes_on()
