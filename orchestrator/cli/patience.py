"""Waiting on the command line: whoever waits is told what is in the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from orchestrator.cli.output import echo
from orchestrator.errors import ResultTimeout, Unavailable

_PATIENCE = 3.0
"""Seconds after which a waiter asks why, and asks again."""

T = TypeVar("T")


def wait_told(wait: Callable[[float], T], obstacles: Callable[[], list[str]]) -> T:
    """Wait for an end, and say meanwhile what keeps it from coming; each only once."""
    told: set[str] = set()
    while True:
        try:
            return wait(_PATIENCE)
        except ResultTimeout:
            for obstacle in _now(obstacles):
                if obstacle not in told:
                    told.add(obstacle)
                    echo(f"! {obstacle}", colour="yellow", err=True)


def _now(obstacles: Callable[[], list[str]]) -> list[str]:
    try:
        return obstacles()
    except Unavailable:
        return []  # the wait goes on, and says so itself
